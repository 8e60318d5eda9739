"""Needle heat maps as numbers: the mean score by where the needle lies and how long the text is, one map per recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from longspan.reporting.points import labelled

MOST_DEPTHS = 12
"""More different depths than this are put into ten equal bins."""


class NeedleMap(NamedTuple):
    """One recipe and task: `values[d][l]` is the mean at depth bin d (from the text's start down) and length l.

    `counts` holds how many examples stand behind each; a value without any is None.
    """

    recipe: str
    task: str
    depths: list[float]
    lengths: list[int]
    values: list[list[float | None]]
    counts: list[list[int]]


def needle_maps(rows: Iterable[dict[str, Any]], metric: str = "score") -> list[NeedleMap]:
    """Maps of every task whose rows know a depth (0 = start of the text, 1 = its end), per recipe.

    Args:
        rows: result rows; those without a depth or without the metric don't count.
        metric: "score" or "answer_nll".
    """
    known = [row for row in labelled(rows) if _is_number(row.get("depth"))]
    maps = []
    for task in dict.fromkeys(row["task"] for row in known):
        here = [row for row in known if row["task"] == task]
        depths = _bins([float(row["depth"]) for row in here])
        lengths = sorted({row["length"] for row in here})
        for recipe in dict.fromkeys(row["recipe"] for row in here):
            cells: dict[tuple[int, int], list[float]] = {}
            for row in here:
                if row["recipe"] == recipe and _is_number(row.get(metric)):
                    at = _nearest(float(row["depth"]), depths), lengths.index(row["length"])
                    cells.setdefault(at, []).append(float(row[metric]))
            grid = [[cells.get((d, n), []) for n in range(len(lengths))] for d in range(len(depths))]
            values = [[sum(cell) / len(cell) if cell else None for cell in line] for line in grid]
            counts = [[len(cell) for cell in line] for line in grid]
            maps.append(NeedleMap(recipe, task, depths, lengths, values, counts))
    return maps


def _bins(depths: list[float]) -> list[float]:
    different = sorted(set(depths))
    if len(different) <= MOST_DEPTHS:
        return different
    low, high = different[0], different[-1]
    return [low + (high - low) * (i + 0.5) / 10 for i in range(10)]


def _nearest(depth: float, depths: list[float]) -> int:
    return min(range(len(depths)), key=lambda i: abs(depths[i] - depth))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)
