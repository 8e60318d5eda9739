"""Causal α-entmax attention in tiles, α = 1.5 or 2: the plain version, forward and backward, that defines the compiled ones.

`forward` and `backward` are called by `longspan.kernels.entmax_attention`, which says what they compute. Inputs are dense and
of one dtype, float32 or float64. Scores of a row of tiles (64 x S for each head) exist at a time, never the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from longspan.kernels.entmax import threshold

TILE = 64
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Of f at the threshold, and how far below it a tile still gets its bit."""

Forward = tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T E"] | None, Float[Tensor, "B H T"], Float[Tensor, "B H T"],
                Int32[Tensor, "B H NQ NW"]]


def forward(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S E"], alpha: float, scale: float,
            varlen: Int[Tensor, " B"] | None, skip: bool, second: bool) -> Forward:
    """(out, o2 if `second`, top, tau relative to top, words of the tiles' bits); rows past `varlen` have tau = inf."""
    (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
    out = q.new_zeros(B, H, T, v.shape[3])
    o2 = torch.zeros_like(out) if second else None
    top, tau = q.new_zeros(B, H, T), q.new_zeros(B, H, T)
    bits = torch.zeros(B, H, -(-T // TILE), -(-S // TILE), dtype=torch.bool, device=q.device)
    for u, rows, stop in _rows(T, S):
        scores = _scores(q[:, :, rows], k[:, :, :stop], scale, S - T + rows.start)
        if varlen is not None:
            real = torch.arange(T, device=q.device)[rows] < varlen.to(q.device)[:, None]
            scores = scores.masked_fill(~real[:, None, :, None], -torch.inf)
        found = threshold(scores, alpha, tolerance=TOLERANCE[q.dtype])
        top[:, :, rows] = found.top
        tau[:, :, rows] = found.tau if varlen is None else found.tau.masked_fill(~real[:, None], torch.inf)
        x = scores * (alpha - 1) - found.top[..., None] - tau[:, :, rows, None]
        near = F.pad(x > -TOLERANCE[q.dtype], (0, -stop % TILE)).unflatten(-1, (-1, TILE)).any(-1).any(2)
        bits[:, :, u, : near.shape[-1]] = near
        p, w = _weights(x, alpha)
        for b, h, cols in _tiles(near if skip else torch.ones_like(near), stop):
            values = v[b, h // (H // G), cols]
            out[b, h, rows].addmm_(p[b, h, :, cols], values)
            if o2 is not None:
                o2[b, h, rows].addmm_(w[b, h, :, cols], values)
        if o2 is not None:
            total = w.sum(-1, keepdim=True)
            o2[:, :, rows] /= total.masked_fill(total == 0, 1.0)
    return out, o2, top, tau, packed(bits)


def backward(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S E"],
             grad: Float[Tensor, "B H T E"], o2: Float[Tensor, "B H T E"], top: Float[Tensor, "B H T"],
             tau: Float[Tensor, "B H T"], words: Int32[Tensor, "B H NQ NW"], alpha: float, scale: float,
             varlen: Int[Tensor, " B"] | None, skip: bool
             ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B G S D"], Float[Tensor, "B G S E"]]:
    """Gradients of q, k and v from that of the output and from what `forward` gave."""
    (_, H, T, _), (G, S) = q.shape, k.shape[1:3]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * o2).sum(-1)
    bits = unpacked(words, -(-S // TILE))
    for u, rows, stop in _rows(T, S):
        near = bits[:, :, u, : -(-stop // TILE)]
        for b, h, cols in _tiles(near if skip else torch.ones_like(near), stop):
            g = h // (H // G)
            queries, keys, own = q[b, h, rows], k[b, g, cols], grad[b, h, rows]
            scores = _scores(queries, keys, scale, S - T + rows.start - cols.start)
            p, w = _weights(scores * (alpha - 1) - top[b, h, rows, None] - tau[b, h, rows, None], alpha)
            ds = w * (own @ v[b, g, cols].T - delta[b, h, rows, None]) * scale
            dq[b, h, rows].addmm_(ds, keys)
            dk[b, g, cols].addmm_(ds.T, queries)
            dv[b, g, cols].addmm_(p.T, own)
    return dq, dk, dv


def _rows(T: int, S: int) -> Iterator[tuple[int, slice, int]]:
    """(row of tiles, its queries, the end of the keys that they see)."""
    for u in range(-(-T // TILE)):
        rows = slice(u * TILE, min((u + 1) * TILE, T))
        yield u, rows, S - T + rows.stop


def _tiles(near: Bool[Tensor, "B H n"], stop: int) -> Iterator[tuple[int, int, slice]]:
    """(batch row, query head, keys) of every tile that is asked for."""
    for b, h, j in near.nonzero().tolist():
        yield b, h, slice(j * TILE, min((j + 1) * TILE, stop))


def _scores(q: Float[Tensor, "*heads r D"], k: Float[Tensor, "*kv_heads n D"], scale: float, limit: int
            ) -> Float[Tensor, "*heads r n"]:
    """Scaled scores with -inf where key number j is after ``limit + i``, the last that query i may see."""
    if q.ndim == 4:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    own = torch.arange(q.shape[-2], device=q.device)[:, None] + limit
    return (q @ k.mT * scale).masked_fill(torch.arange(k.shape[-2], device=q.device) > own, -torch.inf)


def _weights(x: Float[Tensor, "*n"], alpha: float) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """p and w = dp/ds from x = z - top - tau."""
    u = x.clamp(min=0)
    return (u.square(), u) if alpha == 1.5 else (u, (u > 0).to(u.dtype))


def packed(bits: Bool[Tensor, "*rows NK"]) -> Int32[Tensor, "*rows NW"]:
    """Thirty-two bits to a word, the first in the lowest place."""
    groups = F.pad(bits, (0, -bits.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    words = (groups << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked(words: Int32[Tensor, "*rows NW"], n: int) -> Bool[Tensor, "*rows n"]:
    """The first n bits of what `packed` made."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :n]
