"""LU-KV: every head of every layer keeps what loses least of what future answers need, given how its score ranks.

A score ranks tokens well in some heads and badly in others, so equal budgets waste places. Offline, for a model and a
score:

1. *Utility*. After a text was read and scored, answers to questions about it are written; a token's utility is the
   most attention that any written row and query head gave it, times the size of its value (`longspan profile`).
2. *Loss curve* of a head: discarding the j entries the score likes least costs the sum C(j) of their utilities. Where
   score and utility disagree C isn't convex; its lower convex hull is taken instead. The hull's slopes, the marginal
   losses, are the isotonic regression of the single losses.
3. *Greedy*. All marginal losses of all heads are sorted once: the D smallest are the cheapest D places to give up,
   exactly optimal on the hulls. D runs through 1 % to 99 % of everything.
4. The shares given up, averaged over all texts and questions, are the profile, a table (99, L, H).

Online the table's row for the budget says what each head keeps; inside a head the score decides.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import isotonic_regression
from torch import Tensor

from longspan.cache.base import Budget, LayerContext, newest, oldest, top_mask
from longspan.models import profiles
from longspan.models.profiles import Evidence
from longspan.registry import Refused, knob, method

RATIOS = 99
"""Rows of a profile: what to give up when 1 %, 2 %, ..., 99 % of all entries go."""
LEAST_KEPT = 0.01
"""Share of a text that every head keeps while a profile is made."""


@method("lu-kv", kind="budget", system="lu-kv", paper="arXiv:2602.08585",
        capabilities=("ragged", "layer-budgets", "profile"),
        summary="Each head keeps what loses least of later answers' attention; profiled once per model and score.")
class LuKV(Budget):
    """Needs a profile of the score on the model, which `longspan profile "SCORE @ lu-kv"` makes in minutes."""

    scope: ClassVar[str] = "model"
    n_sink: int = knob(4, "first tokens that always stay", low=0)
    window: int = knob(1, "newest tokens that always stay; those that the score always keeps stay anyway", low=0)
    mode: str = knob("global", "heads share over all layers, or in each layer with equal layers", choices=("global", "per-layer"))
    profile: str = knob(profiles.AUTO, 'file of the profile; "auto" finds it by model and score')

    # -- offline

    def profile_settings(self) -> dict[str, Any]:
        return {"n_sink": self.n_sink, "window": self.window, "mode": self.mode}

    def fit(self, evidence: Iterable[Evidence]) -> dict[str, Tensor]:
        """The mean table over all evidence: ``ratios`` (99, L, H) float32, the share that each head gives up."""
        total, n = np.zeros(()), 0
        for shown in evidence:
            total = total + self.ratios(shown)
            n += 1
        if not n:
            raise Refused("there is no evidence to make a profile of; expected at least one answered question.")
        return {"ratios": torch.from_numpy(total / n).float()}

    def ratios(self, shown: Evidence) -> Float[np.ndarray, "99 L H"]:
        """What each head gives up for one text and question. Layers that don't compress stand at the mean."""
        K, H, N = shown.scores.shape
        for name in ("scores", "utility"):
            if bool(torch.isnan(getattr(shown, name)).any()):
                raise Refused(f"{name} of a calibration text hold NaN; expected a model whose attention is finite.")
        stays = shown.protected.clone()
        stays[..., : self.n_sink] = True
        stays[..., max(0, N - self.window) :] = True
        marginals = [marginal_losses(shown.scores[k, h], shown.utility[k, h], stays[k, h]) for k in range(K) for h in range(H)]
        shares = 1 if self.mode == "global" else K
        given_up = [allocate(marginals[i * len(marginals) // shares : (i + 1) * len(marginals) // shares],
                             [round(x / 100 * K * H * N / shares) for x in range(1, RATIOS + 1)]) for i in range(shares)]
        table = np.broadcast_to(np.arange(1, RATIOS + 1)[:, None, None] / 100, (RATIOS, shown.n_layers, H)).copy()
        table[:, list(shown.layers)] = np.concatenate(given_up, 1).reshape(RATIOS, K, H) / N
        return table

    # -- online

    def keep(self, scores: Float[Tensor, "B H S"], x: LayerContext) -> Bool[Tensor, "B H S"]:
        table = self.table(x)
        counts = [head_counts(table, int(b), int(n))[x.layer].tolist() for b, n in zip(self.tokens(x), x.seen)]
        kept = torch.tensor(counts, device=scores.device)
        stays = x.valid & (oldest(x, self.n_sink) | newest(x, self.window))
        stays |= x.valid & top_mask(scores, torch.full(scores.shape[:2], x.protected, device=scores.device))
        nothing_between = (stays == x.valid).all(-1).all(-1)[:, None]
        must = stays.sum(-1)
        if bool((nothing_between & (kept < must)).any()):
            _warn_once(f"{self} compresses no text as short as the {int(must.max())} tokens that it always keeps.")
        if bool(((kept < must) & ~nothing_between).any()):
            _warn_once(f"{self} keeps fewer tokens in some heads than the {int(must.max())} it should always keep, so the "
                       "newest of those are dropped there; raise the budget.")
        mask = x.valid & top_mask(scores.masked_fill(stays, torch.inf), kept)
        return torch.where(nothing_between[..., None], x.valid, mask)

    def table(self, x: LayerContext) -> profiles.Profile:
        """The profile of this model and score.

        Raises:
            Refused: there is none, or its table isn't one of this model.
        """
        found = profiles.find(x.parts.model, self, x.score, self.profile)
        ratios, shape = found.tensors.get("ratios"), (RATIOS, x.n_layers, x.k.shape[1])
        if ratios is None or tuple(ratios.shape) != shape:
            raise Refused(f"{self}: the profile's table is {None if ratios is None else tuple(ratios.shape)}, expected {shape} "
                          "(ratios, layers, heads); make it again with `longspan profile`.")
        if not bool(((ratios >= 0) & (ratios <= 1)).all()):
            raise Refused(f"{self}: the profile's table has values outside of 0 to 1; make it again with `longspan profile`.")
        return found


# ---------------------------------------------------------------------------------------------------------- offline


def marginal_losses(scores: Float[Tensor, " tokens"], utility: Float[Tensor, " tokens"],
                    stays: Bool[Tensor, " tokens"]) -> Float[np.ndarray, " places"]:
    """Slopes of the lower convex hull of a head's loss curve: what the 1st, 2nd, ... entry given up costs.

    Never falls. Entries that stay have none, and no head gives up so much that it keeps less than `LEAST_KEPT`.
    """
    middle = ~stays
    worst_first = scores[middle].argsort(descending=True, stable=True).flip(0)
    losses = utility[middle].double()[worst_first].cpu().numpy()
    if not len(losses):
        return losses
    slopes = isotonic_regression(losses).x
    return slopes[: len(scores) - max(round(LEAST_KEPT * len(scores)), int(stays.sum()))]


def allocate(marginals: Sequence[Float[np.ndarray, " places"]], amounts: Sequence[int]) -> Int[np.ndarray, "amounts heads"]:
    """How many entries each head gives up when `amounts` are given up in all: the smallest marginal losses.

    Of equal losses those of earlier heads go first. When all are gone, nothing more is.
    """
    owner = np.repeat(np.arange(len(marginals)), [len(m) for m in marginals])
    by_loss = owner[np.concatenate(marginals).argsort(kind="stable")]
    return np.stack([np.bincount(by_loss[:amount], minlength=len(marginals)) for amount in amounts])


# ----------------------------------------------------------------------------------------------------------- online


@functools.lru_cache(maxsize=64)
def head_counts(profile: profiles.Profile, budget: int, length: int) -> Int[np.ndarray, "L H"]:
    """What each head keeps of `length` tokens when `budget` is kept on average: at least 1, and never more in all."""
    L, H = profile.tensors["ratios"].shape[1:]
    budget = max(budget, 1)
    pruned = 1 - budget / length
    # A head can't keep less than one entry; beyond the last row nothing is known, and all heads are treated alike.
    if budget >= length or pruned > RATIOS / 100:
        return np.full((L, H), min(budget, length))
    row = int(np.clip(round(100 * pruned) - 1, 0, RATIOS - 1))
    kept = (1 - profile.tensors["ratios"][row].double().numpy()) * length
    return whole(fitted(kept, budget * L * H, length), budget * L * H)


def fitted(kept: Float[np.ndarray, "L H"], total: int, length: int) -> Float[np.ndarray, "L H"]:
    """`kept` within 1 to `length`, scaled where it doesn't sum to `total`.

    A row stands for a whole percent, and rows where calibration texts had nothing left to give keep more than they say.
    """
    kept = kept.clip(1, length)
    if abs(kept.sum() - total) <= 0.5:
        return kept
    low, high = 0.0, float(length)
    for _ in range(60):  # bisection: the sum grows with the factor
        factor = (low + high) / 2
        low, high = (factor, high) if (factor * kept).clip(1, length).sum() <= total else (low, factor)
    return (low * kept).clip(1, length)


def whole(kept: Float[np.ndarray, "L H"], total: int) -> Int[np.ndarray, "L H"]:
    """Whole numbers: the rounded total of each layer, shared out by largest remainder.

    Where the layers' totals add up to more than `total`, those that were rounded up most give way.
    """
    ideal = kept.sum(1)
    totals = np.rint(ideal).astype(np.int64)
    excess = max(0, int(totals.sum()) - total)
    totals[np.argsort(ideal - totals, kind="stable")[:excess]] -= 1
    counts = np.floor(kept).astype(np.int64)
    left = totals - counts.sum(1)
    by_remainder = np.argsort(counts - kept, axis=1, kind="stable")
    np.put_along_axis(counts, by_remainder, np.take_along_axis(counts, by_remainder, 1)
                      + (np.arange(kept.shape[1]) < left[:, None]), 1)
    return counts


_warned: set[str] = set()


def _warn_once(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        warnings.warn(sentence, stacklevel=3)
