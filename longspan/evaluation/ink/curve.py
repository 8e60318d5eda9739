"""The damage curve: what is lost as the share of hard distractors grows, and how much of it at the first drop.

    drop ratio = (y(0) - y(.1)) / (y(0) - y(1))          .1 if damage is linear
    D(p)       = (y(0) - y(p)) / (y(0) - y(1))
    y(p)       = y0 - Delta p (1+g) / (1+g p)            the fit, g >= 0

The fit takes 200 values of log g in [-5, 6], then finer ones around the best; y0 and Delta are least squares. Questions are
resampled for intervals, all shares of a question together. Where y(0) - y(1) is below two of its standard errors, there is no
damage to speak of, and ratio and fit are refused.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray

from longspan.evaluation.ink.lemma import damage, ink_index
from longspan.registry import Refused

Floats = NDArray[np.float64]
LOG_G = np.linspace(-5.0, 6.0, 200)
FINER = 101
RESAMPLES, LEVEL, DROP = 1000, 0.95, 0.1
LEAST_ERRORS = 2.0


@dataclass(frozen=True)
class Fit:
    """The fitted curve, with intervals over resampled questions where there are any."""

    g: float
    y0: float
    delta: float
    index: float
    g_interval: tuple[float, float] | None = None
    index_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curve:
    """Scores of every question at every share; the shares are those really held, from 0 to 1 and rising."""

    shares: tuple[float, ...]
    scores: Float[np.ndarray, "Q P"]

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or self.scores.shape[1] != len(self.shares) or not len(self.scores):
            raise ValueError(f"scores {self.scores.shape} for {len(self.shares)} shares; expected (questions, shares)")
        _check(self.shares)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], name: str = "score") -> Curve:
        """From result rows of the task at several shares, one recipe, length and seed; `name` is a column such as ``score``.

        ``answer_nll`` is negated. Rows of one share and question collapse, with a warning.

        Raises:
            Refused: rows of several recipes; a question that isn't there at every share.
        """
        found: dict[float, dict[int, float]] = {}
        recipes, again = set(), 0
        for row in rows:
            meta = json.loads(row["meta"])
            recipes.add((row["recipe"], row["length"], row["seed"]))
            own = found.setdefault(meta["share"], {})
            again += row["index"] in own
            own[row["index"]] = -row[name] if name == "answer_nll" else row[name]
        if len(recipes) > 1:
            raise Refused(f"rows of {len(recipes)} recipes, lengths or seeds; expected those of one, such as {min(recipes)}.")
        if again:
            warnings.warn(f"{again} rows repeat a question at its share; the last one counts.", stacklevel=2)
        shares = sorted(found)
        questions = sorted({i for own in found.values() for i in own})
        if missing := [(p, i) for p in shares for i in questions if i not in found[p]]:
            p, i = missing[0]
            raise Refused(f"question {i} has no row at share {p:.3g}; expected every question at every share.")
        return cls(tuple(shares), np.array([[found[p][i] for p in shares] for i in questions], dtype=np.float64))

    @property
    def means(self) -> Floats:
        """y at every share."""
        return self.scores.mean(0)

    @property
    def undefined(self) -> str:
        """Why damage has no meaning here; empty where it has."""
        drops = self.scores[:, 0] - self.scores[:, -1]
        drop = float(drops.mean())
        if len(drops) < 2:
            return f"one question has no standard error (y(0) - y(1) = {drop:.3g}); expected at least 2 questions."
        error = float(drops.std(ddof=1)) / math.sqrt(len(drops))
        if drop <= 0 or drop < LEAST_ERRORS * error:
            return (f"y(0) - y(1) = {drop:.3g} is not above {LEAST_ERRORS:g} standard errors ({error:.3g} each); expected hard "
                    "distractors that do harm, or more questions.")
        return ""

    @property
    def damage(self) -> Floats:
        """D at every share; NaN, with a warning that says why, where there is no damage."""
        if self.undefined:
            warnings.warn(f"damage is undefined: {self.undefined}", stacklevel=2)
            return np.full(len(self.shares), np.nan)
        return normalised(self.shares, self.means)

    @property
    def drop_ratio(self) -> float:
        """Share of the whole damage that is done at p = .1. Refused where there is none, or .1 isn't a share."""
        self._refuse_undefined()
        return drop_ratio(self.shares, self.means)

    def fit(self, seed: int = 0, resamples: int = RESAMPLES) -> Fit:
        """The fitted curve with intervals. Refused where there is no damage."""
        self._refuse_undefined()
        made = fit(self.shares, self.means)
        drawn = np.random.default_rng(seed).integers(len(self.scores), size=(resamples, len(self.scores)))
        g, _, _ = _best(self.shares, self.scores[drawn].mean(1))
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        low, high = (float(x) for x in np.quantile(g, tails))
        return Fit(made.g, made.y0, made.delta, made.index, (low, high), (float(ink_index(low)), float(ink_index(high))))

    def report(self, seed: int = 0) -> dict[str, Any]:
        """All of it as JSON values; figures that have no meaning are NaN, with a message."""
        out: dict[str, Any] = {"shares": list(self.shares), "means": self.means.tolist(), "questions": len(self.scores)}
        if self.undefined:
            return out | {"damage": [math.nan] * len(self.shares), "drop_ratio": math.nan, "g": math.nan, "ink_index": math.nan,
                          "message": self.undefined}
        made = self.fit(seed)
        ratio = math.nan if _place(self.shares, DROP) is None else self.drop_ratio
        return out | {"damage": self.damage.tolist(), "drop_ratio": ratio, "g": made.g, "g_interval": made.g_interval,
                      "ink_index": made.index, "ink_index_interval": made.index_interval, "message": ""}

    def _refuse_undefined(self) -> None:
        if self.undefined:
            raise Refused(self.undefined)


# ------------------------------------------------------------------------------------------------- on means alone


def normalised(shares: Sequence[float], y: ArrayLike) -> Floats:
    """D at every share, from means; NaN where y(0) = y(1)."""
    _check(shares)
    values = np.asarray(y, dtype=np.float64)
    whole = values[0] - values[-1]
    return (values[0] - values) / whole if whole else np.full(len(values), np.nan)


def drop_ratio(shares: Sequence[float], y: ArrayLike, at: float = DROP) -> float:
    """(y(0) - y(at)) / (y(0) - y(1)), from means."""
    _check(shares)
    place = _place(shares, at)
    if place is None:
        raise Refused(f"no score at p={at}; expected one among the shares {', '.join(f'{p:.3g}' for p in shares)}.")
    return float(normalised(shares, y)[place])


def fit(shares: Sequence[float], y: ArrayLike) -> Fit:
    """The curve through means: g >= 0 by search, y0 and Delta by least squares."""
    _check(shares)
    g, y0, delta = (float(x[0]) for x in _best(shares, np.asarray(y, dtype=np.float64)[None]))
    return Fit(g, y0, delta, float(ink_index(g)))


def _best(shares: Sequence[float], y: Float[np.ndarray, "R P"]) -> tuple[Floats, Floats, Floats]:
    """g, y0 and Delta for each row of means."""
    coarse = np.broadcast_to(LOG_G, (len(y), len(LOG_G)))
    step = LOG_G[1] - LOG_G[0]
    near = _least(shares, y, coarse)[0]
    fine = near[:, None] + step * np.linspace(-1, 1, FINER)
    log_g, y0, delta = _least(shares, y, np.clip(fine, LOG_G[0], LOG_G[-1]))
    return np.exp(log_g), y0, delta


def _least(shares: Sequence[float], y: Float[np.ndarray, "R P"], log_g: Float[np.ndarray, "R G"]
           ) -> tuple[Floats, Floats, Floats]:
    """Of every row's candidates the log g with the least squares, with y0 and Delta."""
    basis = damage(np.asarray(shares), np.exp(log_g)[..., None])  # (R,G,P)
    centred = basis - basis.mean(-1, keepdims=True)
    own = (y - y.mean(-1, keepdims=True))[:, None]
    slope = (centred * own).sum(-1) / (centred**2).sum(-1)
    errors = ((own - slope[..., None] * centred) ** 2).sum(-1)
    rows, best = np.arange(len(y)), errors.argmin(-1)
    delta = -slope[rows, best]
    return log_g[rows, best], y.mean(-1) + delta * basis[rows, best].mean(-1), delta


def _place(shares: Sequence[float], p: float) -> int | None:
    """Where a share stands; contexts of few distractors hold it only nearly."""
    return next((i for i, share in enumerate(shares) if abs(share - p) < 1e-9), None)


def _check(shares: Sequence[float]) -> None:
    if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1 or any(b <= a for a, b in pairwise(shares)):
        raise Refused(f"shares {', '.join(f'{p:.3g}' for p in shares)}: expected rising ones from 0 to 1, each once.")
