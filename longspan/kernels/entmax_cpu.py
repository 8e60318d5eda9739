"""α-entmax on the CPU: calls into the C kernel of rows, `entmax.c`."""

from __future__ import annotations

import ctypes
import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Rows(ctypes.Structure):
    """Mirrors `Job` in entmax.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "grad", "out", "iterations")),
        *((name, ctypes.c_int64) for name in ("rows", "n", "dtype", "threads")),
        ("alpha", ctypes.c_double),
    ]  # fmt: skip


@functools.cache
def rows_library() -> ctypes.CDLL | None:
    """The kernel of rows; None where it can't be compiled."""
    from longspan.kernels import native

    library = native.library("entmax.c")
    if library is not None:
        library.entmax_rows.restype, library.entmax_rows.argtypes = ctypes.c_int64, [ctypes.POINTER(_Rows)]
    return library


def entmax_forward(scores: Float[Tensor, "*rows n"], alpha: float) -> tuple[Float[Tensor, "*rows n"], Int[Tensor, "*rows"]]:
    """Probabilities in the dtype of `scores`, and the steps of refinement of each row.

    Raises ValueError where the kernel can't be compiled.
    """
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    iterations = torch.empty(scores.shape[:-1], dtype=torch.int32)
    _run(scores, None, out, iterations, alpha)
    return out, iterations


def entmax_backward(p: Float[Tensor, "*rows n"], grad: Float[Tensor, "*rows n"], alpha: float) -> Float[Tensor, "*rows n"]:
    """The gradient of the scores from probabilities and their gradient. Raises what `entmax_forward` raises."""
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    _run(p, grad.to(p.dtype), out, None, alpha)
    return out


def _run(x: Tensor, grad: Tensor | None, out: Tensor, iterations: Tensor | None, alpha: float) -> None:
    library = rows_library()
    if library is None:
        raise ValueError("backend 'cpu' needs a C compiler; use backend 'reference'")
    held = (x.detach().contiguous(), None if grad is None else grad.contiguous(), out, iterations)
    n = x.shape[-1]
    job = _Rows(*(None if t is None else t.data_ptr() for t in held), x.numel() // n, n, _DTYPES[x.dtype],
                torch.get_num_threads(), alpha)
    if library.entmax_rows(ctypes.byref(job)):
        raise MemoryError("entmax: no memory for its work space")
