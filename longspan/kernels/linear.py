"""The modules of a decode step: a few rows meet weights that are far larger, so reading the weights is the work.

`linear`, `gated_mlp` and `rms_norm` are what PyTorch computes in several steps, which define them. On CPUs PyTorch rearranges
bfloat16 weights for its matrix kernels anew in every call, which takes several times as long as reading them; the C versions
read them once, in place, and each is one call instead of many.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.kernels import native

FEW_ROWS = 8
"""Rows up to which the C version is used; beyond, arithmetic counts, and PyTorch's kernels are better at it."""
_CALL = struct.Struct("4Q7q")
_MLP = struct.Struct("4Q7q" * 3)
_NORM = struct.Struct("3Q3qd")
Few = Callable[[bytes], int]


def linear(x: Float[Tensor, "... K"], weight: Float[Tensor, "N K"],
           bias: Float[Tensor, " N"] | None = None) -> Float[Tensor, "... N"]:
    """``x @ weight.T + bias``, sums in float32."""
    kernel = _kernel("longspan_linear") if _few(x, weight, bias) else None
    if kernel is not None:
        rows, out = _rows(x), x.new_empty((*x.shape[:-1], weight.shape[0]))
        if kernel(_CALL.pack(*_fields(rows, weight, bias, out))) == 0:
            return out
    return F.linear(x, weight, bias)


def gated_mlp(x: Float[Tensor, "... K"], gate: Float[Tensor, "N K"], up: Float[Tensor, "N K"],
              down: Float[Tensor, "K N"]) -> Float[Tensor, "... K"]:
    """``down(silu(gate(x)) * up(x))`` without biases (SwiGLU, arXiv:2002.05202, equation 6)."""
    kernel = _kernel("longspan_mlp") if _few(x, gate, None) and _few(x, up, None) and _few(x, down, None, x.shape[-1]) else None
    if kernel is not None:
        rows, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        inner = x.new_empty((2, rows.shape[0], gate.shape[0]))
        call = (*_fields(rows, gate, None, inner[0]), *_fields(rows, up, None, inner[1]), *_fields(inner[0], down, None, out))
        if kernel(_MLP.pack(*call)) == 0:
            return out
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def rms_norm(x: Float[Tensor, "... K"], weight: Float[Tensor, " K"], eps: float) -> Float[Tensor, "... K"]:
    """``weight * x / sqrt(mean(x²) + eps)``, the quotient rounded to the dtype of x (RMSNorm, arXiv:1910.07467)."""
    kernel = _kernel("longspan_rms_norm") if _few(x, weight[None], None) else None
    if kernel is not None:
        rows, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        fields = (rows.data_ptr(), weight.data_ptr(), out.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0), eps)
        if kernel(_NORM.pack(*fields)) == 0:
            return out
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rows(x: Tensor) -> Float[Tensor, "m K"]:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _fields(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> tuple[int, ...]:
    """One linear layer as linear.c reads it. The tensors must outlive the call."""
    return (rows.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), rows.shape[0],
            weight.shape[0], weight.shape[1], rows.stride(0), weight.stride(0), weight.shape[0], torch.get_num_threads())


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, width: int = 0) -> bool:
    """Whether the C version applies: bfloat16 on the CPU, few rows, whole vectors, no gradient wanted."""
    K = width or weight.shape[-1]
    if (x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or not x.is_cpu or not weight.is_cpu
            or not 0 < x.numel() <= FEW_ROWS * K or K % 32 or weight.stride(1) != 1):
        return False
    if bias is not None and (bias.dtype is not torch.bfloat16 or not bias.is_contiguous()):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return not torch.compiler.is_compiling()


@functools.lru_cache(maxsize=3)
def _kernel(name: str) -> Few | None:
    library = native.library("linear.c")
    if library is None:
        return None
    function: Any = getattr(library, name)
    function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int
    return function
