"""Who runs the cells: processes of this machine.

An engine takes the cells that are missing and yields, in any order, each with its result or with the reason why it failed.
A worker that dies (killed, out of memory, its machine gone) takes nothing with it but the cell it was at, which is tried
again `TRIES` times in all. Results travel to the driver, which alone writes; so a driver that dies loses the cells under
way and nothing else, and workers end with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from longspan.evaluation.sweeps.cells import run_cell
from longspan.evaluation.sweeps.grid import Cell
from longspan.registry import Refused, nearest

TRIES = 3
"""How often a cell is begun before its worker's death counts as its own fault."""
Done = tuple[Cell, dict[str, Any]]
"""A cell with its result; ``{"failed": reason}`` where there is none."""


def run_cells(cells: Sequence[Cell], engine: str, workers: int) -> Iterator[Done]:
    """Run `cells` on an engine. Raises `Refused` for one that doesn't exist, or fewer than one worker."""
    if engine not in ENGINES:
        raise Refused(f"--engine: {nearest(engine, ENGINES, 'engine')}")
    if workers < 1:
        raise Refused(f"--workers {workers}: expected at least 1.")
    if not cells:
        return iter(())
    return ENGINES[engine](cells, workers)


# --------------------------------------------------------------------------------------------------------------- local


@dataclass
class Worker:
    """A process of ours, the pipe to it, and the cell it is at."""

    process: Any
    pipe: Connection
    cell: Cell | None = None


def local(cells: Sequence[Cell], workers: int) -> Iterator[Done]:
    """Processes of this machine, one thread each unless there is only one."""
    waiting, tries = deque(cells), dict.fromkeys(cells, 0)
    pool = [_start(workers) for _ in range(min(workers, len(cells)))]
    try:
        for worker in pool:
            _give(worker, waiting, tries)
        while any(worker.cell is not None for worker in pool):
            busy = {worker.pipe: worker for worker in pool if worker.cell is not None}
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                cell = worker.cell
                assert cell is not None
                try:
                    yield cell, worker.pipe.recv()
                except (EOFError, ConnectionError):
                    worker.process.join()
                    if tries[cell] < TRIES:
                        waiting.appendleft(cell)
                    else:
                        yield cell, {"failed": f"its worker died {TRIES} times ({_how(worker.process.exitcode)})."}
                    fresh = _start(workers)
                    worker.process, worker.pipe = fresh.process, fresh.pipe
                _give(worker, waiting, tries)
    finally:
        for worker in pool:
            worker.pipe.close()
            worker.process.terminate()
        for worker in pool:
            worker.process.join()


def _start(workers: int) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_cells, args=(theirs, os.getpid(), workers > 1), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed
    return Worker(process, ours)


def _give(worker: Worker, waiting: deque[Cell], tries: dict[Cell, int]) -> None:
    worker.cell = waiting.popleft() if waiting else None
    if worker.cell is not None:
        tries[worker.cell] += 1
        with contextlib.suppress(OSError):  # it died already, which reading from it will tell
            worker.pipe.send(worker.cell.as_json())


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def serve_cells(pipe: Connection, parent: int, one_thread: bool) -> None:
    """A worker's life: a cell comes in, a result goes out, until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends it
    if one_thread:
        import torch

        torch.set_num_threads(1)
    while os.getppid() == parent:
        try:
            cell = Cell.from_json(pipe.recv())
        except (EOFError, OSError):
            return
        found = attempt(cell)
        try:
            pipe.send(found)
        except OSError:
            return


def attempt(cell: Cell) -> dict[str, Any]:
    """`run_cell`, with an error of the cell as a reason."""
    try:
        return run_cell(cell)
    except Exception as error:  # whatever a method of the user's raises belongs to its cell, not to the sweep
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"failed": f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}, line {last.lineno})"}


ENGINES = {"local": local}
