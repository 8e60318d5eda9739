"""Processes on one machine that end together: when one dies, the others are given a moment to say so and are ended.

The parent holds the store through which they meet, so that any of them may die without taking it away, and says there which
one did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST = "lost"
"""In the store: one more than the rank that died."""


class RankLost(RuntimeError):
    """A process of the group is gone or makes no progress; the message is one sentence."""


@dataclass
class Processes:
    """Running processes of one module; process i has its output in ``rank-i.log``."""

    running: list[subprocess.Popen]
    folder: Path
    store: Any

    def wait(self, timeout: float, grace: float = 5.0) -> None:
        """Until all have ended well.

        Args:
            timeout: seconds for everything.
            grace: seconds that the others have once one has died.

        Raises:
            RankLost: one died or was ended by a signal, or the time is over. None is left running.
        """
        end = time.monotonic() + timeout
        try:
            while True:
                codes = [p.poll() for p in self.running]
                failed = [i for i, code in enumerate(codes) if code]
                if failed:
                    self.store.add(LOST, failed[0] + 1)
                    self._let_end(grace)
                    raise RankLost(self._told(failed[0], codes[failed[0]] or 0))
                if all(code == 0 for code in codes):
                    return
                if time.monotonic() > end:
                    raise RankLost(f"the ranks were not done within {timeout:g} s and were ended.")
                time.sleep(0.02)
        finally:
            self.end()

    def end(self) -> None:
        """End what still runs."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
        for process in self.running:
            process.wait(10)

    def _let_end(self, grace: float) -> None:
        end = time.monotonic() + grace
        while time.monotonic() < end and any(p.poll() is None for p in self.running):
            time.sleep(0.02)

    def _told(self, rank: int, code: int) -> str:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = (self.folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"rank {rank} {how}{f' ({lines[-1]})' if lines and code > 0 else ''}; the other ranks were ended."


@contextlib.contextmanager
def processes(module: str, arguments: Sequence[str], ranks: int, folder: Path, timeout: float = 60.0) -> Iterator[Processes]:
    """Start ``python -m module arguments`` once per rank; whatever happens, none outlives the block.

    Args:
        folder: where their output goes.
        timeout: seconds they have to meet.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = Processes([], folder, store)
    here = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo",
            "LONGSPAN_MEET_S": str(timeout), "LONGSPAN_PARENT": str(os.getpid())}
    try:
        for rank in range(ranks):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                started.running.append(subprocess.Popen(
                    [sys.executable, "-m", module, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    env={**os.environ, **here, "RANK": str(rank)}))
        yield started
    finally:
        started.end()


def join() -> tuple[int, int, Any]:
    """In a started process: its rank, how many there are, and the store; the gloo group is set up.

    The process ends when its parent does.
    """
    import datetime

    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_watch_parent, args=(int(os.environ["LONGSPAN_PARENT"]),), daemon=True).start()
    timeout = datetime.timedelta(seconds=float(os.environ["LONGSPAN_MEET_S"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=ranks, timeout=timeout)
    return rank, ranks, store


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
