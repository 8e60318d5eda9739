"""Softplus attention with re-weighting (LSSA, LSSAR): scores made positive, divided by their sum, then sharpened.

Softmax makes scores positive and divides by the row's sum; only the second matters (arXiv:2501.13428). With the cosine
c_ij of query and key, heads of d channels, and n_i keys that row i sees:

    a_ij = softplus(log(d) log(n_i) c_ij),    A_ij = a_ij / sum_j a_ij                            (LSSA)
    x_ij = relu(n_i A_ij - o_i)^p,            A'_ij = x_ij / sum_j x_ij,   o_i = [n_i > 3]        (LSSAR)

The temperature grows with the row's own length, so that long rows don't flatten; n_i A_ij is 1 on average, so the second
stage keeps keys above it. Every row of training already is of a length of its own.

A fused kernel reads the keys twice: for a row's sum and maximum, then for its sharpened average. So does this one, rows
and keys in tiles. Statistics are float32 at least. Padding, other documents and keys outside a window don't count in n_i.
Scores have no additive meaning here, so a position scheme with a bias is refused.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.layers.attention.base import AttentionModule, KVState, Visible
from longspan.layers.attention.rows import SCORES, check_call, in_parts, product, row_parts, seen_by, widened
from longspan.layers.base import Mixer
from longspan.layers.context import Context
from longspan.registry import Refused, knob, method

EPS = 1e-6
"""Least norm a query or key is divided by: what is 0 stays 0, and has cosine 0 with everything."""
EXEMPT = 3
"""Rows that see no more keys than this keep those below the average too."""
TILE = 1 << 14
"""Keys read at once; a row's scores are computed twice where it sees more."""


def positive(
    cosines: Float[Tensor, "*B T S"], see: Bool[Tensor, "*#B T S"], n: Float[Tensor, "*#B T 1"], width: int
) -> Float[Tensor, "*B T S"]:
    """a_ij: positive where a key is seen, 0 elsewhere. `n` keys are seen by each row, heads have `width` channels."""
    temperature = math.log(width) * n.clamp(min=1).log()
    return F.softplus(temperature * cosines).masked_fill(~see, 0.0)


def sharpened(
    a: Float[Tensor, "*B T S"],
    n: Float[Tensor, "*#B T 1"],
    total: Float[Tensor, "*B T 1"],
    top: Float[Tensor, "*B T 1"],
    p: float,
) -> Float[Tensor, "*B T S"]:
    """x_ij up to a factor of the row, from a row's sum and largest entry; `a` itself where no key is above average.

    The row's largest r = relu(n A - o) is brought to 1 before the power, which the division by the sum takes out again.
    Keys that tie differ from the average by rounding only, which must not be sharpened: up to 8 steps of the dtype.
    """
    share = n / total.clamp(min=_tiny(total))
    below = (n > EXEMPT).to(a.dtype)
    most = (share * top - below).detach()
    tied = most <= max(1e-12, 8 * torch.finfo(a.dtype).eps)
    r = (share * a - below) / most.masked_fill(tied, 1.0)
    above = r > 0
    return torch.where(tied, a, r.masked_fill(~above, 1.0).pow(p).masked_fill(~above, 0.0))


def softplus_weights(
    cosines: Float[Tensor, "*B T S"], see: Bool[Tensor, "*#B T S"], width: int, p: float = 15.0, reweight: bool = True
) -> Float[Tensor, "*B T S"]:
    """The weights A' (A without `reweight`) written out: the definition. A row that sees nothing has weights 0."""
    n = see.sum(-1, keepdim=True).to(cosines.dtype)
    x = positive(cosines, see, n, width)
    if reweight:
        x = sharpened(x, n, x.sum(-1, keepdim=True), x.amax(-1, keepdim=True), p)
    total = x.sum(-1, keepdim=True)
    return x / total.clamp(min=_tiny(total))


def softplus_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    visible: Visible,
    *,
    p: float = 15.0,
    reweight: bool = True,
    most: int = SCORES,
    tile: int = TILE,
) -> Float[Tensor, "B H T Dv"]:
    """Values averaged with `softplus_weights`, for unit queries and keys (`unit`), rows and keys in tiles."""
    check_call(q, k, v)
    check_width(q.shape[-1])

    def rows(part: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _rows(widened(q[:, :, part]), k, v, seen_by(visible, part), p, reweight, tile)

    # A part holds one tile of keys at a time; in training all of them, for the gradient.
    parts = row_parts(q, k if torch.is_grad_enabled() else k[:, :, :tile], most)
    return in_parts(rows, parts, q, k, v)


def _rows(q: Tensor, k: Tensor, v: Tensor, see: Tensor, p: float, reweight: bool, tile: int) -> Tensor:
    """Two passes over the keys; a row's scores are computed twice unless one tile holds them."""
    width, end = q.shape[-1], see.shape[-1]
    n = see.sum(-1, keepdim=True).to(q.dtype)
    tiles = [slice(a, min(a + tile, end)) for a in range(0, end, tile)]

    def scores(part: slice) -> Tensor:
        return positive(product(q, widened(k[:, :, part]).mT), see[..., part], n, width)

    once = scores(tiles[0]) if len(tiles) == 1 else None
    total = top = q.new_zeros(*q.shape[:3], 1)
    for part in tiles if reweight else []:
        a = scores(part) if once is None else once
        total, top = total + a.sum(-1, keepdim=True), torch.maximum(top, a.amax(-1, keepdim=True))
    mass, out = q.new_zeros(*q.shape[:3], 1), q.new_zeros(*q.shape[:3], v.shape[-1])
    for part in tiles:
        a = scores(part) if once is None else once
        x = sharpened(a, n, total, top, p) if reweight else a
        mass, out = mass + x.sum(-1, keepdim=True), out + product(x, widened(v[:, :, part]))
    return out / mass.clamp(min=_tiny(mass))


def unit(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """`x` with norm 1, computed in float32 at least; 0 stays 0."""
    return F.normalize(widened(x), dim=-1, eps=EPS).to(x.dtype)


def seen_from(mask: Tensor, T: int, S: int) -> Visible:
    """Which keys are visible by a mask of another library: Boolean with True = keep, or additive with 0 and -inf.

    Raises:
        Refused: any other number in the mask; these weights know no additive bias.
        ValueError: a mask that can't be spread over (B,1,T,S).
    """
    if mask.dtype != torch.bool:
        odd = mask[~((mask == 0) | torch.isneginf(mask))] if mask.is_floating_point() else mask.flatten()
        if odd.numel():
            raise Refused(f"mask: found {odd[0].item()}; expected True (seen) and False, or 0 and -inf: softplus attention "
                          "has no additive bias.")
        mask = mask == 0
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, T) or mask.shape[3] not in (1, S):
        raise ValueError(f"mask should spread over (B,1,{T},{S}), got {tuple(mask.shape)}")
    return Visible(T, S, mask.expand(mask.shape[0], 1, T, S), mask.device)


def check_width(head_dim: int) -> None:
    """Refuse heads of one channel."""
    if head_dim < 2:
        raise Refused(f"softplus: heads of {head_dim} channel have temperature log(1) = 0, so that every row is uniform; "
                      "expected at least 2.")


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


class SoftplusAttention(AttentionModule):
    """Softplus weights over the visible keys; keys are stored rotated and with norm 1."""

    def __init__(self, knobs: Softplus, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        check_width(head_dim)
        super().__init__(dim, n_heads, n_kv_heads, head_dim, knobs.window)
        self.p, self.reweight = knobs.p, knobs.reweight

    def turned(
        self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], ctx: Context
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv T D"]]:
        return unit(q), unit(k)

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        return softplus_attention(q, held.k, held.v, visible, p=self.p, reweight=self.reweight)


@method("softplus", kind="mixer", system="softplus-attention", paper="arXiv:2501.13428", capabilities=("trains",),
        summary="Attention by softplus of cosines, normalised by its sum, then sharpened above the row's average.")
class Softplus(Mixer):
    """LSSAR: softplus with a length-aware temperature, and re-weighting by a power; without it LSSA."""

    p: float = knob(15.0, "power of what is above the row's average; 3 suits the trained length, 15 longer ones")
    reweight: bool = knob(True, "sharpen; otherwise normalised softplus alone (LSSA)")
    window: int | None = knob(None, "tokens a query sees, itself included; None for all", low=1)

    positions: ClassVar[frozenset[str]] = frozenset({"rotate"})

    def check(self) -> None:
        if self.p <= 0:
            raise Refused(f"softplus(p={self.p}): expected a number above 0, such as 15.")

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> SoftplusAttention:
        return SoftplusAttention(self, dim, n_heads, n_kv_heads, head_dim)
