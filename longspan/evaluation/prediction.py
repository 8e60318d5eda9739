"""What a recipe will score where it wasn't measured: accuracy and answer likelihood, with prediction intervals.

A *cell* is a recipe on a task at a length: the mean of n examples. Cells are one smooth surface over how much is kept and how
long the text is, with parts that tasks and recipes have in common; so a cell that was measured says something about its
neighbours. The surface is a Gaussian process (kriging). In order:

1. *Scale.* An accuracy is turned into ``asin(sqrt((k + 3/8) / (n + 3/4)))`` (Anscombe 1948), on which the sampling noise of
   n right-or-wrong examples is about ``1 / (4n + 2)`` wherever the accuracy lies; scores between 0 and 1 have less. A
   likelihood is turned into its logarithm, with the noise its examples show.
2. *Surface.* value = mean + task + length + task's own length + √(share dropped) · (curve over the share kept: common + the
   task's + the family's + both) + what the recipe does beside dropping (a coding store, sparse reading). A *family* is a recipe
   but for its budget. The root makes every family the dense run where nothing is dropped. Curves are smooth in the octaves of
   the share kept and of the length. How much each part varies is fitted (largest posterior, with a log-normal prior of a
   factor two around `PRIOR`), so a part that the cells say nothing about keeps its prior.
3. *Interval.* A mean of m further examples is normal about the surface, with the surface's variance and the noise of m. How
   wide that must be is calibrated: every measured cell is predicted from all others, and the factor is the quantile of their
   errors in standard deviations (leave-one-out conformal). With fewer than `CALIBRATED` cells it is at least the normal one.

Assumed: cells are exchangeable for the calibration, and examples are as hard as the measured ones (in a sweep all recipes read
the same examples, so cells at one task and length err together; the calibration sees that too). Not assumed: that accuracy
rises with what is kept. Outside of what was measured the surface falls back to its mean and the interval widens; more than
`BEYOND` octaves outside in length, or for a task or family without any cell, there is no prediction but a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import linalg, optimize, stats

from longspan.cache import CachePolicy
from longspan.evaluation.shape import Shape
from longspan.evaluation.statistics import DENSE
from longspan.recipe import Recipe

Row = dict[str, Any]
Vector = Float[np.ndarray, " cells"]
Matrix = Float[np.ndarray, "a b"]

LEVEL = 0.95
"""Of the intervals."""
CALIBRATED = 40
"""Cells from which on the calibration may also narrow the interval."""
BEYOND = 1.0
"""Octaves of length outside of the measured ones up to which there is a prediction."""
PRIOR = {"task": 0.35, "length": 0.15, "task x length": 0.2, "kept": 0.5, "kept x task": 0.3, "kept x family": 0.3,
         "kept x family x task": 0.2, "beside": 0.1, "beside x task": 0.1, "cell": 0.05}
"""Standard deviations of the surface's parts on the scale of step 1; the octaves over which curves change stand in `OCTAVES`."""
OCTAVES = {"octaves kept": 1.5, "octaves of length": 1.5}
SPREAD = math.log(2)
LEAST_KEPT = 1 / 1024
FITTED, DRAWS = 400, 4000
NLL_UNIT = 2.0
"""Likelihoods vary more on their scale than accuracies on theirs."""


@dataclass(frozen=True)
class Place:
    """Where a cell is: what the surface is a function of."""

    recipe: str
    family: str
    beside: str
    """What the recipe does beside dropping entries; empty if nothing."""
    kept: float
    """Share of the entries kept."""
    task: str
    length: int


@dataclass(frozen=True)
class Cell:
    """A measured cell. `accuracy` and `nll` are None where nothing was measured."""

    place: Place
    n: int
    accuracy: float | None
    nll: float | None
    nll_variance: float | None = None
    """Of the mean."""


@dataclass(frozen=True)
class Prediction:
    """A future mean of so many examples: value and interval, or why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    """Why there is no value; or, with a value, in what way it stands outside of what was measured."""


# ---------------------------------------------------------------------------------------------------------------- cells


def place(recipe: str, task: str, length: int, shape: Shape) -> Place:
    """Where a recipe stands at a task and length; the shape is for budgets in bytes."""
    made = Recipe.parse(recipe)
    policy = made.cache
    if policy is None:
        return Place(recipe, str(made), "" if str(made) == DENSE else str(made), 1.0, task, length)
    kept = min(1.0, max(LEAST_KEPT, shape.entries(made, length) / length))
    if not isinstance(policy, CachePolicy):
        return Place(recipe, str(made), str(made), kept, task, length)
    whole = replace(policy, budget=replace(policy.budget, budget=1.0))
    coded = [policy.store] if policy.store is not None and policy.store.card.can("lossy") else []
    others = [part for part in made.methods if part not in policy.methods]
    return Place(recipe, " + ".join(map(str, [*others, whole])), " + ".join(map(str, [*others, *coded])), kept, task, length)


def cells_of(rows: Iterable[Row], shape: Shape) -> list[Cell]:
    """Result rows of one model as cells; seeds are put together."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["recipe"], row["task"], row["length"]), []).append(row)
    return [_cell(place(*key, shape), own) for key, own in groups.items()]


def _cell(where: Place, rows: list[Row]) -> Cell:
    scores, nlls = ([row[name] for row in rows if row.get(name) is not None] for name in ("score", "answer_nll"))
    variance = float(np.var(nlls, ddof=1) / len(nlls)) if len(nlls) > 1 else None
    return Cell(where, len(rows), float(np.mean(scores)) if scores else None, float(np.mean(nlls)) if nlls else None, variance)


# -------------------------------------------------------------------------------------------------------------- surface


@dataclass(frozen=True)
class Pairs:
    """What the covariance between places a and b is made of: who shares what, and how far apart they are."""

    task: Matrix
    family: Matrix
    beside: Matrix
    cell: Matrix
    dropped: Matrix
    """Root of the product of the shares dropped."""
    octaves_kept: Matrix
    octaves_length: Matrix

    @classmethod
    def of(cls, a: Sequence[Place], b: Sequence[Place]) -> Pairs:
        def same(key: Callable[[Place], Any], ours: Callable[[Place], bool] = lambda _: True) -> Matrix:
            known: dict[Any, int] = {}
            left, right = ([known.setdefault(key(p), len(known)) for p in places] for places in (a, b))
            return np.equal.outer(left, right) * np.array([ours(p) for p in a], dtype=np.float64).reshape(-1, 1)

        def apart(key: Callable[[Place], float]) -> Matrix:
            return np.abs(np.subtract.outer([key(p) for p in a], [key(p) for p in b]))

        return cls(
            same(lambda p: p.task), same(lambda p: p.family), same(lambda p: p.beside, lambda p: bool(p.beside)),
            same(lambda p: (p.recipe, p.task, p.length), lambda p: p.recipe != DENSE),
            np.sqrt(np.outer([1 - p.kept for p in a], [1 - p.kept for p in b])),
            apart(lambda p: math.log2(p.kept)), apart(lambda p: math.log2(p.length)),
        )

    def covariance(self, scale: dict[str, float]) -> Matrix:
        """Prior covariance of the surface (step 2)."""
        near = smooth(self.octaves_length / scale["octaves of length"])
        curve = self.dropped * smooth(self.octaves_kept / scale["octaves kept"]) * near
        v = {name: scale[name] ** 2 for name in PRIOR}
        return (v["task"] * self.task + v["length"] * near + v["task x length"] * self.task * near
                + curve * (v["kept"] + v["kept x task"] * self.task
                           + self.family * (v["kept x family"] + v["kept x family x task"] * self.task))
                + self.beside * (v["beside"] + v["beside x task"] * self.task * near) + v["cell"] * self.cell)


def smooth(distance: Matrix) -> Matrix:
    """Matérn's correlation of order 3/2: curves may bend, but not jump."""
    r = math.sqrt(3) * distance
    return (1 + r) * np.exp(-r)


@dataclass(frozen=True)
class Surface:
    """The process after it has seen values `y` with noise variances `noise` at `places`."""

    places: tuple[Place, ...]
    y: Vector
    noise: Vector
    scale: dict[str, float]
    pairs: Pairs

    @classmethod
    def fit(cls, places: Sequence[Place], y: Vector, noise: Vector, unit: float = 1.0) -> Surface:
        """The surface with the likeliest scales; `unit` times `PRIOR` is where they are looked for.

        They are looked for on `FITTED` cells at most, taken evenly.
        """
        names = [*PRIOR, *OCTAVES]
        first = np.log([unit * v for v in PRIOR.values()] + list(OCTAVES.values()))
        some = list(range(0, len(places), math.ceil(len(places) / FITTED)))
        few = tuple(places[i] for i in some)
        pairs = Pairs.of(few, few)

        def cost(theta: np.ndarray) -> float:
            made = cls(few, y[some], noise[some], dict(zip(names, np.exp(theta))), pairs)
            fit = 0.5 * made.centred @ made.weights + np.log(np.diag(made.factor[0])).sum()
            return float(fit + (((theta - first) / SPREAD) ** 2).sum() / 2)

        found = optimize.minimize(cost, first, method="L-BFGS-B", options={"maxiter": 25})
        every = tuple(places)
        return cls(every, y, noise, dict(zip(names, np.exp(found.x))), Pairs.of(every, every))

    @cached_property
    def factor(self) -> tuple[np.ndarray, bool]:
        return linalg.cho_factor(self.pairs.covariance(self.scale) + np.diag(self.noise + 1e-9), lower=True)

    @cached_property
    def mean(self) -> float:
        """The surface's level far from everything: the mean that fits best under the covariance."""
        ones = linalg.cho_solve(self.factor, np.ones(len(self.y)))
        return float(ones @ self.y / ones.sum())

    @property
    def centred(self) -> Vector:
        return self.y - self.mean

    @cached_property
    def weights(self) -> Vector:
        return linalg.cho_solve(self.factor, self.centred)

    def at(self, places: Sequence[Place]) -> tuple[Vector, Matrix]:
        """Mean (places,) and covariance (places, places) of the surface, without the noise of a measurement."""
        cross = Pairs.of(self.places, places).covariance(self.scale)
        prior = Pairs.of(places, places).covariance(self.scale)
        return self.mean + cross.T @ self.weights, prior - cross.T @ linalg.cho_solve(self.factor, cross)

    @cached_property
    def errors(self) -> Vector:
        """Error of every cell predicted from all others, in standard deviations of that prediction (noise included).

        In closed form (Rasmussen and Williams 2006, eq. 5.12): with P the inverse covariance, the error is (P y)ᵢ / Pᵢᵢ and
        its variance 1 / Pᵢᵢ.
        """
        return self.weights / np.sqrt(np.diag(linalg.cho_solve(self.factor, np.eye(len(self.y)))))

    def widening(self, level: float) -> float:
        """Standard deviations that an interval reaches to either side (step 3)."""
        errors, normal = np.sort(np.abs(self.errors)), float(stats.norm.ppf(0.5 + level / 2))
        rank = math.ceil((len(errors) + 1) * level)
        found = float(errors[min(rank, len(errors)) - 1])
        return found if rank <= len(errors) and len(errors) >= CALIBRATED else max(normal, found)


# ------------------------------------------------------------------------------------------------------------- forecast


class Forecast:
    """Predictions from the cells of one model of this shape."""

    def __init__(self, cells: Sequence[Cell], shape: Shape, level: float = LEVEL) -> None:
        self.shape, self.level = shape, level
        self.right = [c for c in cells if c.accuracy is not None]
        self.likely = [c for c in cells if c.nll is not None and c.nll > 0]

    @classmethod
    def of(cls, rows: Iterable[Row], shape: Shape, level: float = LEVEL) -> Forecast:
        """From result rows."""
        return cls(cells_of(rows, shape), shape, level)

    @cached_property
    def accuracies(self) -> Surface:
        return Surface.fit([c.place for c in self.right], np.array([anscombe(c.accuracy or 0.0, c.n) for c in self.right]),
                           np.array([binomial_noise(c.n) for c in self.right]))

    @cached_property
    def likelihoods(self) -> Surface:
        return Surface.fit([c.place for c in self.likely], np.log([c.nll or 1.0 for c in self.likely]),
                           np.array([self.nll_noise(c.place.task) / c.n for c in self.likely]), NLL_UNIT)

    def nll_noise(self, task: str) -> float:
        """Relative variance of one example's likelihood: the task's median over its cells."""
        found = [c.nll_variance * c.n / c.nll**2 for c in self.likely if c.place.task == task and c.nll and c.nll_variance]
        return float(np.median(found)) if found else 1.0

    def accuracy(self, where: Place, n: int) -> Prediction:
        """The accuracy of `n` examples there."""
        if reason := self.unknown(where, self.right):
            return Prediction(reason=reason)
        value, reach = self._reach(self.accuracies, where, binomial_noise(n))
        return Prediction(back(value, n), back(value - reach, n), back(value + reach, n), self.outside(where, self.right))

    def nll(self, where: Place, n: int) -> Prediction:
        """The mean answer NLL of `n` examples there, in nats a token."""
        if reason := self.unknown(where, self.likely):
            return Prediction(reason=reason)
        value, reach = self._reach(self.likelihoods, where, self.nll_noise(where.task) / n)
        return Prediction(math.exp(value), math.exp(value - reach), math.exp(value + reach), self.outside(where, self.likely))

    def _reach(self, surface: Surface, where: Place, noise: float) -> tuple[float, float]:
        mean, variance = surface.at([where])
        return float(mean[0]), surface.widening(self.level) * math.sqrt(max(0.0, float(variance[0, 0])) + noise)

    def kept(self, recipe: str, tasks: Sequence[str], length: int, solvable: float, n: int | None = None) -> Prediction:
        """The recipe's accuracy as a share of the dense run's, at most 1: the mean over tasks where that has `solvable`.

        The interval covers the share itself, which endless examples would show: joint draws of both surfaces, spread by the
        calibration where that widens. With `n` it covers what n further examples a task show, read by both: of those that the
        dense run gets right, each is kept with the drawn share.
        """
        tasks = [task for task in tasks if any(c.place.task == task for c in self.right)]
        places = [place(r, task, length, self.shape) for r in (recipe, DENSE) for task in tasks]
        if reason := next((r for p in places if (r := self.unknown(p, self.right))), ""):
            return Prediction(reason=f"not sure: {reason}")
        mean, covariance = self.accuracies.at(places)
        able = [i for i in range(len(tasks)) if back(mean[len(tasks) + i]) >= solvable]
        if not able:
            return Prediction(reason="no measured task that the dense run can do")
        if recipe == DENSE:
            return Prediction(1.0, 1.0, 1.0)
        wider = max(1.0, self.accuracies.widening(self.level) / float(stats.norm.ppf(0.5 + self.level / 2)))
        rng = np.random.default_rng(0)
        drawn = rng.multivariate_normal(mean, wider**2 * covariance, DRAWS, method="eigh")
        right = np.sin(drawn.clip(0, math.pi / 2)) ** 2
        share = np.minimum(1.0, right[:, able] / right[:, [len(tasks) + i for i in able]].clip(min=1e-9))
        shown = share
        if n is not None:
            examples = [max(1, round(n * back(mean[len(tasks) + i]))) for i in able]
            shown = rng.binomial(examples, share) / examples
        low, high = np.quantile(shown.mean(1), [0.5 - self.level / 2, 0.5 + self.level / 2])
        return Prediction(float(np.median(share.mean(1))), float(low), float(high))

    def nats_above(self, recipe: str, tasks: Sequence[str], length: int) -> float | None:
        """Mean answer NLL above the dense run's, over the tasks; None where it can't be said."""
        differences = []
        for task in tasks:
            ours, dense = (place(r, task, length, self.shape) for r in (recipe, DENSE))
            if self.unknown(ours, self.likely) or self.unknown(dense, self.likely):
                return None
            mean, _ = self.likelihoods.at([ours, dense])
            differences.append(float(np.exp(mean[0]) - np.exp(mean[1])))
        return float(np.mean(differences)) if differences else None

    def unknown(self, where: Place, cells: Sequence[Cell]) -> str:
        """Why nothing can be said of a place; empty if something can."""
        for name in ("task", "family"):
            if not any(getattr(c.place, name) == getattr(where, name) for c in cells):
                return f"{name} {getattr(where, name)} was not measured"
        lengths = [c.place.length for c in cells if c.place.task == where.task]
        near = min(max(where.length, min(lengths)), max(lengths))
        if abs(math.log2(where.length / near)) > BEYOND:
            return f"{where.length:,} tokens are more than {BEYOND:g} octave from the {near:,} that were measured"
        return ""

    def outside(self, where: Place, cells: Sequence[Cell]) -> str:
        """In what way a place stands outside of what was measured; empty if it doesn't."""
        lengths = [c.place.length for c in cells if c.place.task == where.task]
        kept = [c.place.kept for c in cells if c.place.family == where.family] + [1.0] * (not where.beside)
        if not min(lengths) <= where.length <= max(lengths):
            return f"measured from {min(lengths):,} to {max(lengths):,} tokens only"
        if not min(kept) - 0.01 <= where.kept <= max(kept) + 0.01:
            return f"measured where {min(kept):.0%} to {max(kept):.0%} are kept only"
        return ""


def anscombe(mean: float, n: int) -> float:
    """A share of n on the scale of step 1."""
    return math.asin(math.sqrt((mean * n + 3 / 8) / (n + 3 / 4)))


def binomial_noise(n: int) -> float:
    """Variance of that value."""
    return 1 / (4 * n + 2)


def back(value: float, n: float = math.inf) -> float:
    """The share that `anscombe` turns into this value, within 0 to 1."""
    share = math.sin(min(max(value, 0.0), math.pi / 2)) ** 2
    return share if n == math.inf else min(1.0, max(0.0, (share * (n + 3 / 4) - 3 / 8) / n))
