"""The low-bit estimate on a GPU, in Triton: int8 products of 4-bit codes on tensor cores, exact in int32.

One program compares one query block of one head with its key blocks. Importing this module never needs Triton: `available`
says whether the version can run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from longspan.kernels.block_sparse_triton import available
from longspan.kernels.plan import repeat_heads

if TYPE_CHECKING:
    from longspan.kernels.low_bit import LowBit

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def important_blocks_triton(q: LowBit, k: LowBit, bias: Tensor, limit: Tensor, begin: Tensor, end: Tensor, q_block: int,
                            k_block: int) -> Bool[Tensor, "B Hq NQ NK"]:
    """`important_blocks`; inputs are checked by the caller.

    Raises ValueError where Triton can't run, and for codes that aren't int8.
    """
    if not available():
        raise ValueError("backend 'triton' needs the triton package and a GPU; use backend 'cpu' or 'reference'")
    if q.codes.dtype != torch.int8:
        raise ValueError(f"backend 'triton' multiplies int8 codes, got {q.codes.dtype}; use backend 'reference'")
    B, heads, T, D = q.codes.shape
    S, n_q, n_k = k.codes.shape[2], -(-T // q_block), -(-k.codes.shape[2] // k_block)
    rounded = q.groups == "per_thread"
    inverse = q.scales.reciprocal()
    out = torch.zeros(B, heads, n_q, n_k, dtype=torch.uint8, device=limit.device)
    low_bit_kernel[n_q, B * heads](
        q.codes.contiguous(), k.codes.contiguous(), k.scales.contiguous(),
        (bias / repeat_heads(k.scales, heads) if rounded else bias).contiguous(), inverse.contiguous(),
        (limit * inverse).contiguous(), begin, end, out, heads, heads // k.codes.shape[1], k.codes.shape[1], T, S, n_q, n_k,
        D=D, Q_BLOCK=q_block, K_BLOCK=k_block, ROUNDED=rounded, **tile_sizes(q_block, k_block, D),
    )  # fmt: skip
    return out.bool()


def tile_sizes(q_block: int, k_block: int, dim: int) -> dict[str, int]:
    """Powers of two of at least what int8 products on tensor cores want: 16 rows and keys, 32 channels."""
    def up(n: int, least: int) -> int:
        return max(least, 1 << (n - 1).bit_length())

    return {"ROWS": up(q_block, 16), "KEYS": up(k_block, 16), "DIM": up(dim, 32)}


if triton is not None:

    @triton.jit
    def _round_even(x):
        """Nearest whole number, halves to even: adding 2^23 leaves no room for a fraction."""
        size = tl.abs(x)
        whole = (size + 8388608.0) - 8388608.0
        whole = tl.where(x < 0.0, -whole, whole)
        return tl.where(size < 8388608.0, whole, x)

    @triton.jit
    def low_bit_kernel(
        q, k, k_scale, bias, q_inverse, limit, begin, end, out, heads, group, key_heads, T, S, n_q, n_k,
        D: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr,
        KEYS: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        u = tl.program_id(0)
        head = tl.program_id(1).to(tl.int64)
        b = head // heads
        source = b * key_heads + head % heads // group
        inside = tl.arange(0, ROWS)
        rows = u * Q_BLOCK + inside
        real = (inside < Q_BLOCK) & (rows < T)
        d = tl.arange(0, DIM)
        slot = tl.arange(0, KEYS)
        q_tile = tl.load(q + (head * T + rows[:, None]) * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0)
        inverse = tl.load(q_inverse + head * T + rows, mask=real, other=1.0)
        most = tl.load(limit + head * T + rows, mask=real, other=float("inf"))
        first = tl.load(begin + b * n_q + u)
        last = tl.load(end + b * n_q + u)
        for v in range(first, last):
            keys = v * K_BLOCK + slot
            there = (slot < K_BLOCK) & (keys < S)
            k_tile = tl.load(k + (source * S + keys[:, None]) * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
            scale = tl.load(k_scale + source * S + keys, mask=there, other=1.0)
            own = tl.load(bias + head * S + keys, mask=there, other=float("-inf"))
            product = tl.dot(q_tile, tl.trans(k_tile), out_dtype=tl.int32).to(tl.float32)
            shift = own[None, :] * inverse[:, None]
            if ROUNDED:
                scores = (product + _round_even(shift)) * scale[None, :]
            else:
                scores = product * scale[None, :] + shift
            above = (scores > most[:, None]).to(tl.int32)
            tl.store(out + (head * n_q + u) * n_k + v, tl.max(tl.max(above, 1), 0).to(tl.uint8))
