"""What ``longspan sweep`` and ``longspan sweep status`` do."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan.evaluation.runner import write_parquet
from longspan.evaluation.sweeps.cells import Folder, Run
from longspan.evaluation.sweeps.engines import check_engine, run_cells
from longspan.evaluation.sweeps.grid import Grid
from longspan.registry import Refused

Progress = Callable[[int, int, str], None]
REPORTS = ("rows.parquet", "summary.json", "report.html")
"""What is made of all rows at the end of a run."""


@dataclass(frozen=True)
class State:
    """Where a sweep stands."""

    finished: int
    refused: list[tuple[str, str]]
    """Cells whose combination is refused as declared, with the sentence; they count as finished."""
    failed: list[tuple[str, str]]
    """Cells that failed at their latest try, with the reason."""
    missing: int
    """Neither finished nor failed."""
    rows: list[dict[str, Any]] = field(repr=False, default_factory=list)
    busy: bool = False
    """Whether a run is at work on it."""
    run: Run | None = None
    """How far the latest run got."""

    @property
    def total(self) -> int:
        return self.finished + len(self.failed) + self.missing

    def as_json(self) -> dict[str, Any]:
        """Counts, and the cells that were refused or failed."""
        unhappy = {name: [{"cell": cell, "reason": reason} for cell, reason in found]
                for name, found in (("refused", self.refused), ("failed", self.failed))}
        left = None if self.run is None or not self.busy else self.run.left
        return {"cells": self.total, "finished": self.finished, "missing": self.missing, "running": self.busy,
                "seconds_left": left} | unhappy


def state_of(folder: Folder, grid: Grid) -> State:
    """Where the sweep `grid` stands in `folder`."""
    refused, failed, rows = [], [], []
    finished = missing = 0
    for cell in grid.cells():
        if folder.has(cell):
            finished += 1
            if reason := folder.refusal(cell):
                refused.append((str(cell), reason))
            rows += folder.rows(cell)
        elif reason := folder.failure(cell):
            failed.append((str(cell), reason))
        else:
            missing += 1
    return State(finished, refused, failed, missing, rows)


def sweep(grid: Grid, out: Path, engine: str = "local", workers: int | None = None,
          progress: Progress | None = None, address: str | None = None) -> State:
    """Run what is missing of `grid` in `out`, then write all rows as ``rows.parquet``.

    Failed cells of an earlier run are tried again; finished ones are never. `engine`, `workers` and `address` as for
    `engines.run_cells`. Raises `Refused` for a folder that can't be used or is in use, and for an engine that can't be had.
    """
    check_engine(engine, workers, address)
    cells = list(grid.cells())
    for cell in cells:
        cell.key  # noqa: B018 - refuses a model that isn't there before anything is written
    folder = Folder.make(out)
    with folder.held():
        folder.begin(grid)
        missing = [cell for cell in cells if not folder.has(cell)]
        there = len(cells) - len(missing)
        run = Run(engine, platform.node(), os.getpid(), time.time(), len(missing))
        folder.note(run)
        for name in REPORTS:  # of an earlier grid
            (out / name).unlink(missing_ok=True)
        if progress is not None:
            progress(there, len(cells), "")
        for cell, result in run_cells(missing, engine, workers, address):
            if "failed" in result:
                folder.fail(cell, result["failed"])
            else:
                folder.finish(cell, result)
            run = replace(run, done=run.done + 1, failed=run.failed + ("failed" in result), at=time.time(), current=str(cell))
            folder.note(run)
            if progress is not None:
                progress(there + run.done, len(cells), told(run))
        state = state_of(folder, grid)
        if state.rows:
            write_parquet(out / "rows.parquet", state.rows)
    return state


def told(run: Run) -> str:
    """What to say of a run under way."""
    failed = f"{run.failed} failed · " if run.failed else ""
    return f"{failed}{duration(run.left or 0.0)} left · {run.current}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def by_model(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each model, in order: recipes are only compared on the same model."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


def read_status(path: Path) -> State:
    """Where the sweep in the folder `path` stands."""
    if not path.is_dir():
        raise Refused(f"{str(path)!r}: no such folder; expected the --out folder of `longspan sweep`.")
    folder, grid = Folder.open(path)
    busy = folder.busy
    return replace(state_of(folder, grid), busy=busy, run=folder.latest_run())
