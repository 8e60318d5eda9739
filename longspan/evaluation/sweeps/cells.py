"""The folder of a sweep: one file for each finished cell, whole or not there at all.

``grid.json`` is the sweep as asked for, ``cells/KEY.json`` the rows of a finished cell, ``failed/KEY.json`` why one failed at
its latest try, ``run.json`` how far the latest run got. One run at a time holds the folder's lock. A file is written beside its
place, flushed to disk and renamed, so that whoever is killed leaves either all of it or nothing. Finished cells are never
written again; failed ones are tried again by the next run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from longspan import registry
from longspan.evaluation.runner import Request, parse_task, run
from longspan.evaluation.sweeps.grid import Cell, Grid
from longspan.models import load
from longspan.recipe import Recipe
from longspan.registry import Refused

Row = dict[str, Any]
Bundle = tuple[Cell, ...]
"""Cells that are run together."""
Result = dict[str, Any]
"""Of a cell: ``{"rows": […], "seconds": …}``, ``{"refused": …}`` or ``{"failed": reason}``."""


@dataclass(frozen=True)
class Run:
    """How far a run got; times are seconds since 1970."""

    engine: str
    host: str
    process: int
    started: float
    cells: int
    """Cells that were missing when it began."""
    done: int = 0
    failed: int = 0
    at: float = 0.0
    """When the latest cell was done."""
    current: str = ""
    """The cell that was done last."""

    @property
    def left(self) -> float | None:
        """Seconds left at the pace so far, None before the first cell."""
        return (self.at - self.started) / self.done * (self.cells - self.done) if self.done else None


@dataclass(frozen=True)
class Folder:
    """The cells of a sweep on disk."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Folder:
        """The folder of a sweep, made if it isn't there."""
        try:
            for part in ("cells", "failed"):
                (path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"--out {str(path)!r} can't be made a folder ({error.strerror}).") from error
        return cls(path)

    def begin(self, grid: Grid) -> None:
        """From now on this is the folder of `grid`; finished cells of an earlier grid are kept."""
        self._write(self.path / "grid.json", asdict(grid))

    @classmethod
    def open(cls, path: Path) -> tuple[Folder, Grid]:
        """A folder that a sweep was begun in, with its grid. `Refused` where there is none."""
        file = path / "grid.json"
        if not file.is_file():
            raise Refused(f"{str(path)!r}: no sweep there; expected the --out folder of `longspan sweep`.")
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        data |= {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(path), Grid(**data)

    def has(self, cell: Cell) -> bool:
        return (self.path / "cells" / f"{cell.key}.json").is_file()

    def rows(self, cell: Cell) -> list[Row]:
        """The rows of a finished cell."""
        return json.loads((self.path / "cells" / f"{cell.key}.json").read_text(encoding="utf-8"))["rows"]

    def refusal(self, cell: Cell) -> str | None:
        """Why a finished cell has no rows: its combination is refused as declared; None where it has."""
        return json.loads((self.path / "cells" / f"{cell.key}.json").read_text(encoding="utf-8")).get("refused")

    def failure(self, cell: Cell) -> str | None:
        """Why a cell failed at its latest try, None if it didn't."""
        file = self.path / "failed" / f"{cell.key}.json"
        return json.loads(file.read_text(encoding="utf-8"))["reason"] if file.is_file() else None

    def finish(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a cell's result: ``{"rows": […], "seconds": …}`` or ``{"refused": …}``."""
        self._write(self.path / "cells" / f"{cell.key}.json", {"cell": cell.as_json()} | result)
        (self.path / "failed" / f"{cell.key}.json").unlink(missing_ok=True)

    def fail(self, cell: Cell, reason: str) -> None:
        """Keep why a cell failed."""
        self._write(self.path / "failed" / f"{cell.key}.json", {"cell": cell.as_json(), "reason": reason})

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for one run. `Refused` while another one does, which would run the same cells twice."""
        lock = self._lock()
        try:
            lock.acquire(timeout=0)
        except Timeout:
            run = self.latest_run()
            who = "" if run is None else f" (process {run.process} on {run.host})"
            raise Refused(f"--out {str(self.path)!r}: another run is at work there{who}; see `longspan sweep status`, or take "
                          "another folder.") from None
        try:
            yield
        finally:
            lock.release()

    @property
    def busy(self) -> bool:
        """Whether a run is at work here."""
        try:
            with self._lock().acquire(timeout=0):
                return False
        except Timeout:
            return True

    def _lock(self) -> FileLock:
        return FileLock(self.path / ".lock", thread_local=False)

    def note(self, run: Run) -> None:
        """Keep how far a run got."""
        self._write(self.path / "run.json", asdict(run))

    def latest_run(self) -> Run | None:
        file = self.path / "run.json"
        return Run(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    @staticmethod
    def _write(file: Path, data: Any) -> None:
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        with beside.open("w", encoding="utf-8") as out:
            json.dump(data, out, ensure_ascii=False)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)


def bundles(cells: Iterable[Cell]) -> list[Bundle]:
    """What a worker takes at once: a cell, or with ``read_once`` all cells that read the same examples on the same model."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(replace(cell, recipe="") if cell.read_once else cell, []).append(cell)
    return [tuple(together) for together in found.values()]


def run_bundle(cells: Bundle) -> list[Result]:
    """Each cell's result, wherever this runs: rows, or the sentence with which its combination is refused."""
    try:
        for file in cells[0].load:
            registry.load_file(file)
        return _run(cells)
    except Refused as error:
        if len(cells) == 1:
            return [{"refused": str(error), "rows": [], "seconds": 0.0}]
    good = tuple(cell for cell in cells if _can_be_asked(cell))
    parts = [good] if 0 < len(good) < len(cells) else [(cell,) for cell in good]
    parts += [(cell,) for cell in cells if cell not in good]
    found = {cell: result for part in parts for cell, result in zip(part, run_bundle(part), strict=True)}
    return [found[cell] for cell in cells]


def _run(cells: Bundle) -> list[Result]:
    started = time.perf_counter()
    request = _request(cells)
    rows: dict[str, list[Row]] = {}
    for row in run(_model(cells[0]), request):
        rows.setdefault(row["recipe"], []).append(row)
    seconds = (time.perf_counter() - started) / len(cells)
    return [{"rows": rows[recipe.name or str(recipe)], "seconds": seconds} for recipe in request.recipes]


def _request(cells: Bundle) -> Request:
    cell = cells[0]
    return Request([Recipe.parse(other.recipe) for other in cells], [parse_task(cell.task)], [cell.length], cell.examples,
                   cell.seed, cell.compress, max_new_tokens=cell.max_new_tokens, read_once=cell.read_once)


def _can_be_asked(cell: Cell) -> bool:
    try:
        _request((cell,))
    except Refused:
        return False
    return True


_loaded: dict[tuple[str | None, str | None], Any] = {}
"""The model of the latest cell of this process."""


def _model(cell: Cell) -> Any:
    key = cell.model, cell.dtype
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = load(cell.model, dtype=cell.dtype)
    return _loaded[key]
