"""Causal attention for some of the queries only: those are compacted, attend, and are put back.

Where most queries need no attention at all, their rows of the score matrix shouldn't be computed. The wanted queries of
each sequence are moved together (padded to the longest sequence of the batch), and read in tiles; a tile reads the keys
up to the position of its last query, not all of them. The output has the full length, with 0 for queries left out.
Every step is differentiable: left-out queries get and give no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels.attend import _repeat, attend

TILE = 128
"""Compacted queries read at once."""


def attend_rows(
    q: Float[Tensor, "B Hq T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rows: Bool[Tensor, "B T"],
    *,
    mask: Bool[Tensor, "#B 1 T S"] | None = None,
    bias: Float[Tensor, "#B #Hq T S"] | None = None,
    scale: float | None = None,
    tile: int = TILE,
) -> Float[Tensor, "B Hq T Dv"]:
    """Causal attention of the queries where `rows` is True; 0 elsewhere.

    Query t stands at key slot S-T+t and sees the slots up to its own. `mask` is True where a query may look, on top of
    that; `bias` is added to the scaled scores. Equals ``attend(q, k, v) * rows`` in values and gradients. Raises
    ValueError when `rows` doesn't have the shape (B, T).
    """
    (B, _, T, _), S = q.shape, k.shape[2]
    if tuple(rows.shape) != (B, T) or rows.dtype != torch.bool:
        raise ValueError(f"rows should be Boolean of shape ({B}, {T}), got {rows.dtype} {tuple(rows.shape)}")
    where, real = compact(rows)
    N = where.shape[1]
    if not N:  # zeros that depend on the inputs without reading them, so that a backward pass finds its way
        nothing = sum(x[:, :, :0].sum() for x in (q, k, v))
        return q.new_zeros(B, q.shape[1], T, v.shape[3]) + nothing
    if N == T and mask is None and bias is None and bool(real.all()):
        return attend(q, k, v, scale=scale, return_lse=False)[0]
    taken = _take(q, where)
    outs = [_tile(taken, k, v, where, real, slice(a, min(N, a + tile)), S - T, mask, bias, scale) for a in range(0, N, tile)]
    out = torch.cat(outs, 2).masked_fill(~real[:, None, :, None], 0.0)
    empty = out.new_zeros(B, q.shape[1], T, v.shape[3])
    return empty.scatter(2, where[:, None, :, None].expand_as(out), out)


def compact(rows: Bool[Tensor, "B T"]) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """The places of the True entries of each row in order, and which of them are real; N is the longest row's count.

    Shorter rows are filled up with places where `rows` is False, so no place stands twice.
    """
    counts = rows.sum(1)
    longest = int(counts.max()) if rows.numel() else 0
    where = (~rows).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    return where, torch.arange(longest, device=rows.device) < counts[:, None]


def _tile(
    q: Tensor, k: Tensor, v: Tensor, where: Tensor, real: Tensor, part: slice, offset: int,
    mask: Tensor | None, bias: Tensor | None, scale: float | None,
) -> Tensor:
    where, real = where[:, part], real[:, part]
    end = int(where[real].max()) + offset + 1
    keys = torch.arange(end, device=q.device)
    see = keys <= where[..., None] + offset
    if mask is not None:
        see = see & _rows(mask[..., :end], where)[:, 0]
    see = torch.where(real[..., None], see, keys == 0)[:, None]  # filled-up queries look at one key; they are zeroed later
    q, k, v = q[:, :, part], k[:, :, :end], v[:, :, :end]
    if bias is None:
        return attend(q, k, v, causal=False, mask=see, scale=scale, return_lse=False)[0]
    added = _rows(bias[..., :end], where).to(q.dtype).masked_fill(~see, float("-inf"))
    return torch.nn.functional.scaled_dot_product_attention(
        q, _repeat(k, q.shape[1]), _repeat(v, q.shape[1]), attn_mask=added, scale=scale
    )


def _take(x: Float[Tensor, "B H T D"], where: Int[Tensor, "B N"]) -> Float[Tensor, "B H N D"]:
    return x.gather(2, where[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _rows(table: Tensor, where: Int[Tensor, "B N"]) -> Tensor:
    """Rows `where` of a table (#B, H, T, S), one selection per sequence."""
    return _take(table.expand(where.shape[0], -1, -1, -1), where)
