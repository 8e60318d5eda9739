"""Start a function on several ranks of this machine, and end all of them when one ends badly.

Processes are spawned, meet through a file and talk over the loopback device, so no port has to be free. The parent waits
for one report of each: a result, or an error in words. If a process dies or an error arrives, the others get a moment to
report what they saw and are then stopped; a rank whose parent is gone stops by itself. So nothing is left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 5.0
"""Seconds that ranks have to report after one has failed, and to end."""


class RankFailed(RuntimeError):
    """A rank raised an error, died or didn't end in time. `rank` is the first, `reports` what each one said."""

    def __init__(self, message: str, rank: int | None, reports: dict[int, str]) -> None:
        super().__init__(message)
        self.rank, self.reports = rank, reports


@dataclass
class _Rank:
    process: Any
    connection: Connection
    report: tuple[str, Any] | None = None
    """(``"result"``, value), (``"error"``, text) or (``"died"``, text)."""


def launch(fn: Callable[..., Any], world_size: int, timeout: float = 300.0, *, args: Sequence[Any] = (),
           operation_timeout: float = 60.0, threads: int = 1, grace: float = GRACE) -> list[Any]:
    """Run ``fn(comm, *args)`` on `world_size` ranks and return their results, rank 0 first.

    Args:
        fn: a function of a module, since each process imports it anew.
        timeout: seconds for everything together.
        operation_timeout: seconds for one operation of `comm`, a `Communicator`.
        args: plain values, the same for all ranks; results are plain values too (numbers, text, lists, dicts).
        threads: compute threads of each rank.
        grace: seconds that the other ranks have to report after one has failed.

    Raises:
        RankFailed: in one sentence, which rank failed and how; no process is left by then.
    """
    if world_size < 1:
        raise ValueError(f"launch expects at least one rank, got {world_size}")
    if getattr(sys.modules.get(fn.__module__), fn.__qualname__.split(".")[0], None) is None or "<locals>" in fn.__qualname__:
        raise ValueError(f"launch starts {fn.__qualname__} in new processes, which import it; expected a function of a module")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="longspan-ranks-") as folder:
        store, ranks = str(Path(folder, "store")), []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                setup = (rank, world_size, store, operation_timeout, threads)
                process = context.Process(target=_run_rank, args=(theirs, setup, fn, tuple(args)), daemon=True)
                with _environment(threads):
                    process.start()
                theirs.close()
                ranks.append(_Rank(process, ours))
            _listen(ranks, time.monotonic() + timeout, grace)
        finally:
            _stop(ranks)
    return _results(ranks, timeout)


def _listen(ranks: list[_Rank], deadline: float, grace: float) -> None:
    """Collect reports until all are there, the time is over, or somebody failed and the others had their moment."""
    while True:
        waiting = [r for r in ranks if r.report is None]
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            return
        wait([r.connection for r in waiting], left)
        for r in waiting:
            if r.connection.poll():
                r.report = _read(r)
                if r.report[0] != "result":
                    deadline = min(deadline, time.monotonic() + grace)


def _read(r: _Rank) -> tuple[str, Any]:
    try:
        return r.connection.recv()
    except (EOFError, OSError):
        r.process.join(GRACE)
        code = r.process.exitcode
        if code is None:
            return "died", "closed its connection without a report"
        return "died", f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}, no report"


def _stop(ranks: list[_Rank]) -> None:
    failed = any(r.report is None or r.report[0] != "result" for r in ranks)
    for r in ranks:
        if not failed:
            r.process.join(GRACE)
        if r.process.is_alive():
            r.process.kill()
    for r in ranks:
        r.process.join()
        r.connection.close()


def _results(ranks: list[_Rank], timeout: float) -> list[Any]:
    reports = [r.report or ("late", "was still running") for r in ranks]
    said = {rank: str(text) for rank, (kind, text) in enumerate(reports) if kind != "result"}
    if not said:
        return [value for _, value in reports]
    # The cause is who died, else who raised; to lose a peer is a consequence.
    first = min(said, key=lambda rank: _as_cause(reports[rank]))
    if reports[first][0] == "late":
        late = ", ".join(map(str, said))
        raise RankFailed(f"rank {late} of {len(ranks)} didn't end within {timeout:g} s; all ranks were stopped.", first, said)
    how = "failed: " if reports[first][0] == "error" else ""
    sentence = said[first].splitlines()[0].rstrip(".")
    raise RankFailed(f"rank {first} of {len(ranks)} {how}{sentence}; all ranks were stopped.", first, said)


def _as_cause(report: tuple[str, Any]) -> int:
    kind, text = report
    return 2 if kind == "error" and text.startswith("PeerLost:") else {"died": 0, "error": 1, "late": 3}[kind]


# ------------------------------------------------------------------------------------------------------- inside a rank


def _run_rank(connection: Connection, setup: tuple[int, int, str, float, int], fn: Callable[..., Any],
              args: tuple[Any, ...]) -> None:
    """Join the group, run, report."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = _join_and_run(setup, fn, args)
    except BaseException as error:
        lines = traceback.format_exc().rstrip()
        connection.send(("error", f"{type(error).__name__}: {error}\n{lines}"))
        connection.close()
        sys.stderr.flush()
        os._exit(1)  # a group that lost a rank may never come down in good order
    connection.send(("result", result))
    connection.close()


def _join_and_run(setup: tuple[int, int, str, float, int], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, world_size, path, operation_timeout, threads = setup
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from longspan.parallel.comm import Communicator

    torch.set_num_threads(threads)
    if world_size == 1:
        return fn(Communicator(timeout=operation_timeout), *args)
    limit = timedelta(seconds=operation_timeout)
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size, timeout=limit)
    result = fn(Communicator.current(operation_timeout), *args)
    dist.destroy_process_group()
    return result


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What a new process must find set before it imports PyTorch."""
    wanted = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
