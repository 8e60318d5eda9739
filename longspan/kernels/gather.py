"""Rows of every head taken out and put back: what attention among a subset of the tokens reads and writes.

Head h takes its own rows ``kept[b, h]`` of queries, keys or values. Where a group of query heads shares a key head, all
of them read that one head's rows: repeated keys and values are never made. Put back to the full length, rows that were
not taken are 0.

The definition is `torch.gather` and `torch.scatter` (`reference`); the CPU version copies whole rows, the Triton version
(`gather_triton`) does so in one launch. All of them copy, so they agree bit for bit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

BACKENDS = ("reference", "cpu", "triton")


def take_tokens(t: Float[Tensor, "B Hs S D"], kept: Int[Tensor, "B H N"], *, backend: str | None = None
                ) -> Float[Tensor, "B H N D"]:
    """The rows `kept` of every head; head h reads head h // (H/Hs) of `t`.

    `backend` is "reference", "cpu" or "triton"; by default the fastest that applies, and the reference where gradients
    are wanted. Raises ValueError for shapes that don't fit and rows outside 0..S-1.
    """
    if t.ndim != 4 or kept.ndim != 3 or kept.shape[0] != t.shape[0] or not t.shape[1] or kept.shape[1] % t.shape[1]:
        raise ValueError(f"expected t (B,Hs,S,D) and kept (B,H,N) with H a multiple of Hs, got {tuple(t.shape)} and "
                         f"{tuple(kept.shape)}")
    _check_rows(kept, t.shape[2])
    backend = _chosen(backend, t)
    if backend == "triton":
        from longspan.kernels.gather_triton import take_triton

        return take_triton(t, kept)
    return _take_rows(t, kept) if backend == "cpu" else _take_reference(t, kept)


def put_tokens(t: Float[Tensor, "B H N D"], kept: Int[Tensor, "B H N"], length: int, *, backend: str | None = None
               ) -> Float[Tensor, "B H L D"]:
    """Row n of head h written to row ``kept[b, h, n]`` of a result of `length` rows, the others 0.

    `kept` names no row of a head twice. The result lies in memory as (B,L,H,D), as the output projection reads it.
    Raises ValueError for shapes that don't fit and rows outside 0..length-1.
    """
    if t.ndim != 4 or kept.shape != t.shape[:3]:
        raise ValueError(f"expected t (B,H,N,D) and kept (B,H,N), got {tuple(t.shape)} and {tuple(kept.shape)}")
    _check_rows(kept, length)
    backend = _chosen(backend, t)
    if backend == "triton":
        from longspan.kernels.gather_triton import put_triton

        return put_triton(t, kept, length)
    return _put_rows(t, kept, length) if backend == "cpu" else _put_reference(t, kept, length)


# ------------------------------------------------------------------------------------------------------------ definition


def _take_reference(t: Tensor, kept: Tensor) -> Tensor:
    """Differentiable; the group's heads are a stride of 0, not copies."""
    (B, heads, N), shared, D = kept.shape, t.shape[1], t.shape[3]
    whole = t[:, :, None].expand(-1, -1, heads // shared, -1, -1)
    return whole.gather(3, kept.reshape(B, shared, heads // shared, N, 1).expand(-1, -1, -1, -1, D)).view(B, heads, N, D)


def _put_reference(t: Tensor, kept: Tensor, length: int) -> Tensor:
    rows = kept.transpose(1, 2)[..., None].expand(-1, -1, -1, t.shape[3])
    return _zeros(t, length).transpose(1, 2).scatter(1, rows, t.transpose(1, 2)).transpose(1, 2)


def _zeros(t: Tensor, length: int) -> Tensor:
    B, heads, _, D = t.shape
    return t.new_zeros(B, length, heads, D).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------------- CPU


def _take_rows(t: Tensor, kept: Tensor) -> Tensor:
    B, heads, N = kept.shape
    out, group = t.new_empty(B, heads, N, t.shape[3]), heads // t.shape[1]
    with torch.no_grad():
        for b in range(B):
            for h in range(heads):
                torch.index_select(t[b, h // group], 0, kept[b, h], out=out[b, h])
    return out


def _put_rows(t: Tensor, kept: Tensor, length: int) -> Tensor:
    out = _zeros(t, length)
    with torch.no_grad():
        for b in range(t.shape[0]):
            for h in range(t.shape[1]):
                out[b, h].index_copy_(0, kept[b, h], t[b, h])
    return out


# ---------------------------------------------------------------------------------------------------------------- choice


def _chosen(backend: str | None, t: Tensor) -> str:
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
        return backend
    if torch.is_grad_enabled() and t.requires_grad:
        return "reference"
    if t.device.type == "cpu":
        return "cpu"
    from longspan.kernels.gather_triton import available

    return "triton" if t.is_cuda and available() else "reference"


def _check_rows(kept: Tensor, length: int) -> None:
    if kept.dtype != torch.int64:
        raise ValueError(f"kept: expected int64 row numbers, got {kept.dtype}")
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < length:
        raise ValueError(f"kept: expected rows in 0..{length - 1}, got {int(kept.min())}..{int(kept.max())}")
