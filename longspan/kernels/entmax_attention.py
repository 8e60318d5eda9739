"""Attention whose weights are α-entmax of the scores: exact zeros, so that blocks of the score matrix without weight are skipped.

o_i = sum_j p_ij v_j with p_i = entmax_α of s_ij = scale q_i.k_j over the keys j that query i may see (AdaSplash-2,
arXiv:2604.15180). Causal attention with α = 1.5 or 2 is computed in tiles of 64 queries by 64 keys:

* A row of tiles finds its thresholds from all its scores (`longspan.kernels.entmax`) and sets a bit for every tile that can hold
  weight. The paper's code tests the estimate before the last step; here it is the final threshold less the tolerance, which is
  below the true one in any case, since |f'| >= 1.
* Values are read in tiles with a bit only. What is skipped would add zeros: the result is the same to the last bit.
* Besides the output, forward keeps thresholds, bits, and o2_i = sum_j w_ij v_j / sum_j w_ij, with w = dp/ds: p^(1/2) for α = 1.5,
  1 on the support for 2. Backward needs dS = w (dP - delta) with dP = dO V^T, and delta = <w,dP> / sum w = dO.o2. It computes the
  scores of tiles with a bit again, so that memory is O(T D) and a bit for every tile.

Anything else (other α, masks, biases, attention that isn't causal) is computed over all scores, in chunks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from longspan.kernels import entmax_tiles
from longspan.kernels.attend import causal_mask
from longspan.kernels.entmax import check_alpha, entmax, statistics_dtype
from longspan.kernels.entmax_tiles import TILE
from longspan.kernels.plan import visible_blocks

BACKENDS = ("reference", "cpu", "triton")
TILED_ALPHAS = (1.5, 2.0)
LEAST_ROWS = 16
"""Fewer query rows than this are not worth a row of tiles."""
DENSE_SCORES = 1 << 22
"""Scores (query-key pairs) the dense path holds at once."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Which tiles of 64 queries by 64 keys can hold weight: bit j % 32 of word j // 32 of a row of tiles."""

    words: Int32[Tensor, "B H NQ NW"]
    q_len: int
    k_len: int

    @property
    def mask(self) -> Bool[Tensor, "B H NQ NK"]:
        """True where the bit is set."""
        return entmax_tiles.unpacked(self.words, -(-self.k_len // TILE))

    @property
    def empty_share(self) -> float:
        """Share of the causal tiles that hold no weight."""
        seen = visible_blocks(self.q_len, self.k_len, TILE, TILE, device=self.words.device)
        return 1.0 - float((self.mask & seen).float().sum() / (seen.sum() * self.words.shape[0] * self.words.shape[1]))


@overload
def entmax_attention(q: Tensor, k: Tensor, v: Tensor, alpha: float = 1.5, *, scale: float | None = None, causal: bool = True,
                     mask: Tensor | None = None, bias: Tensor | None = None, varlen: Tensor | None = None, skip: bool = True,
                     backend: str | None = None, return_tiles: Literal[False] = False) -> Tensor: ...  # fmt: skip


@overload
def entmax_attention(q: Tensor, k: Tensor, v: Tensor, alpha: float = 1.5, *, scale: float | None = None, causal: bool = True,
                     mask: Tensor | None = None, bias: Tensor | None = None, varlen: Tensor | None = None, skip: bool = True,
                     backend: str | None = None, return_tiles: Literal[True]) -> tuple[Tensor, Tiles]: ...  # fmt: skip


def entmax_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    alpha: float = 1.5,
    *,
    scale: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "#B #H #T #S"] | None = None,
    bias: Float[Tensor, "#B #H #T #S"] | None = None,
    varlen: Int[Tensor, " B"] | None = None,
    skip: bool = True,
    backend: str | None = None,
    return_tiles: bool = False,
) -> Float[Tensor, "B H T E"] | tuple[Float[Tensor, "B H T E"], Tiles]:
    """Attention of the last T of S positions with α-entmax weights, differentiable once. Query head h reads key head h // (H/G).

    Any T, S, D and α are served. Statistics are float32 (float64 for float64 inputs), the output has the dtype of `q`; a query
    that sees nothing gets 0.

    Args:
        scale: of the scores, positive; by default 1/sqrt(D).
        causal: query i sees keys up to S - T + i.
        mask: True where a query may look, besides `causal`.
        bias: added to the scaled scores; -inf hides a key.
        varlen: real tokens of each row, which come first; what lies behind is 0 in output and gradients. Needs T = S.
        skip: whether tiles without weight are skipped; changes nothing but the time.
        backend: "reference", "cpu" (C kernels) or "triton" (T = S, values as wide as keys); by default the fastest that applies.
            What isn't computed in tiles knows the first two.
        return_tiles: also return the `Tiles`; only for causal attention with α = 1.5 or 2 and neither mask nor bias.

    Raises:
        Refused: alpha is not a finite number above 1.
        ValueError: shapes or dtypes that don't fit, T > S under `causal`, a backend that doesn't exist or doesn't apply, tiles
            asked for where there are none.
    """
    check_alpha(alpha)
    _check(q, k, v, causal, mask, bias, varlen)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    in_tiles = causal and mask is None and bias is None and alpha in TILED_ALPHAS
    if return_tiles and not in_tiles:
        raise ValueError(f"tiles are for causal attention with alpha 1.5 or 2 and neither mask nor bias, got alpha={alpha}, "
                         f"causal={causal}")
    (B, H, T, _), S = q.shape, k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        if not S or not q.numel() or not v.numel():
            out = q.new_zeros(B, H, T, v.shape[3])
            words = torch.zeros(B, H, -(-T // TILE), -(-S // TILE // 32), dtype=torch.int32, device=q.device)
        elif in_tiles and (T >= LEAST_ROWS or return_tiles):
            out, words = _Tiled.apply(q, k, v, float(alpha), scale, varlen, skip, _backend(q, v, S, backend))
        else:
            return _dense(q, k, v, alpha, scale, _visible(q, k, causal, mask, varlen), bias, backend)
    return (out, Tiles(words, T, S)) if return_tiles else out


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: float, scale: float, varlen: Tensor | None, skip: bool,
                backend: str) -> tuple[Tensor, Tensor]:
        second = any(ctx.needs_input_grad[:3])
        given = _prepared(backend, q.detach(), k.detach(), v.detach())
        out, o2, top, tau, words = _tiles_of(backend).forward(*given, alpha, scale, varlen, skip, second)
        ctx.mark_non_differentiable(words)
        if second:
            ctx.save_for_backward(q, k, v, o2, top, tau, words)
        ctx.settings, ctx.backend = (alpha, scale, varlen, skip), backend
        return out.to(q.dtype), words

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        *inputs, o2, top, tau, words = ctx.saved_tensors
        given = _prepared(ctx.backend, *inputs, grad)
        found = _tiles_of(ctx.backend).backward(*given, o2, top, tau, words, *ctx.settings)
        return *(g.to(t.dtype) for g, t in zip(found, inputs)), None, None, None, None, None


def _tiles_of(backend: str) -> Any:
    """The module whose `forward` and `backward` do the work (the signatures of `longspan.kernels.entmax_tiles`)."""
    if backend == "cpu":
        from longspan.kernels import entmax_tiles_cpu

        return entmax_tiles_cpu
    if backend == "triton":
        from longspan.kernels import entmax_tiles_triton

        return entmax_tiles_triton
    return entmax_tiles


def _prepared(backend: str, *tensors: Tensor) -> list[Tensor]:
    """Dense, and wide enough for sums; tensor cores take narrow numbers as they are."""
    return [t.contiguous() if backend == "triton" else t.to(statistics_dtype(t)).contiguous() for t in tensors]


def _backend(q: Tensor, v: Tensor, k_len: int, backend: str | None) -> str:
    """The backend asked for, or the fastest that applies, for attention in tiles. Raises ValueError for one that doesn't."""
    narrow, same = q.dtype != torch.float64, q.shape[2:] == (k_len, v.shape[3])
    if backend is None:
        from longspan.kernels.block_sparse_triton import available
        from longspan.kernels.entmax_tiles_cpu import library

        compiled = q.device.type == "cpu" and narrow and library() is not None
        return "cpu" if compiled else "triton" if q.is_cuda and available() and narrow and same else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if (backend == "cpu" and not (q.device.type == "cpu" and narrow)) or (backend == "triton" and not (narrow and same)):
        raise ValueError(f"backend {backend!r} doesn't apply to q {tuple(q.shape)} of {q.dtype} on {q.device}, {k_len} keys and "
                         f"values of {v.shape[3]} channels; use backend 'reference'")
    return backend


# ----------------------------------------------------------------------------------------------------------------- dense


def _visible(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, varlen: Tensor | None) -> Tensor | None:
    """Everything that hides keys as one mask that broadcasts to (B,H,T,S); None when every query sees every key."""
    T, S = q.shape[2], k.shape[2]
    see = causal_mask(T, S, q.device)[None, None] if causal and T > 1 else None
    if mask is not None:
        see = mask if see is None else see & mask
    if varlen is not None:
        real = torch.arange(S, device=q.device) < varlen.to(q.device)[:, None]
        real = (real[:, :, None] & real[:, None])[:, None]
        see = real if see is None else see & real
    return see


def _dense(q: Tensor, k: Tensor, v: Tensor, alpha: float, scale: float, see: Tensor | None, bias: Tensor | None,
           backend: str | None) -> Tensor:
    """All scores of some rows at a time. Where there are several such chunks, backward computes each one's scores again."""
    (B, H, T, _), (G, S), wide = q.shape, k.shape[1:3], statistics_dtype(q)

    def chunk(queries: Tensor, k: Tensor, v: Tensor, see: Tensor | None, bias: Tensor | None) -> Tensor:
        k, v = (t.to(wide).repeat_interleave(H // G, 1) for t in (k, v))
        scores = queries.to(wide) @ k.mT * scale
        if bias is not None:
            scores = scores + bias.to(wide)
        if see is not None:
            scores = scores.masked_fill(~see, -torch.inf)
        return (entmax(scores, alpha, backend=backend) @ v).to(q.dtype)

    rows = max(1, DENSE_SCORES // (B * H * S))
    if rows >= T:
        return chunk(q, k, v, see, bias)
    parts = []
    for start in range(0, T, rows):
        own = slice(start, start + rows)
        parts.append(checkpoint(chunk, q[:, :, own], k, v, *(t if t is None or t.shape[-2] == 1 else t[..., own, :]
                                                             for t in (see, bias)), use_reentrant=False))
    return torch.cat(parts, 2)


# ----------------------------------------------------------------------------------------------------------------- checks


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, bias: Tensor | None, varlen: Tensor | None
           ) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"expected q (B,H,T,D), k (B,G,S,D) and v (B,G,S,Dv), got {shapes}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"expected as many values as keys, got {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"expected query heads that are a multiple of the key heads, got {q.shape[1]} and {k.shape[1]}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"expected q, k and v of one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    full = (*q.shape[:3], k.shape[2])
    if causal and full[2] > full[3] > 0:
        raise ValueError(f"causal attention of {full[2]} queries needs at least as many keys, got {full[3]}")
    for name, given in (("mask", mask), ("bias", bias)):
        if given is not None and (given.ndim != 4 or any(n not in (1, want) for n, want in zip(given.shape, full))):
            raise ValueError(f"{name}: expected a shape that broadcasts to {full}, got {tuple(given.shape)}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask: expected Boolean (True = may look), got {mask.dtype}")
    if varlen is not None and (varlen.dtype not in (torch.int32, torch.int64) or varlen.shape != full[:1] or full[2] != full[3]):
        raise ValueError(f"varlen: expected int32 or int64 of shape ({full[0]},) and as many queries as keys, got {varlen.dtype} "
                         f"{tuple(varlen.shape)} for {shapes}")
