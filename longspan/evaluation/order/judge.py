"""Which came first, judged from the logits of two labels: margins, accuracy, label bias and the distance effect.

A pair is asked twice, with A and B exchanged. With the margins d1 = l_A - l_B where the earlier segment is A and
d2 = l_B - l_A where it is B,

    m = (d1 + d2) / 2,   right iff m > 0 (m = 0 counts half),   bias towards A = (d1 - d2) / 2.

What a model adds to label A whatever it is asked cancels in m. The distance effect is b1 of the logistic regression
right ~ b0 + b1 log(delta), with a bootstrap over texts; people and models show b1 > 0.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from longspan.evaluation.statistics import mean_interval
from longspan.registry import Refused

PENALTY = 1e-2
"""Weight of b1^2 / 2 in the regression, so that a slope exists where distance parts right from wrong."""


@dataclass(frozen=True)
class Margins:
    """Margins of n pairs, each asked in both orders."""

    d1: Float[np.ndarray, " n"]
    """l_A - l_B where the earlier segment is A."""
    d2: Float[np.ndarray, " n"]
    """l_B - l_A where it is B."""

    def __post_init__(self) -> None:
        if self.d1.shape != self.d2.shape or self.d1.ndim != 1 or not len(self.d1):
            raise ValueError(f"margins of both orders should be two equally long rows, got {self.d1.shape} and {self.d2.shape}")
        if not (np.isfinite(self.d1).all() and np.isfinite(self.d2).all()):
            wrong = int((~(np.isfinite(self.d1) & np.isfinite(self.d2))).sum())
            raise Refused(f"{wrong} of {len(self.d1)} pairs have margins that are no finite numbers; expected finite logits.")

    @property
    def m(self) -> Float[np.ndarray, " n"]:
        return (self.d1 + self.d2) / 2

    @property
    def right(self) -> Float[np.ndarray, " n"]:
        """1 where m > 0, 0.5 where m = 0."""
        return _positive(self.m)

    @property
    def bias(self) -> Float[np.ndarray, " n"]:
        """Towards label A, in logits."""
        return (self.d1 - self.d2) / 2

    @property
    def raw(self) -> Float[np.ndarray, " n"]:
        """Mean over both orders of whether the order's own answer is right."""
        return (_positive(self.d1) + _positive(self.d2)) / 2


def _positive(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    return (np.sign(x) + 1) / 2


def margins(first_is_a: Float[np.ndarray, "n 2"], first_is_b: Float[np.ndarray, "n 2"]) -> Margins:
    """From the logits (l_A, l_B) of both orders."""
    return Margins(first_is_a[:, 0] - first_is_a[:, 1], first_is_b[:, 1] - first_is_b[:, 0])


def by_bin(right: Float[np.ndarray, " n"], bins: Int[np.ndarray, " n"],
           distances: Float[np.ndarray, " n"]) -> list[dict[str, Any]]:
    """Accuracy of every bin of distance that holds a pair."""
    rows = []
    for b in sorted(set(bins.tolist())):
        here = bins == b
        rows.append({"bin": int(b), "distance": float(np.exp(np.log(distances[here]).mean())), "n": int(here.sum()),
                     "accuracy": float(right[here].mean())})
    return rows


def logistic(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], steps: int = 50) -> tuple[float, float]:
    """(b0, b1) of P(y = 1) = 1 / (1 + exp(-b0 - b1 x)) by Newton's method; y may be 0.5; b1 is weakly held to 0."""
    X = np.stack([np.ones_like(x), x - x.mean()], 1)
    b, penalty = np.zeros(2), np.array([1e-6, PENALTY])
    for _ in range(steps):
        p = 1 / (1 + np.exp(-(X @ b).clip(-30, 30)))
        slope = X.T @ (y - p) - penalty * b
        step = np.linalg.solve((X * (p * (1 - p))[:, None]).T @ X + np.diag(penalty), slope)
        b = b + step.clip(-2, 2)
        if np.abs(step).max() < 1e-10:
            break
    return float(b[0] - b[1] * x.mean()), float(b[1])


@dataclass(frozen=True)
class DistanceEffect:
    """Intercept and slope over log distance; the slope's 95% interval over texts, None for fewer than two texts."""

    b0: float
    b1: float
    low: float | None
    high: float | None


def distance_effect(right: Float[np.ndarray, " n"], distances: Float[np.ndarray, " n"], texts: Int[np.ndarray, " n"],
                    resamples: int = 500, seed: int = 0) -> DistanceEffect:
    """The regression of right answers on log distance; whole texts are drawn again and again for the interval.

    Raises:
        Refused: a distance of 0 or less.
    """
    if not (distances > 0).all():
        raise Refused(f"a distance of {float(distances.min())}: expected distances above 0, since their logarithm is taken.")
    x = np.log(distances)
    b0, b1 = logistic(x, right)
    rows = [np.flatnonzero(texts == t) for t in dict.fromkeys(texts.tolist())]
    if len(rows) < 2:
        return DistanceEffect(b0, b1, None, None)
    draw, slopes = np.random.default_rng(seed), []
    for _ in range(resamples):
        here = np.concatenate([rows[i] for i in draw.integers(0, len(rows), len(rows))])
        slopes.append(logistic(x[here], right[here])[1])
    low, high = np.quantile(slopes, [0.025, 0.975])
    return DistanceEffect(b0, b1, float(low), float(high))


def summary(found: Margins, distances: Float[np.ndarray, " n"], bins: Int[np.ndarray, " n"],
            texts: Int[np.ndarray, " n"]) -> dict[str, Any]:
    """Everything part A reports of a set of pairs, as plain data."""
    effect = distance_effect(found.right, distances, texts)
    mean, low, high = mean_interval(found.right.tolist(), bounded=True)
    return {"pairs": len(found.m), "accuracy": mean, "interval": [low, high], "raw accuracy": float(found.raw.mean()),
            "bias": float(found.bias.mean()), "by distance": by_bin(found.right, bins, distances),
            "b1": effect.b1, "b1's interval": None if effect.low is None else [effect.low, effect.high]}


def read_people(path: str | Path) -> dict[str, float]:
    """Shares of right answers by pair from a CSV file with the columns ``pair`` and ``correct`` (0 to 1), as people gave them.

    Raises:
        Refused: no such file, other columns, or a value out of range.
    """
    file = Path(path)
    if not file.is_file():
        raise Refused(f"{str(path)!r}: no such file; expected a CSV file with the columns pair and correct.")
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if not {"pair", "correct"} <= set(reader.fieldnames or ()):
            raise Refused(f"{str(path)!r}: columns {reader.fieldnames}; expected pair and correct.")
        given: dict[str, list[float]] = {}
        for row in reader:
            try:
                value = float(row["correct"])
            except (TypeError, ValueError):
                value = -1.0
            if not 0 <= value <= 1:
                raise Refused(f"{str(path)!r}: correct={row['correct']!r} for pair {row['pair']!r}; expected 0 to 1.")
            given.setdefault(row["pair"], []).append(value)
    return {pair: float(np.mean(values)) for pair, values in given.items()}


def beside_people(right: Float[np.ndarray, " n"], names: Sequence[str], people: dict[str, float]) -> dict[str, Any]:
    """Accuracy of a model and of people on the pairs that both answered, and their correlation over pairs.

    Raises:
        Refused: no pair in common.
    """
    both = [i for i, name in enumerate(names) if name in people]
    if not both:
        raise Refused(f"no pair of the {len(people)} that people answered was asked here; expected names such as {names[0]!r}.")
    own, others = right[both], np.array([people[names[i]] for i in both])
    varied = len(both) > 2 and own.std() > 0 and others.std() > 0
    return {"pairs": len(both), "model": float(own.mean()), "people": float(others.mean()),
            "correlation": float(np.corrcoef(own, others)[0, 1]) if varied else None}
