"""How long things take, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def best_of(rounds: int, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Best wall time of each run in seconds; the runs take turns, so that whatever disturbs one disturbs all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(seen) for name, seen in times.items()}
