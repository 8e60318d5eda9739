"""Which recipes may be the best: all pairs on the same examples, with one correction over all of them.

A table of several recipes invites the reader to take the highest figure for a winner. Whether it is one is asked here: a
recipe is *worse* when some other one is shown to beat it, else it *may be the best*, and it is *the best* only when it is
alone in that. The dense run takes no part: it is the yardstick, not a contestant.

Recipes a and b differ by d_i on example i. Under "no difference" the sign of d_i is a coin toss, and

    t = |sum_i d_i| / sqrt(sum_i d_i^2)

is compared with its values under tossed signs, which is the test of `statistics.paired`. Over all pairs the toss is the same
for an example, so that the pairs' dependence stays, and Westfall and Young's step-down (1993, algorithm 2.8; Romano and Wolf
2005) holds all pairs at one level: the pair with the largest t is compared with the largest t of all pairs under each toss,
the next one with the largest of those that are left, and so on. The level holds where differences are symmetric around zero
under "no difference", as those of right-or-wrong scores are; strongly skewed ones exceed it with few examples. Unlike Holm's
correction it costs little when many recipes are nearly the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
"""All pairs together are called different by chance this often."""

EXACT_TOSSES, SAMPLED_TOSSES = 12, 9999
"""Up to so many examples all signs are tried; beyond, a sample of so many."""

MEASURES = {"accuracy": ("score", 1.0), "answer_nll": ("answer_nll", -1.0)}
"""What recipes are ranked by: the key of a line, that of a row, and 1 where more is better."""

BEST, OPEN, WORSE = "best", "may-be-best", "worse"
Standing = Literal["best", "may-be-best", "worse"]
Floats = NDArray[np.float64]
Row = Mapping[str, Any]


def standings(groups: Sequence[Mapping[Hashable, Row]], seed: int = 0) -> list[dict[str, Standing | None]]:
    """How each recipe stands among all of them, by accuracy and by answer NLL.

    Args:
        groups: for each recipe its rows, by what makes them the same example.
        seed: of the tossed signs.

    Returns:
        For each recipe, by measure: "best" (alone in that nothing is shown to beat it), "may-be-best", "worse", or None where
        it has no figure or no other recipe has one.
    """
    examples = list(dict.fromkeys(key for group in groups for key in group))
    out: list[dict[str, Standing | None]] = [dict.fromkeys(MEASURES) for _ in groups]
    for name, (key, sign) in MEASURES.items():
        table = np.array([[_number(group.get(at, {}).get(key)) for group in groups] for at in examples])
        known = np.flatnonzero(~np.isnan(table).all(axis=0)) if table.size else ()
        if len(known) > 1:
            for i, found in zip(known, standing(sign * table[:, known], seed)):
                out[i][name] = found
    return out


def standing(values: Floats, seed: int = 0, level: float = LEVEL) -> list[Standing]:
    """How each of k >= 2 recipes stands.

    Args:
        values: (n, k) by example and recipe, more is better; NaN where a recipe has none for an example.
        level: of all pairs together.
    """
    beaten = [any(p < level for p in column if p is not None) for column in zip(*better(values, seed))]
    may = [not one for one in beaten]
    if not any(may):  # only where recipes have read different examples: three may then beat each other in a circle
        may = [True] * len(may)
    return [WORSE if not one else BEST if sum(may) == 1 else OPEN for one in may]  # type: ignore[misc]


def better(values: Floats, seed: int = 0) -> list[list[float | None]]:
    """(k, k) adjusted p-values of "a beats b", None where a's mean isn't above b's on the examples that both have."""
    k = values.shape[1]
    pairs = list(itertools.combinations(range(k), 2))
    with np.errstate(invalid="ignore"):
        d = values[:, [a for a, _ in pairs]] - values[:, [b for _, b in pairs]]
    d[:, np.isinf(d).any(axis=0)] = 0.0  # an infinite difference has no mean to compare
    d[np.isnan(d)] = 0.0
    out: list[list[float | None]] = [[None] * k for _ in range(k)]
    for (a, b), total, p in zip(pairs, d.sum(axis=0), step_down(d, seed)):
        if total:
            out[a if total > 0 else b][b if total > 0 else a] = float(p)
    return out


def step_down(d: Floats, seed: int = 0) -> Floats:
    """Adjusted two-sided p-values (m,) of m paired comparisons.

    Args:
        d: (n, m) differences by example and comparison; 0 where one of the two has no value.
        seed: of the tossed signs.
    """
    d = d[np.any(d != 0, axis=1)]  # an example without any difference has no sign to toss
    size = np.sqrt((d**2).sum(axis=0))
    d = d / np.where(size > 0, size, 1.0)
    t = np.abs(d.sum(axis=0))
    order = np.argsort(-t, kind="stable")
    exceeded, tossed = np.zeros(len(t)), 0
    for signs in _tosses(len(d), len(t), seed):
        # From the smallest t up: the largest value among this comparison and all with a smaller t.
        highest = np.maximum.accumulate(np.abs(signs @ d[:, order[::-1]]), axis=1)[:, ::-1]
        exceeded += (highest >= t[order] * (1 - 1e-12)).sum(axis=0)
        tossed += len(signs)
    extra = 0 if len(d) <= EXACT_TOSSES else 1  # among sampled signs, those seen count as one
    p = np.empty(len(t))
    p[order] = np.maximum.accumulate((exceeded + extra) / (tossed + extra))
    return p


def _tosses(n: int, comparisons: int, seed: int) -> Iterator[Floats]:
    """Sign patterns (some, n), a few at a time: all of them, or a sample."""
    if n <= EXACT_TOSSES:
        yield 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return
    rng, left = np.random.default_rng(seed), SAMPLED_TOSSES
    while left:
        some = min(left, max(1, 4_000_000 // max(n, comparisons)))
        yield 1.0 - 2.0 * rng.integers(0, 2, (some, n), dtype=np.int8)
        left -= some


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
