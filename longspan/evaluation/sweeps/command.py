"""What ``longspan sweep`` and ``longspan sweep status`` do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.evaluation.runner import write_parquet
from longspan.evaluation.sweeps.cells import Folder
from longspan.evaluation.sweeps.engines import run_cells
from longspan.evaluation.sweeps.grid import Grid
from longspan.registry import Refused

Progress = Callable[[int, int, str], None]


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

    @property
    def total(self) -> int:
        return self.finished + len(self.failed) + self.missing

    def as_json(self) -> dict[str, Any]:
        """Counts, and the cells that were refused or failed."""
        told = {name: [{"cell": cell, "reason": reason} for cell, reason in found]
                for name, found in (("refused", self.refused), ("failed", self.failed))}
        return {"cells": self.total, "finished": self.finished, "missing": self.missing} | told


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


def sweep(grid: Grid, out: Path, engine: str = "local", workers: int = 1,
          progress: Progress | None = None) -> State:
    """Run what is missing of `grid` in `out`, then write all rows as ``rows.parquet``.

    Failed cells of an earlier run are tried again; finished ones are never. Raises `Refused` for a folder or an engine that
    can't be used.
    """
    folder = Folder.make(out, grid)
    cells = list(grid.cells())
    missing = [cell for cell in cells if not folder.has(cell)]
    there, started = len(cells) - len(missing), time.monotonic()
    if progress is not None:
        progress(there, len(cells), "")
    for done, (cell, result) in enumerate(run_cells(missing, engine, workers), 1):
        if "failed" in result:
            folder.fail(cell, result["failed"])
        else:
            folder.finish(cell, result)
        if progress is not None:
            left = (time.monotonic() - started) / done * (len(missing) - done)
            progress(there + done, len(cells), f"{duration(left)} left · {cell}")
    state = state_of(folder, grid)
    if state.rows:
        write_parquet(out / "rows.parquet", state.rows)
    return state


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
    return state_of(*Folder.open(path))
