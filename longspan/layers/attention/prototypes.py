"""Attention through prototypes: many keys pooled into few, which queries read with an exact softmax.

Every key spreads a mass of 1 over M prototypes (`assign`); a prototype is the mean of its keys and of their values, with its
mass c (`pool`, `centres`), and queries read

    o~_i = sum_m softmax_m( q_i.k_m / sqrt(d) + log c_m ) v_m                                        (`read_out`)

The log-mass makes a prototype of c equal keys weigh as much as those c keys: prototypes of one key each, or of equal keys,
are softmax attention itself. Keys that are to stay what they are get prototypes of their own (`keep_exact`). Functions of
tensors alone: the causal mixer (`plash`) and the form for a whole set of keys (`prototype_attention`) share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.kernels import attend
from longspan.registry import Refused

EPS = 1e-6
"""Least weight of a key in a prototype; smaller ones are 0, so that no mean is divided by less."""


@dataclass(frozen=True, eq=False)
class Prototypes:
    """What is read in place of keys. A prototype without any key has mass 0 and is never seen."""

    mass: Float[Tensor, "*B M"]
    k: Float[Tensor, "*B M D"]
    v: Float[Tensor, "*B M Dv"]


def assign(
    k: Float[Tensor, "*B N D"],
    u: Float[Tensor, "*#B M D"],
    b: Float[Tensor, "*#B M"],
    *,
    topr: int = 2,
    tau: float | None = None,
    mask: Bool[Tensor, "*#B N"] | None = None,
    eps: float = EPS,
) -> Float[Tensor, "*B N M"]:
    """How every key spreads its mass of 1: P = softmax over its `topr` largest logits k.u_m / tau + b_m.

    `tau` defaults to sqrt(D). With ``topr=1`` P is 0 or 1, and its gradient that of the full softmax (straight through).
    Weights below `eps` are 0, and the others share the rest. Keys outside `mask` have P = 0. Float32 at least.

    Raises:
        Refused: more prototypes a key than there are, none at all, or a key that is NaN.
        ValueError: keys and prototypes of different widths.
    """
    M = u.shape[-2]
    if k.shape[-1] != u.shape[-1]:
        raise ValueError(f"keys {tuple(k.shape)} and prototypes {tuple(u.shape)} differ in width")
    if not 1 <= topr <= M:
        raise Refused(f"topr={topr} with M={M}: expected 1 to {M} prototypes a key.")
    wide = torch.promote_types(k.dtype, torch.float32)
    k = k.to(wide) if mask is None else k.to(wide).masked_fill(~mask[..., None], 0.0)
    refuse_nan(k)
    logits = k @ u.to(wide).mT / (k.shape[-1] ** 0.5 if tau is None else tau) + b.to(wide)[..., None, :]
    if topr == 1:
        soft = logits.softmax(-1)
        P = torch.zeros_like(soft).scatter(-1, logits.argmax(-1, keepdim=True), 1.0) + (soft - soft.detach())
    else:
        top = logits.topk(topr, -1) if topr < M else None
        weights = (logits if top is None else top.values).softmax(-1)
        weights = weights.masked_fill(weights < eps, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        P = weights if top is None else torch.zeros_like(logits).scatter(-1, top.indices, weights)
    return P if mask is None else P * mask[..., None]


def refuse_nan(k: Tensor) -> None:
    """Raise `Refused` when a key is not a number: it would spoil every mean it enters."""
    if bool(k.isnan().any()):
        raise Refused(f"{int(k.isnan().sum())} numbers of the keys are NaN; expected numbers: mask those keys, or load weights "
                      "that are whole.")


def keep_exact(P: Float[Tensor, "*B N M"], n: int) -> Float[Tensor, "*B N n_plus_M"]:
    """P with `n` further prototypes in front, one for each of the first keys, which belong to no other any more."""
    own = torch.eye(P.shape[-2], n, dtype=P.dtype, device=P.device)
    counted = P.sum(-1, keepdim=True) > 0
    rest = P.clone()
    rest[..., :n, :] = 0.0
    return torch.cat((own * counted, rest), -1)


def pool(
    P: Float[Tensor, "*B N M"],
    k: Float[Tensor, "*B N D"],
    v: Float[Tensor, "*B N Dv"],
    more: Float[Tensor, "*B N F"] | None = None,
) -> Float[Tensor, "*B M S"]:
    """Sums that prototypes are made of: mass, sum P k, sum P v, and of `more` features; one matrix product, float32 at least."""
    parts = [torch.ones_like(P[..., :1]), k.to(P.dtype), v.to(P.dtype)] + ([] if more is None else [more.to(P.dtype)])
    return P.mT @ torch.cat(parts, -1)


def centres(sums: Float[Tensor, "*B M S"], dims: tuple[int, int]) -> tuple[Prototypes, Float[Tensor, "*B M F"]]:
    """Means made of the sums of `pool`, for keys and values of `dims` channels; and the means of what else was summed."""
    mass = sums[..., 0]
    sizes = (*dims, sums.shape[-1] - 1 - sum(dims))
    k, v, more = (sums[..., 1:] / _above_zero(mass)[..., None]).split(sizes, -1)
    return Prototypes(mass, k, v), more


def read_out(
    q: Float[Tensor, "B H T D"],
    prototypes: Prototypes,
    *,
    mass: bool = True,
    visible: Bool[Tensor, "#B 1 1 #M"] | None = None,
) -> tuple[Float[Tensor, "B H T Dv"], Float[Tensor, "B H T"]]:
    """Exact attention of `q` over prototypes (B,G,M,·), with its log-sum-exp; query head h reads head h // (H/G).

    The log-mass rides on one more channel of the keys. ``mass=False`` leaves it out. Empty prototypes are not seen; where all
    are empty the output is 0 and the log-sum-exp -inf. Statistics and output are float32 at least.
    """
    p = prototypes
    q = q.to(p.k.dtype) * q.shape[-1] ** -0.5
    bias = _above_zero(p.mass).log() if mass else torch.zeros_like(p.mass)
    see = (p.mass > 0)[:, :, None]
    with torch.autocast(q.device.type, enabled=False):
        return attend(torch.cat((q, torch.ones_like(q[..., :1])), -1), torch.cat((p.k, bias[..., None]), -1), p.v, scale=1.0,
                      causal=False, mask=see if visible is None else see & visible)


def _above_zero(mass: Tensor) -> Tensor:
    """The mass, 1 where it is 0; gradients don't pass there."""
    return torch.where(mass > 0, mass, torch.ones_like(mass))
