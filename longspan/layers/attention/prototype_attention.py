"""PLASH over a whole set of keys, without causality: pool, sketch, read, and say how wrong that may be.

`prototype_attention` goes from learned prototypes to outputs; `through_prototypes` takes any assignment P of keys to
prototypes, from clustering say. Both cost O(N_k M d + N_q M d) and return a bound for every query
(`longspan.layers.attention.prototype_bound`). Cross-attention, encoders and sets of keys that don't grow use this form;
language models use the mixer `plash`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.layers.attention.prototype_bound import bound, deviation, log_masses, spread, value_change
from longspan.layers.attention.prototype_sketches import Enrichment
from longspan.layers.attention.prototypes import EPS, Prototypes, assign, centres, keep_exact, pool, read_out
from longspan.registry import Refused


@dataclass(frozen=True, eq=False)
class Read:
    """Outputs, how far each of them may be from softmax attention (a norm), and what was read."""

    out: Float[Tensor, "B H T Dv"]
    bound: Float[Tensor, "B H T"]
    prototypes: Prototypes
    P: Float[Tensor, "B G N M"]


def prototype_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G N D"],
    v: Float[Tensor, "B G N Dv"],
    u: Float[Tensor, "G M D"],
    b: Float[Tensor, "G M"],
    *,
    topr: int = 2,
    tau: float | None = None,
    n_exact: int = 4,
    mask: Bool[Tensor, "B N"] | None = None,
    mass: bool = True,
    enrichment: Enrichment | None = None,
    eps: float = EPS,
    causal: bool = False,
) -> Read:
    """Every query over all keys through M learned prototypes `u`, `b` of each key head; the first `n_exact` keys stay exact.

    `mask` is True for real keys. Outputs are float32 at least. Warns when there are more prototypes than keys.

    Raises:
        Refused: ``causal=True`` (a prototype of all keys knows the future), `topr` out of range, negative `n_exact`, NaN keys.
        ValueError: shapes that don't fit.
    """
    if causal:
        raise Refused("causal=True: prototypes of all keys hold later ones too; expected causal=False, or the mixer plash, which "
                      "reads in chunks.")
    if n_exact < 0:
        raise Refused(f"n_exact={n_exact}: expected 0 or more.")
    _check(q, k, v, mask)
    if u.shape[0] != k.shape[1] or b.shape != u.shape[:2]:
        raise ValueError(f"prototypes u {tuple(u.shape)} and b {tuple(b.shape)} don't fit the {k.shape[1]} key heads")
    if u.shape[1] > k.shape[2]:
        warnings.warn(f"M={u.shape[1]} prototypes for {k.shape[2]} keys: softmax attention costs less.", stacklevel=2)
    with torch.autocast(q.device.type, enabled=False):
        P = assign(k, u, b, topr=topr, tau=tau, mask=None if mask is None else mask[:, None], eps=eps)
        return through_prototypes(q, k, v, keep_exact(P, min(n_exact, k.shape[2])), mask=mask, mass=mass, enrichment=enrichment)


def through_prototypes(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G N D"],
    v: Float[Tensor, "B G N Dv"],
    P: Float[Tensor, "B G N M"],
    *,
    mask: Bool[Tensor, "B N"] | None = None,
    mass: bool = True,
    enrichment: Enrichment | None = None,
    sharp: bool = True,
) -> Read:
    """The same for a given P >= 0 whose rows sum to 1 (0 where `mask` is False).

    ``sharp=False`` gives the bound that takes no account of keys that are their own prototype (share 1).
    """
    _check(q, k, v, mask)
    if P.shape[:3] != k.shape[:3]:
        raise ValueError(f"P {tuple(P.shape)} doesn't fit the keys {tuple(k.shape)}")
    if mask is not None:  # what padding holds, NaN perhaps, must not meet a weight of 0
        k, v = (t.masked_fill(~mask[:, None, :, None], 0.0) for t in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        active = () if enrichment is None else enrichment.active()
        more = None if enrichment is None else enrichment.features(k, v, active)
        centre, means = centres(pool(P, k, v, more), (k.shape[-1], v.shape[-1]))
        read = centre if enrichment is None else enrichment.enriched(centre, means, active)
        out, lse = read_out(q, read, mass=mass)
        with torch.no_grad():
            rho = spread(k, P, centre.k)
            share: Tensor | float = 1.0
            if sharp:  # the only key of a prototype is its mean, and sketches of it vanish
                inexact = (P > 0).sum(-2) > 1
                if not mass:
                    inexact |= centre.mass != 1
                part = read_out(q, Prototypes(read.mass * inexact, read.k, read.v), mass=mass)[1]
                share = (part - lse.masked_fill(lse.isneginf(), 0.0)).exp()
            limit = bound(q, deviation(rho, centre, read, mass), 0.0 if mass else log_masses(centre), _values(q, v, P),
                          value_change(centre, read), share)
    return Read(out, limit, read, P)


def _values(q: Tensor, v: Tensor, P: Tensor) -> Float[Tensor, "B H 1"]:
    """R_V: the farthest value from the mean of all that count."""
    v, counted = v.to(P.dtype), (P > 0).any(-1, keepdim=True)
    mean = (v * counted).sum(-2, keepdim=True) / counted.sum(-2, keepdim=True).clamp(min=1)
    far = (v - mean).norm(dim=-1).masked_fill(~counted[..., 0], 0.0)
    return far.amax(-1).repeat_interleave(q.shape[1] // v.shape[1], 1)[..., None]


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3] and len(q) == len(k) and q.shape[-1] == k.shape[-1]
    if not fits or not k.shape[1] or q.shape[1] % k.shape[1] or not k.shape[2]:
        raise ValueError("expected q (B,H,T,D), k (B,G,N,D), v (B,G,N,Dv) with N >= 1 and H a multiple of G, got "
                         f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (k.shape[0], k.shape[2])):
        raise ValueError(f"expected a Boolean mask (B,N) = ({k.shape[0]}, {k.shape[2]}), got {mask.dtype} {tuple(mask.shape)}")
