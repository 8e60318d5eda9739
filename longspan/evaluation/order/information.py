"""How much a head's output tells about when a segment was read: ridge regression of time on it, and the code's dimension.

tau = start / n is predicted from the output o of one head, averaged over a segment's tokens: tau ~ w.o + b with |w|^2 held
small by lambda tr(G) / d, G the Gram matrix of the centred outputs. Folds consist of whole groups (texts). lambda is chosen
inside the training part, so R^2 is that of predictions nobody tuned on. The head that brings time back is the one with the
largest R^2, if it exceeds the 99th percentile of the largest R^2 under permuted targets.

The code's dimension: outputs averaged in 16 bins of tau, on two halves of the samples; the eigenvalues of the symmetrised
covariance across halves, in which noise cancels. The first one's share of the positive ones is 1 for a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.registry import Refused

PENALTIES = tuple(10.0**p for p in range(-3, 4))
"""lambda, in units of tr(G) / d."""
FOLDS, LEAST_GROUPS, LEAST_PAIRS = 5, 3, 30
BINS, PERMUTATIONS, PERCENTILE = 16, 200, 0.99


def check_outputs(outputs: Float[Tensor, "*heads n d"], tau: Float[Tensor, " n"]) -> None:
    """Refuse outputs that are no numbers, or heads (or a time) without variance."""
    if outputs.shape[-2] != len(tau):
        raise ValueError(f"outputs {tuple(outputs.shape)} should have {len(tau)} samples in the last dimension but one")
    if not (bool(outputs.isfinite().all()) and bool(tau.isfinite().all())):
        raise Refused("head outputs or times hold NaN or infinities; expected finite numbers.")
    still = (outputs.amax(-2) == outputs.amin(-2)).all(-1)
    if bool(still.any()):
        where = still.nonzero().tolist()[0] if still.ndim else []
        raise Refused(f"head {where or ''} has the same output for every segment: expected heads whose outputs vary.")
    if float(tau.max() - tau.min()) == 0.0:
        raise Refused(f"all segments have the time {float(tau[0])}; expected times that vary.")


def fold_of(groups: Int[Tensor, " n"], folds: int = FOLDS, seed: int = 0) -> Int[Tensor, " n"]:
    """The fold of every sample; a group is never cut. `Refused` for fewer than three groups."""
    names, index = groups.unique(return_inverse=True)
    if len(names) < LEAST_GROUPS:
        raise Refused(f"{len(names)} texts: expected at least {LEAST_GROUPS}, since a text is never parted between folds; "
                      "give more, or shorter, texts.")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    return (order % min(folds, len(names)))[index.cpu()]


@dataclass(frozen=True, eq=False)
class _Ridge:
    """Ridge solutions for every penalty from one decomposition of each head's Gram matrix."""

    values: Float[Tensor, "heads d"]
    vectors: Float[Tensor, "heads d d"]
    moments: Float[Tensor, "heads d t"]
    mean: Float[Tensor, "heads 1 d"]
    level: Float[Tensor, " t"]

    @classmethod
    def of(cls, X: Float[Tensor, "heads n d"], Y: Float[Tensor, "n t"]) -> _Ridge:
        mean, level = X.mean(1, keepdim=True), Y.mean(0)
        centred = X - mean
        values, vectors = torch.linalg.eigh(centred.mT @ centred)
        return cls(values.clamp(min=0), vectors, vectors.mT @ (centred.mT @ (Y - level)), mean, level)

    def weights(self, penalty: float) -> Float[Tensor, "heads d t"]:
        size = penalty * self.values.mean(-1, keepdim=True)
        return self.vectors @ (self.moments / (self.values + size)[..., None])

    def predict(self, X: Float[Tensor, "heads n d"], penalty: float) -> Float[Tensor, "heads n t"]:
        return (X - self.mean) @ self.weights(penalty) + self.level


def _errors(X: Tensor, Y: Tensor, folds: Tensor, among: Sequence[int]) -> Float[Tensor, "penalties heads t"]:
    """Summed squared errors of every penalty on each of the folds `among`, learned from the others of them."""
    inside = torch.isin(folds, torch.tensor(list(among)))
    errors = []
    for f in among:
        learn, judge = inside & (folds != f), folds == f
        ridge = _Ridge.of(X[:, learn], Y[learn])
        errors.append(torch.stack([(ridge.predict(X[:, judge], p) - Y[judge]).square().sum(1) for p in PENALTIES]))
    return torch.stack(errors).sum(0)


def out_of_fold(X: Float[Tensor, "heads n d"], Y: Float[Tensor, "n t"], folds: Int[Tensor, " n"]) -> Float[Tensor, "heads t"]:
    """R^2 of every head for every target over the judged folds, the penalty chosen inside each training part."""
    errors, names = [], folds.unique().tolist()
    for f in names:
        rest = [g for g in names if g != f]
        best = _errors(X, Y, folds, rest).argmin(0)
        ridge, judge = _Ridge.of(X[:, folds != f], Y[folds != f]), folds == f
        each = torch.stack([(ridge.predict(X[:, judge], p) - Y[judge]).square().sum(1) for p in PENALTIES])
        errors.append(each.gather(0, best[None])[0])
    return 1 - torch.stack(errors).sum(0) / (Y - Y.mean(0)).square().sum(0)


@dataclass(frozen=True, eq=False)
class TimeMap:
    """R^2 of every head, the head with the largest, and what the largest reaches by chance."""

    r2: Float[Tensor, "layers heads"]
    layer: int
    head: int
    chance: float | None
    """The 99th percentile of the map's largest R^2 under permuted targets; None where it wasn't asked for."""

    @property
    def best(self) -> float:
        return float(self.r2[self.layer, self.head])

    @property
    def reinstates(self) -> bool:
        """Whether the head tells more than chance."""
        return self.chance is not None and self.best > self.chance


def time_map(outputs: Float[Tensor, "layers heads n d"], tau: Float[Tensor, " n"], groups: Int[Tensor, " n"], pairs: int,
             permutations: int = PERMUTATIONS, seed: int = 0) -> TimeMap:
    """Time information of every head.

    Args:
        groups: the text each sample belongs to.
        pairs: pairs that the samples come from.

    Raises:
        Refused: fewer than 30 pairs or three texts, NaN, or a head without variance.
    """
    if pairs < LEAST_PAIRS:
        raise Refused(f"{pairs} pairs: expected at least {LEAST_PAIRS} for a map of time information.")
    check_outputs(outputs, tau)
    X, y, folds = outputs.flatten(0, 1).double(), tau.double(), fold_of(groups, seed=seed)
    r2 = out_of_fold(X, y[:, None], folds)[:, 0].view(outputs.shape[:2])
    layer, head = divmod(int(r2.argmax()), r2.shape[1])
    chance = None
    if permutations:
        largest = permuted(X, y, folds, permutations, seed).amax(0)
        chance = float(largest.quantile(PERCENTILE))
    return TimeMap(r2, layer, head, chance)


def permuted(X: Float[Tensor, "heads n d"], y: Float[Tensor, " n"], folds: Int[Tensor, " n"], permutations: int = PERMUTATIONS,
             seed: int = 0) -> Float[Tensor, "heads permutations"]:
    """R^2 of every head for permuted targets."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.stack([y[torch.randperm(len(y), generator=draw).to(y.device)] for _ in range(permutations)], 1)
    return out_of_fold(X, targets, folds)


@dataclass(frozen=True, eq=False)
class TimeCode:
    """How one head carries time: tau ~ w.(o - mean) + level; v is how o changes with tau."""

    w: Float[Tensor, " d"]
    v: Float[Tensor, " d"]
    mean: Float[Tensor, " d"]
    level: float
    penalty: float

    @property
    def u(self) -> Float[Tensor, " d"]:
        """The direction of w; a head's coordinate is u.o."""
        return self.w / self.w.norm()

    def decode(self, o: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape"]:
        """The time that outputs tell."""
        return (o.to(self.w.dtype) - self.mean) @ self.w + self.level


def time_code(o: Float[Tensor, "n d"], tau: Float[Tensor, " n"], groups: Int[Tensor, " n"], seed: int = 0) -> TimeCode:
    """The code of one head from all samples, the penalty chosen by cross-validation."""
    check_outputs(o, tau)
    X, y = o.double()[None], tau.double()
    folds = fold_of(groups, seed=seed)
    penalty = PENALTIES[int(_errors(X, y[:, None], folds, folds.unique().tolist())[:, 0, 0].argmin())]
    ridge = _Ridge.of(X, y[:, None])
    v = (X[0] - X[0].mean(0)).T @ (y - y.mean()) / len(y)
    return TimeCode(ridge.weights(penalty)[0, :, 0], v, ridge.mean[0, 0], float(ridge.level), penalty)


def r2(predicted: Float[Tensor, " n"], tau: Float[Tensor, " n"]) -> float:
    """1 - squared error / variance, of predictions made elsewhere."""
    return float(1 - (predicted - tau).square().sum() / (tau - tau.mean()).square().sum())


def dimension_share(o: Float[Tensor, "n d"], tau: Float[Tensor, " n"], bins: int = BINS, seed: int = 0,
                    units: Int[Tensor, " n"] | None = None) -> float:
    """The first eigenvalue's share of the positive ones of the code's covariance across two halves of the samples.

    Args:
        units: what is halved as a whole (pairs); samples by default.

    Raises:
        Refused: fewer than two bins of time hold samples of both halves.
    """
    check_outputs(o, tau)
    names, index = (torch.arange(len(tau)) if units is None else units.cpu()).unique(return_inverse=True)
    half = (torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)) % 2)[index].to(o.device)
    place = (tau.double() * bins).floor().clamp(0, bins - 1).long()
    held = [b for b in range(bins) if bool(((place == b) & (half == 0)).any()) and bool(((place == b) & (half == 1)).any())]
    if len(held) < 2:
        raise Refused(f"{len(held)} of {bins} bins of time hold segments of both halves; expected at least 2, from more pairs.")
    x = o.double()
    means = [torch.stack([x[(place == b) & (half == h)].mean(0) for b in held]) for h in (0, 1)]
    first, second = (m - m.mean(0) for m in means)
    across = first.T @ second
    values = torch.linalg.eigvalsh((across + across.T) / 2)
    positive = values[values > 0].sum()
    return math.nan if not float(positive) else float(values[-1] / positive)
