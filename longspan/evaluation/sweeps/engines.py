"""Who runs the cells: processes of this machine, or the workers of a Ray cluster.

An engine takes the cells that are missing and yields, in any order, each with its result or with the reason why it failed.
A worker that dies (killed, out of memory, its machine gone) takes nothing with it but the cells it was at, which are tried
again, one by one, `TRIES` times in all. Results travel to the driver, which alone writes; so a driver that dies loses the
cells under way and nothing else, and workers end with it.
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
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from longspan import registry
from longspan.evaluation.sweeps.cells import Bundle, Result, bundles, run_bundle
from longspan.evaluation.sweeps.grid import Cell
from longspan.registry import Refused, nearest

TRIES = 3
"""How often a cell is begun before its worker's death counts as its own fault."""
Done = tuple[Cell, Result]


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
    check_engine(engine, workers, address)
    if not cells:
        return iter(())
    return on_ray(bundles(cells), workers, address) if engine == "ray" else local(bundles(cells), workers or 1)


def check_engine(engine: str, workers: int | None, address: str | None) -> None:
    """Raises `Refused` for what no engine can be asked for."""
    if engine not in ENGINES:
        raise Refused(f"--engine: {nearest(engine, ENGINES, 'engine')}")
    if workers is not None and workers < 1:
        raise Refused(f"--workers {workers}: expected at least 1.")
    if engine != "ray" and address is not None:
        raise Refused(f"--address {address}: only a Ray cluster has one; expected --engine ray with it.")


# --------------------------------------------------------------------------------------------------------------- local


@dataclass
class Worker:
    """A process of ours, the pipe to it, and the cells it is at."""

    process: Any
    pipe: Connection
    cells: Bundle = ()


def local(work: Sequence[Bundle], workers: int) -> Iterator[Done]:
    """Processes of this machine, one thread each unless there is only one."""
    waiting, tries = deque(work), Counter[Cell]()
    pool = [_start(workers) for _ in range(min(workers, len(work)))]
    try:
        for worker in pool:
            _give(worker, waiting, tries)
        while any(worker.cells for worker in pool):
            busy = {worker.pipe: worker for worker in pool if worker.cells}
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                try:
                    yield from zip(worker.cells, worker.pipe.recv(), strict=True)
                except (EOFError, ConnectionError):
                    worker.process.join()
                    for cell in reversed(worker.cells):
                        if tries[cell] < TRIES:
                            waiting.appendleft((cell,))
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


def _give(worker: Worker, waiting: deque[Bundle], tries: Counter[Cell]) -> None:
    worker.cells = waiting.popleft() if waiting else ()
    tries.update(worker.cells)
    if worker.cells:
        with contextlib.suppress(OSError):  # it died already, which reading from it will tell
            worker.pipe.send([cell.as_json() for cell in worker.cells])


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def serve_cells(pipe: Connection, parent: int, one_thread: bool) -> None:
    """A worker's life: cells come in, results go out, until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends it
    if one_thread:
        import torch

        torch.set_num_threads(1)
    while os.getppid() == parent:
        try:
            cells = tuple(map(Cell.from_json, pipe.recv()))
        except (EOFError, OSError):
            return
        found = attempt(cells)
        try:
            pipe.send(found)
        except OSError:
            return


def attempt(cells: Bundle) -> list[Result]:
    """`run_bundle`, with an error of a cell as its reason."""
    try:
        return run_bundle(cells)
    except Exception as error:  # whatever a method of the user's raises belongs to its cell, not to the sweep
        if len(cells) > 1:
            return [result for cell in cells for result in attempt((cell,))]
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())
        return [{"failed": f"{type(error).__name__}: {said} ({os.path.basename(last.filename)}, line {last.lineno})"}]


ENGINES = ("local", "ray")


# ----------------------------------------------------------------------------------------------------------------- ray


def on_ray(work: Sequence[Bundle], workers: int | None, address: str | None) -> Iterator[Done]:
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
        files = {file: Path(file).read_text(encoding="utf-8") for file in work[0][0].load}
        waiting: deque[Bundle] = deque(work)
        under_way: dict[Any, Bundle] = {}
        while waiting or under_way:
            while waiting and len(under_way) < at_once(ray, workers, address):
                cells = waiting.popleft()
                under_way[remote.remote([(cell.as_json(), cell.key) for cell in cells], files)] = cells
            for reference in ray.wait(list(under_way), timeout=10)[0]:
                cells = under_way.pop(reference)
                try:
                    yield from zip(cells, ray.get(reference), strict=True)
                except ray.exceptions.RayTaskError as error:
                    reason = f"its worker can't run it: {str(error).strip().splitlines()[-1]}"
                    yield from ((cell, {"failed": reason}) for cell in cells)
                except ray.exceptions.RayError as error:
                    if len(cells) > 1:
                        waiting.extend((cell,) for cell in cells)
                    else:
                        yield cells[0], {"failed": f"its worker died {TRIES} times ({type(error).__name__})."}
    finally:
        if began:
            ray.shutdown()


def at_once(ray: Any, workers: int | None, address: str | None) -> int:
    """How many pieces of work Ray is given: as many as asked of somebody's cluster, else a few more than it has processors.

    Those in reserve save workers from waiting for the driver; machines may join and leave meanwhile.
    """
    return workers if workers and address else 2 * int(ray.cluster_resources().get("CPU", 1))


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


def attempt_elsewhere(wanted: list[tuple[dict[str, Any], str]], files: dict[str, str]) -> list[Result]:
    """`attempt` on a machine that may not be the driver's: its files come along, and all that decides rows must be the same.

    `wanted` are cells and their keys on the driver's machine.
    """
    here = {file: _copy(Path(file).name, text) for file, text in files.items()}
    cells = tuple(Cell.from_json(data | {"load": [here[file] for file in data["load"]]}) for data, _ in wanted)
    reason = ""
    try:
        for file in here.values():
            registry.load_file(file)
        if [cell.key for cell in cells] != [key for _, key in wanted]:
            reason = (f"{platform.node()} has another longspan, other weights or other libraries than the driver; expected the "
                      "same on every machine.")
    except Refused as error:
        reason = f"on {platform.node()}: {error}"
    return [{"failed": reason} for _ in cells] if reason else attempt(cells)


@functools.cache
def _copy(name: str, text: str) -> str:
    """A file of the user's, for as long as this process lives; the same text is one file, so that it is imported once."""
    folder = tempfile.mkdtemp(prefix="longspan-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / name
    copy.write_text(text, encoding="utf-8")
    return str(copy)
