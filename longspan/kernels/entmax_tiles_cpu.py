"""Causal α-entmax attention in tiles on the CPU: `entmax_tiles.c`, called as `longspan.kernels.entmax_tiles` is."""

from __future__ import annotations

import ctypes
import functools

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from longspan.kernels.entmax_tiles import TILE, Forward


class _Job(ctypes.Structure):
    """Mirrors `Job` in entmax_tiles.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "lengths", "out", "second", "top", "tau", "bits", "grad", "delta",
                                               "dq", "dk", "dv")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "q_len", "k_len", "dim", "v_dim", "skip", "threads")),
        ("alpha", ctypes.c_double), ("scale", ctypes.c_double),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernel; None where it can't be compiled."""
    from longspan.kernels import native

    found = native.library("entmax_tiles.c")
    for name in ("entmax_tiles_forward", "entmax_tiles_backward") if found is not None else ():
        function = getattr(found, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.POINTER(_Job)]
    return found


def forward(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S E"], alpha: float, scale: float,
            varlen: Int[Tensor, " B"] | None, skip: bool, second: bool) -> Forward:
    """`longspan.kernels.entmax_tiles.forward` for float32."""
    (B, H, T, _), S = q.shape, k.shape[2]
    out = q.new_empty(B, H, T, v.shape[3])
    o2 = torch.empty_like(out) if second else None
    top, tau = q.new_empty(B, H, T), q.new_empty(B, H, T)
    words = torch.zeros(B, H, -(-T // TILE), -(-S // TILE // 32), dtype=torch.int32)
    lengths = None if varlen is None else varlen.to("cpu", torch.int64).contiguous()
    _run("entmax_tiles_forward", (q, k, v, lengths, out, o2, top, tau, words, *[None] * 5), alpha, scale, skip)
    return out, o2, top, tau, words


def backward(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S E"],
             grad: Float[Tensor, "B H T E"], o2: Float[Tensor, "B H T E"], top: Float[Tensor, "B H T"],
             tau: Float[Tensor, "B H T"], words: Int32[Tensor, "B H NQ NW"], alpha: float, scale: float,
             varlen: Int[Tensor, " B"] | None, skip: bool
             ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B G S D"], Float[Tensor, "B G S E"]]:
    """`longspan.kernels.entmax_tiles.backward` for float32."""
    found = tuple(torch.empty_like(t) for t in (q, k, v))
    given = (q, k, v, None, None, None, top, tau, words, grad, (grad * o2).sum(-1), *found)
    _run("entmax_tiles_backward", given, alpha, scale, skip)
    return found[0], found[1], found[2]


def _run(name: str, held: tuple[Tensor | None, ...], alpha: float, scale: float, skip: bool) -> None:
    found = library()
    if found is None:
        raise ValueError("backend 'cpu' needs a C compiler; use backend 'reference'")
    q, k, v = held[:3]
    assert q is not None and k is not None and v is not None
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    job = _Job(*(None if t is None else t.data_ptr() for t in held), *sizes, int(skip), torch.get_num_threads(), alpha, scale)
    if getattr(found, name)(ctypes.byref(job)):
        raise MemoryError("entmax attention: no memory for its work space")
