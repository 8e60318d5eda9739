"""From the lines of a summary to one point per recipe: what the pictures draw.

A picture pools over tasks and lengths. Tasks are fixed strata, not a sample, so the pooled accuracy is the weighted
mean of the lines and its interval combines theirs by MOVER (Zou and Donner 2008): with weights w_i, estimates p_i
and limits l_i, u_i,

    lo = p - sqrt(sum w_i^2 (p_i - l_i)^2),    hi = p + sqrt(sum w_i^2 (u_i - p_i)^2).

The answer NLL differs far more between examples than between recipes; its interval is therefore that of the *paired
difference* from the dense run, drawn around the recipe's mean. The dense run itself then has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A recipe in a picture; None where it wasn't measured.

    Bytes are means over examples right after compression, seconds are means over lines of their medians, NLL is nats
    per gold answer token.
    """

    recipe: str
    n: int
    accuracy: float | None
    lo: float | None
    hi: float | None
    answer_nll: float | None
    nll_lo: float | None
    nll_hi: float | None
    cache_bytes: float | None
    full_cache_bytes: float | None
    ttft_s: float | None
    tokens_per_s: float | None

    @property
    def share(self) -> float | None:
        """Cache bytes as a share of the dense cache's."""
        return self.cache_bytes / self.full_cache_bytes if self.cache_bytes and self.full_cache_bytes else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


def labelled(lines: Iterable[Line]) -> list[Line]:
    """The lines (or rows) with recipes named apart where one ran with both moments of compression."""
    lines = list(lines)
    modes: dict[Any, set[Any]] = {}
    for line in lines:
        modes.setdefault(line["recipe"], set()).add(line.get("compress"))
    return [
        line | {"recipe": f"{line['recipe']} ({line.get('compress')})"}
        if len(modes[line["recipe"]]) > 1 and line["recipe"] != "full"
        else line
        for line in lines
    ]


def points(summary: Iterable[Line]) -> list[Point]:
    """One `Point` per recipe, pooled over the given lines, in first-seen order."""
    groups: dict[str, list[Line]] = {}
    for line in labelled(summary):
        groups.setdefault(line["recipe"], []).append(line)
    return [_point(recipe, lines) for recipe, lines in groups.items()]


def _point(recipe: str, lines: Sequence[Line]) -> Point:
    accuracy, lo, hi = _pool(lines, lambda line: (line["accuracy"], *line["ci95"]))
    nll = _mean(lines, "answer_nll")
    off, below, above = _pool(lines, _nll_difference)
    bars = nll is not None and off is not None and below is not None and above is not None
    return Point(
        recipe, sum(line["n"] for line in lines), accuracy, lo, hi, nll,
        nll + below - off if bars else None, nll + above - off if bars else None,  # type: ignore[operator]
        _mean(lines, "cache_bytes"), _mean(lines, "full_cache_bytes"), _mean(lines, "ttft_s"),
        _mean(lines, "tokens_per_s"),
    )  # fmt: skip


def _nll_difference(line: Line) -> tuple[float | None, float | None, float | None]:
    versus = line.get("vs_full")
    return (versus["nll_difference"], *versus["nll_ci95"]) if versus else (None, None, None)


def _mean(lines: Sequence[Line], key: str) -> float | None:
    known = [(line[key], line["n"]) for line in lines if line.get(key) is not None]
    total = sum(n for _, n in known)
    return sum(value * n for value, n in known) / total if total else None


def _pool(
    lines: Sequence[Line], read: Callable[[Line], tuple[float | None, float | None, float | None]]
) -> tuple[float | None, float | None, float | None]:
    """Weighted mean and MOVER limits; no limits when one of the lines has none."""
    found = [(read(line), line["n"]) for line in lines]
    known = [(value, n) for value, n in found if value[0] is not None]
    total = sum(n for _, n in known)
    if not total:
        return None, None, None
    mean = sum(value[0] * n for value, n in known) / total  # type: ignore[operator]
    if any(value[1] is None or value[2] is None for value, _ in known):
        return mean, None, None
    down = math.sqrt(sum((n / total * (value[0] - value[1])) ** 2 for value, n in known))  # type: ignore[operator]
    up = math.sqrt(sum((n / total * (value[2] - value[0])) ** 2 for value, n in known))  # type: ignore[operator]
    return mean, mean - down, mean + up
