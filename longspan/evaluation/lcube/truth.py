"""What is known exactly: every slot's distribution given the past, and the information across any cut.

A slot whose latent already showed n copies with sum S is, given all of the past,

    mu* = rho S / (1 + (n-1) rho),    var* = 1 - n rho^2 / (1 + (n-1) rho)

and slots are independent given the past. What a predictor may look at is a table `seen` (G, copies, copies), True where
copy i of a latent knows copy j; the full past is the part below the diagonal. The same rule then answers for any part of
the past: after a cut, within a window, with some latents forgotten.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.evaluation.lcube.plan import LCube

Seen = Bool[Tensor, "G copies copies"]


class Prediction(NamedTuple):
    """A normal distribution for every slot."""

    mu: Float[Tensor, "B T D"]
    var: Float[Tensor, "B T D"]


# ------------------------------------------------------------------------------------------------ what is known of the past


def past(plan: LCube, start: int = 0) -> Seen:
    """All copies before, at token `start` or later."""
    earlier = torch.ones(plan.size, plan.size, dtype=torch.bool).tril(-1)
    return earlier & (plan.times >= start)[:, None, :]


def within(plan: LCube, distance: int) -> Seen:
    """Copies at most `distance` tokens before."""
    return past(plan) & (plan.times[:, :, None] - plan.times[:, None, :] <= distance)


def remembering(plan: LCube, latents: int, cut: int) -> Seen:
    """All copies before, but across `cut` those of the first `latents` latents only."""
    before = plan.times < plan.check_cut(cut)
    crossing = before.any(1) & ~before.all(1)
    forgotten = crossing & (crossing.cumsum(0) > latents)
    across = ~before[:, :, None] & before[:, None, :]
    return past(plan) & ~(across & forgotten[:, None, None])


def conditional(plan: LCube, x: Float[Tensor, "B L D"], seen: Seen | None = None) -> Prediction:
    """The exact distribution of every slot given what is `seen` of the sequence before it; None for all of it."""
    plan.check_sequences(x)
    seen = past(plan) if seen is None else seen
    flat, where = x.flatten(1), plan.members.to(x.device)
    mu = torch.zeros_like(flat)
    sums = torch.einsum("bgj,gij->bgi", flat[:, where], seen.to(x.device, x.dtype))
    mu[:, where] = plan.rho * sums / _spread(plan, seen).to(x.device, x.dtype)
    var = variances(plan, seen).to(x.device, x.dtype)
    return Prediction(mu.view_as(x), var.expand_as(x))


def variances(plan: LCube, seen: Seen | None = None) -> Float[Tensor, "L D"]:
    """var* of every slot, which doesn't depend on the sequence, in float64."""
    seen = past(plan) if seen is None else seen
    var = torch.ones(plan.length * plan.H, dtype=torch.float64)
    var[plan.members] = 1.0 - seen.sum(-1).double() * plan.rho**2 / _spread(plan, seen)
    return var.view(plan.length, plan.H)


def _spread(plan: LCube, seen: Seen) -> Float[Tensor, "G copies"]:
    """1 + (n-1) rho."""
    return 1.0 + (seen.sum(-1).double() - 1.0) * plan.rho


def owned(plan: LCube) -> Bool[Tensor, "L D"]:
    """True where a slot belongs to a latent."""
    mask = torch.zeros(plan.length * plan.H, dtype=torch.bool)
    mask[plan.members] = True
    return mask.view(plan.length, plan.H)


# ------------------------------------------------------------------------------------------------------------ information


def log_det(copies: Tensor, rho: float) -> Tensor:
    """log det R_n = (n-1) log(1-rho) + log(1 + (n-1) rho) of n copies' correlations, 0 for none. In float64."""
    n = copies.double()
    return (n - 1.0) * math.log(1.0 - rho) + (1.0 + (n - 1.0) * rho).log()


def available(plan: LCube) -> Float[Tensor, " L"]:
    """A_t = -1/2 sum over slots of log var*: what the past says about token t, in nats."""
    return -0.5 * variances(plan).log().sum(1)


def bipartite(plan: LCube) -> Float[Tensor, " cuts"]:
    """I_BP at the cuts 1 .. L-1: the information between the first l tokens and the rest, in nats.

    It is a sum over latents of 1/2 log(det R_nL det R_nR / det R_(nL+nR)), with nL copies before the cut and nR after; it
    changes only where a copy changes sides, so all cuts cost O(latents).
    """
    before = torch.arange(plan.size + 1)
    of_sides = 0.5 * (log_det(before, plan.rho) + log_det(plan.size - before, plan.rho) - log_det(before[-1:], plan.rho))
    steps = torch.zeros(plan.length + 1, dtype=torch.float64)
    change = of_sides.diff().expand_as(plan.times)
    steps.index_add_(0, (plan.times + 1).flatten(), change.flatten())
    return steps.cumsum(0)[1:-1]


def entropy(plan: LCube) -> float:
    """Of a whole sequence, in nats: L D/2 log(2 pi e) - sum_t A_t."""
    return float(plan.length * plan.H * 0.5 * (math.log(2.0 * math.pi) + 1.0) - available(plan).sum())


def covariance(plan: LCube) -> Float[Tensor, "N N"]:
    """Of a whole sequence, dense, N = L D, in float64: for checks at small sizes."""
    table = torch.eye(plan.length * plan.H, dtype=torch.float64)
    rows = plan.members[:, :, None].expand(-1, -1, plan.size)
    table[rows, rows.mT] = plan.rho
    return table.fill_diagonal_(1.0)
