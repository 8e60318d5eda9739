"""Block-sparse attention on a GPU, in Triton.

One program computes up to 128 query rows of one query block, head and batch row: it walks the key blocks that the plan
lists for it, then the single columns that lie in none of those blocks, with the online softmax of flash attention
(FlashAttention-2, arXiv:2307.08691). Causality and padding are masks inside a tile.

Importing this module never needs Triton: `available` says whether the version can run here.
"""

from __future__ import annotations

import os

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.kernels.plan import ReadPlan

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

MAX_ROWS = 128
COLUMN_TILE = 64


def available() -> bool:
    """Whether Triton is installed and there is a GPU (or Triton's interpreter) to run it."""
    return triton is not None and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


def block_sparse_triton(q: Float[Tensor, "B Hq T D"], k: Float[Tensor, "B Hkv S D"], v: Float[Tensor, "B Hkv S D"],
                        plan: ReadPlan, scale: float, valid: Bool[Tensor, "B S"] | None
                        ) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hq T"]]:
    """(out, lse) of `block_sparse_attention`; inputs are checked by the caller.

    Raises ValueError where Triton can't run.
    """
    if not available():
        raise ValueError("backend 'triton' needs the triton package and a GPU; use backend 'cpu' or 'reference'")
    B, heads, T, D = q.shape
    plan = plan.to(q.device)
    out = q.new_empty(B, T, heads, D).transpose(1, 2)
    lse = q.new_empty(B, heads, T, dtype=torch.float32)
    columns = plan.columns is not None
    nothing = plan.blocks
    tiles = tile_sizes(plan.q_block, plan.k_block, D)
    grid = (plan.n_q_blocks * -(-plan.q_block // tiles["ROWS"]), B * heads)
    block_sparse_kernel[grid](
        q, k, v, out, lse, plan.offsets, plan.blocks,
        plan.column_offsets if columns else nothing, plan.columns if columns else nothing,
        plan.block_map.contiguous().view(torch.uint8) if columns else nothing,
        valid.contiguous().view(torch.uint8) if valid is not None else nothing,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        heads, heads // k.shape[1], heads // plan.heads, plan.heads, 0 if plan.batch == 1 else 1,
        T, plan.k_len, plan.n_q_blocks, plan.n_k_blocks, plan.first_limit,
        plan.column_offsets.shape[-1] - 1 if plan.column_offsets is not None else 0, scale * 1.4426950408889634,
        D=D, Q_BLOCK=plan.q_block, K_BLOCK=plan.k_block, COLUMNS=columns, PADDED=valid is not None,
        COLUMN_TILE=COLUMN_TILE, **tiles,
    )  # fmt: skip
    return out, lse


def tile_sizes(q_block: int, k_block: int, dim: int) -> dict[str, int]:
    """Powers of two of at least 16, as tensor cores want them."""
    def up(n: int) -> int:
        return max(16, 1 << (n - 1).bit_length())

    return {"ROWS": min(MAX_ROWS, up(q_block)), "KEYS": min(64, up(k_block)), "DIM": up(dim)}


if triton is not None:

    @triton.jit
    def _read(q, k, v, keys, there, limits, o, total, top, sk_s, sk_d, sv_s, sv_d, scale2, D: tl.constexpr,
              DIM: tl.constexpr):
        """One tile of keys: logits, new maximum, weights, weighted values."""
        d = tl.arange(0, DIM)
        at = there[:, None] & (d < D)[None, :]
        k_tile = tl.load(k + keys[:, None] * sk_s + d[None, :] * sk_d, mask=at, other=0.0)
        v_tile = tl.load(v + keys[:, None] * sv_s + d[None, :] * sv_d, mask=at, other=0.0)
        logits = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale2
        logits = tl.where(there[None, :] & (keys[None, :] <= limits[:, None]), logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - level[:, None])
        fade = tl.exp2(top - level)
        o = o * fade[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        return o, total * fade + tl.sum(weights, 1), new_top

    @triton.jit
    def block_sparse_kernel(
        q, k, v, out, lse, offsets, blocks, column_offsets, columns, listed, valid,
        sq_b, sq_h, sq_t, sq_d, sk_b, sk_h, sk_s, sk_d, sv_b, sv_h, sv_s, sv_d, so_b, so_h, so_t, so_d,
        heads, group, plan_group, plan_heads, plan_batched, T, S, n_q, n_k, first_limit, column_groups, scale2,
        D: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
        COLUMN_TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        CUTS: tl.constexpr = (Q_BLOCK + ROWS - 1) // ROWS
        u = tl.program_id(0) // CUTS
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        inside = tl.program_id(0) % CUTS * ROWS + tl.arange(0, ROWS)
        rows = u * Q_BLOCK + inside
        real = (inside < Q_BLOCK) & (rows < T)
        limits = first_limit + rows
        last = first_limit + tl.minimum(u * Q_BLOCK + tl.minimum(tl.program_id(0) % CUTS * ROWS + ROWS, Q_BLOCK), T) - 1
        d = tl.arange(0, DIM)
        at = real[:, None] & (d < D)[None, :]
        q_tile = tl.load(q + b * sq_b + h * sq_h + rows[:, None] * sq_t + d[None, :] * sq_d, mask=at, other=0.0)
        k += b * sk_b + (h // group) * sk_h
        v += b * sv_b + (h // group) * sv_h
        o = tl.zeros((ROWS, DIM), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        line = b * plan_batched * plan_heads + h // plan_group

        begin = tl.load(offsets + line * (n_q + 1) + u)
        end = tl.load(offsets + line * (n_q + 1) + u + 1)
        for i in range(begin, end):
            left = tl.load(blocks + i) * K_BLOCK
            for part in range(0, K_BLOCK, KEYS):
                slot = part + tl.arange(0, KEYS)
                keys = left + slot
                there = (slot < K_BLOCK) & (keys < S) & (keys <= last)
                if PADDED:
                    there = there & (tl.load(valid + b * S + keys, mask=there, other=0) != 0)
                o, total, top = _read(q_tile, k, v, keys, there, limits, o, total, top, sk_s, sk_d, sv_s, sv_d, scale2,
                                      D, DIM)
        if COLUMNS:
            here = column_offsets + line * (column_groups + 1) + tl.where(column_groups == 1, 0, u)
            first_column = tl.load(here)
            end_column = tl.load(here + 1)
            for i in range(first_column, end_column, COLUMN_TILE):
                place = i + tl.arange(0, COLUMN_TILE)
                keys = tl.load(columns + place, mask=place < end_column, other=0)
                there = (place < end_column) & (keys <= last)
                once = tl.load(listed + (line * n_q + u) * n_k + keys // K_BLOCK, mask=there, other=1)
                there = there & (once == 0)
                if PADDED:
                    there = there & (tl.load(valid + b * S + keys, mask=there, other=0) != 0)
                o, total, top = _read(q_tile, k, v, keys, there, limits, o, total, top, sk_s, sk_d, sv_s, sv_d, scale2,
                                      D, DIM)

        empty = top == float("-inf")
        if PADDED:
            empty = empty | (tl.load(valid + b * S + (S - T) + rows, mask=real, other=0) == 0)
        o = tl.where(empty[:, None], 0.0, o / tl.where(empty, 1.0, total)[:, None])
        natural = tl.where(empty, float("-inf"), 0.6931471805599453 * (top + tl.log2(total)))
        out += b * so_b + h * so_h
        tl.store(out + rows[:, None] * so_t + d[None, :] * so_d, o.to(out.dtype.element_ty), mask=at)
        tl.store(lse + (b * heads + h) * T + rows, natural, mask=real)
