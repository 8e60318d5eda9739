"""Taking and putting the rows of heads on a GPU, in Triton: one launch copies all heads of all batch rows.

One program moves up to 64 rows of one head. Taking and putting are the same copy: one side's row is its own number, the
other side's is read from the list of rows. Importing this module never needs Triton; `available` says whether it runs.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from longspan.kernels.block_sparse_triton import available

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

ROWS = 64


def take_triton(t: Float[Tensor, "B Hs S D"], kept: Int[Tensor, "B H N"]) -> Float[Tensor, "B H N D"]:
    """`take_tokens`; inputs are checked by the caller. Raises ValueError where Triton can't run."""
    out = t.new_empty(*kept.shape, t.shape[3])
    _launch(t, out, kept, kept.shape[1] // t.shape[1], putting=False)
    return out


def put_triton(t: Float[Tensor, "B H N D"], kept: Int[Tensor, "B H N"], length: int) -> Float[Tensor, "B H L D"]:
    """`put_tokens`; inputs are checked by the caller. Raises ValueError where Triton can't run."""
    B, heads, _, D = t.shape
    out = t.new_zeros(B, length, heads, D).transpose(1, 2)
    _launch(t, out, kept, 1, putting=True)
    return out


def _launch(source: Tensor, target: Tensor, kept: Tensor, group: int, *, putting: bool) -> None:
    if not available():
        raise ValueError("backend 'triton' needs the triton package and a GPU; use backend 'cpu' or 'reference'")
    if not kept.numel():
        return
    B, heads, N = kept.shape
    kept, D = kept.contiguous(), source.shape[3]
    copy_rows_kernel[(triton.cdiv(N, ROWS), B * heads)](
        source, target, kept, *source.stride(), *target.stride(), heads, group, N, PUTTING=putting, D=D,
        DIM=triton.next_power_of_2(D), ROWS=ROWS)  # fmt: skip


if triton is not None:

    @triton.jit
    def copy_rows_kernel(
        source, target, kept, ss_b, ss_h, ss_s, ss_d, st_b, st_h, st_s, st_d, heads, group, N,
        PUTTING: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = own < N
        named = tl.load(kept + (b * heads + h) * N + own, mask=there, other=0)
        own = own.to(tl.int64)
        if PUTTING:
            read, write = own, named
        else:
            read, write = named, own
        d = tl.arange(0, DIM)
        at = there[:, None] & (d < D)[None, :]
        source += b * ss_b + (h // group) * ss_h
        target += b * st_b + h * st_h
        rows = tl.load(source + read[:, None] * ss_s + d[None, :] * ss_d, mask=at)
        tl.store(target + write[:, None] * st_s + d[None, :] * st_d, rows, mask=at)
