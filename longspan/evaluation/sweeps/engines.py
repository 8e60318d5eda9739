"""Who runs the cells: processes of this machine, or the workers of a Ray cluster.

An engine takes the cells that are missing and yields, in any order, each with its result or with the reason why it failed.
A worker that dies (killed, out of memory, its machine gone) takes nothing with it but the cell it was at, which is tried
again `TRIES` times in all. Results travel to the driver, which alone writes; so a driver that dies loses the cells under
way and nothing else, and workers end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from longspan import registry
from longspan.evaluation.sweeps.cells import run_cell
from longspan.evaluation.sweeps.grid import Cell
from longspan.registry import Refused, nearest

TRIES = 3
"""How often a cell is begun before its worker's death counts as its own fault."""
Done = tuple[Cell, dict[str, Any]]
"""A cell with its result; ``{"failed": reason}`` where there is none."""


def run_cells(cells: Sequence[Cell], engine: str = "local", workers: int | None = None,
              address: str | None = None) -> Iterator[Done]:
    """Run `cells` on an engine.

    Args:
        engine: ``local`` or ``ray``.
        workers: how many cells are run at once; 1 if left out, and on a cluster as many as it has processors.
        address: of a Ray cluster, ``auto`` for the one this machine belongs to; one is made for this run if left out.

    Raises:
        Refused: no such engine, fewer than one worker, an address without Ray, or a cluster that can't be had.
    """
    if engine not in ENGINES:
        raise Refused(f"--engine: {nearest(engine, ENGINES, 'engine')}")
    if workers is not None and workers < 1:
        raise Refused(f"--workers {workers}: expected at least 1.")
    if engine != "ray" and address is not None:
        raise Refused(f"--address {address}: only a Ray cluster has one; expected --engine ray with it.")
    if not cells:
        return iter(())
    return on_ray(cells, workers, address) if engine == "ray" else local(cells, workers or 1)


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


ENGINES = ("local", "ray")


# ----------------------------------------------------------------------------------------------------------------- ray


def on_ray(cells: Sequence[Cell], workers: int | None, address: str | None) -> Iterator[Done]:
    """Ray's workers, one processor each: of the cluster at `address`, or of one made for this run on this machine.

    Files with methods of the user's travel with the cells. A machine whose package, weights or libraries are not the driver's
    would give other rows under the same key, so it gives none: the cell fails and says so.
    """
    try:
        import ray
    except ImportError as error:
        raise Refused("--engine ray needs the package ray; pip install longspan[ray], or use --engine local.") from error
    began = not ray.is_initialized()
    if began:
        _join(ray, workers or 1, address)
    try:
        remote = ray.remote(num_cpus=1, max_retries=TRIES - 1)(attempt_elsewhere)
        files = {file: Path(file).read_text(encoding="utf-8") for file in cells[0].load}
        waiting, under_way = deque(cells), {}
        while waiting or under_way:
            # A few in reserve, so that no worker waits for the driver; machines may join and leave meanwhile.
            most = 2 * (workers if workers and not address else int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(under_way) < most:
                cell = waiting.popleft()
                under_way[remote.remote(cell.as_json(), cell.key, files)] = cell
            for reference in ray.wait(list(under_way), timeout=10)[0]:
                cell = under_way.pop(reference)
                try:
                    yield cell, ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    yield cell, {"failed": f"its worker can't run it: {str(error).strip().splitlines()[-1]}"}
                except ray.exceptions.RayError as error:
                    yield cell, {"failed": f"its worker died {TRIES} times ({type(error).__name__})."}
    finally:
        if began:
            ray.shutdown()


def _join(ray: Any, workers: int, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    own = {"num_cpus": workers, "include_dashboard": False}
    try:
        if address and (place := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)):
            # Ray itself tries for minutes.
            socket.create_connection((place[1], int(place[2])), timeout=5).close()
        ray.init(address=address or "local", **(quiet if address else quiet | own))
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]}); expected HOST:PORT, or "
                      "auto on a machine of the cluster.") from error


def attempt_elsewhere(data: dict[str, Any], key: str, files: dict[str, str]) -> dict[str, Any]:
    """`attempt` on a machine that may not be the driver's: its files come along, and all that decides rows must be the same."""
    cell = Cell.from_json(data | {"load": [_copy(Path(file).name, files[file]) for file in data["load"]]})
    try:
        for file in cell.load:
            registry.load_file(file)
        same = cell.key == key
    except Refused as error:
        return {"failed": f"on {platform.node()}: {error}"}
    if not same:
        return {"failed": f"{platform.node()} has another longspan, other weights or other libraries than the driver; expected "
                          "the same on every machine."}
    return attempt(cell)


@functools.cache
def _copy(name: str, text: str) -> str:
    """A file of the user's, for as long as this process lives; the same text is one file, so that it is imported once."""
    folder = tempfile.mkdtemp(prefix="longspan-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / name
    copy.write_text(text, encoding="utf-8")
    return str(copy)
