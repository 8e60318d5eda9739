"""Axes of a picture: where a value falls, and which round values carry a tick."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LOG_FROM = 4.0
"""A positive axis becomes logarithmic when its largest value is this many times its smallest."""

NARROWEST = 0.001
"""Smallest range of an axis, as a share of its largest value; finer differences are noise."""


@dataclass(frozen=True)
class Scale:
    """A map from values in [lo, hi] to pixels in [start, end], linear or logarithmic, with its ticks."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = field(default=())

    def __call__(self, value: float) -> float:
        read: Callable[[float], float] = math.log if self.log else float
        part = (read(value) - read(self.lo)) / (read(self.hi) - read(self.lo))
        return self.start + part * (self.end - self.start)


def scale(
    values: Iterable[float], start: float, end: float, *, pad: float = 0.06, low: float = -math.inf,
    high: float = math.inf, least: float = 0.0, base: float = 10.0, log: bool | None = False, count: int = 6,
) -> Scale:  # fmt: skip
    """A scale that shows all of `values`.

    Args:
        start, end: pixels of the smallest and largest value (may run backwards).
        pad: room on both sides, as a share of the range.
        low, high: values the axis never goes beyond.
        least: smallest range shown.
        base: 10, or 1024 for bytes, whose round values are round in KiB, MiB, ...
        log: logarithmic or not; None decides by the range.
        count: about how many ticks.
    """
    known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    small, large = min(known), max(known)
    if log is None:
        log = small > 0 and large / small >= LOG_FROM
    if log:
        room = (large / small) ** pad
        small, large = small / room, large * room
        return Scale(small, large, start, end, True, tuple(log_ticks(small, large, base, count)))
    width = max(large - small, least, NARROWEST * max(abs(small), abs(large))) or 1.0
    middle = (small + large) / 2
    small, large = middle - width * (0.5 + pad), middle + width * (0.5 + pad)
    # Move into the allowed range before cutting, so that a flat set of values at an edge still gets its width.
    small, large = (low, large + low - small) if small < low else (small, large)
    small, large = (small + high - large, high) if large > high else (small, large)
    small = max(small, low)
    return Scale(small, large, start, end, False, tuple(linear_ticks(small, large, base, count)))


def linear_ticks(lo: float, hi: float, base: float = 10.0, count: int = 6) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten (of a power of ten of the unit, when base is 1024)."""
    unit = _unit(hi, base)
    lo, hi = lo / unit, hi / unit
    rough = max((hi - lo) / max(count, 1), 1e-300)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(lo / step - 1e-9)
    last = math.floor(hi / step + 1e-9)
    return [float(f"{i * step:.12g}") * unit for i in range(first, last + 1)]


def log_ticks(lo: float, hi: float, base: float = 10.0, count: int = 6) -> list[float]:
    """Powers of two for bytes, 1-2-5 steps otherwise, thinned to about `count`."""
    if base == 1024:
        found = [2.0**k for k in range(math.ceil(math.log2(lo)), math.floor(math.log2(hi)) + 1)]
    else:
        powers = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
        found = [m * 10.0**k for k in powers for m in (1, 2, 5) if lo <= m * 10.0**k <= hi]
    return found[:: max(1, math.ceil(len(found) / (count + 1)))]


def _unit(hi: float, base: float) -> float:
    if base != 1024 or hi <= 0:
        return 1.0
    return 1024.0 ** max(0, math.floor(math.log(hi, 1024) + 1e-9))
