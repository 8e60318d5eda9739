"""Block-sparse attention on the CPU: a small C kernel where a compiler is present, else PyTorch's fused attention.

The C kernel (`block_sparse.c`) reads the plan as it stands. The other way gathers: query blocks with the same number
of wholly visible key blocks form one batch, whose gathered keys need no mask and go through fused attention; what is
cut by the diagonal, by padding, or listed as single columns is gathered as a second, masked part; the log-sum-exps
merge the two exactly.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.kernels.attend import attend, merge
from longspan.kernels.plan import ReadPlan, repeat_heads

GATHER_ELEMENTS = 1 << 22
"""Elements gathered at once: enough query blocks for all cores, few enough to stay near the caches."""


def block_sparse_cpu(q: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, scale: float, valid: Tensor | None
                     ) -> tuple[Tensor, Tensor]:
    """(out (B,Hq,T,D), lse (B,Hq,T)); inputs are checked by the caller."""
    if q.dtype not in (torch.float32, torch.bfloat16):
        out, lse = block_sparse_cpu(q.float(), k.float(), v.float(), plan, scale, valid)
        return out.to(q.dtype), lse
    library = _library()
    with torch.no_grad():
        if library is not None:
            return compiled(library, q, k, v, plan, scale, valid)
        return gathered(q, k, v, plan, scale, valid)


# ---------------------------------------------------------------------------------------------------------- compiled


class _Job(ctypes.Structure):
    """Mirrors `Job` in block_sparse.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "offsets", "blocks", "column_offsets",
                                               "columns", "valid")),
        *((name, ctypes.c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "k_len", "dim", "plan_batch",
                                              "plan_heads", "q_block", "k_block", "column_groups", "first_limit")),
        *((name, ctypes.c_int64 * 3) for name in ("q_stride", "k_stride", "v_stride", "out_stride")),
        ("bf16", ctypes.c_int64), ("threads", ctypes.c_int64), ("scale", ctypes.c_double),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL | None:
    from longspan.kernels import native

    library = native.library("block_sparse.c")
    if library is not None:
        library.block_sparse_attention.restype = ctypes.c_int64
        library.block_sparse_attention.argtypes = [ctypes.POINTER(_Job)]
    return library


def plan_lse(q: Tensor, k: Tensor, plan: ReadPlan, *, scale: float, valid: Tensor | None = None) -> Tensor:
    """The log-sum-exp (B,Hq,T) of `block_sparse_attention` alone: the C kernel then reads no values, about half the work.

    Raises what `block_sparse_attention` raises.
    """
    from longspan.kernels import block_sparse

    library = _library() if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) else None
    if library is None or q.requires_grad or k.requires_grad:
        return block_sparse.block_sparse_attention(q, k, k, plan, scale=scale, valid=valid, return_lse=True)[1]
    block_sparse._check(q, k, k, plan, valid, None)
    _, lse = compiled(library, q, k, None, plan, scale, valid)
    block_sparse.refuse_empty_rows(lse, valid)
    return lse


FEW_ROWS = 16
"""Up to so many rows, PyTorch's fused attention in bfloat16 spends its time on converting keys."""


def attend_few_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Causal attention of a few newest rows (drafts being checked) over all keys: (out, lse), or None where the C kernel
    doesn't apply and PyTorch's own is as good."""
    T, S = q.shape[2], k.shape[2]
    library = _library() if q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < T <= FEW_ROWS else None
    if library is None or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return None
    return compiled(library, q, k, v, _one_block(T, S), scale, None)


@functools.lru_cache(maxsize=16)
def _one_block(T: int, S: int) -> ReadPlan:
    """The dense plan in one block; all layers of a step ask for the same."""
    return ReadPlan.dense(q_len=T, k_len=S, q_block=T, k_block=S)


def compiled(library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor | None, plan: ReadPlan, scale: float,
             valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """One call into the C kernel. Without values the output is left as it happens to be."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    v = v if v is None or v.stride(-1) == 1 else v.contiguous()
    valid = None if valid is None else valid.contiguous()
    B, heads, T, D = q.shape
    out = q.new_empty(B, T, heads, D).transpose(1, 2)  # the layout that the output projection reads
    lse = q.new_empty(B, heads, T, dtype=torch.float32)
    held = [None if x is None else x.contiguous()
            for x in (plan.offsets, plan.blocks, plan.column_offsets, plan.columns)]
    groups = 0 if plan.column_offsets is None else plan.column_offsets.shape[-1] - 1
    job = _Job(*(None if x is None else x.data_ptr() for x in (q, k, v, out, lse, *held, valid)),
               B, heads, k.shape[1], T, k.shape[2], D, plan.batch, plan.heads, plan.q_block, plan.k_block, groups,
               plan.first_limit, *((ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (q, k, k if v is None else v, out)),
               int(q.dtype == torch.bfloat16), torch.get_num_threads(), scale)
    if library.block_sparse_attention(ctypes.byref(job)):
        raise MemoryError("block-sparse attention: no memory for its work space")
    return out, lse


# ---------------------------------------------------------------------------------------------------------- gathered


def gathered(q: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, scale: float, valid: Tensor | None
             ) -> tuple[Tensor, Tensor]:
    """The same from PyTorch's fused attention over gathered keys."""
    (B, heads, T, D), n_q, n_k = q.shape, plan.n_q_blocks, plan.n_k_blocks
    listed = repeat_heads(plan.block_map, heads).expand(B, heads, n_q, n_k)
    whole = listed & _whole_blocks(plan, valid, q.device)
    queries = F.pad(q, (0, 0, 0, n_q * plan.q_block - T)).reshape(-1, plan.q_block, D)
    out = torch.zeros_like(queries)
    lse = queries.new_full(queries.shape[:2], -math.inf, dtype=torch.float32)
    _attend_whole(queries, _key_rows(k, plan), _key_rows(v, plan), whole, k.shape[1], scale, out, lse)
    rest = _attend_rest(queries, k, v, plan, listed & ~whole, listed, valid, scale)
    out, lse = merge([(out[None], lse[None]), (rest[0][None], rest[1][None])])
    out, lse = out.view(B, heads, -1, D)[:, :, :T], lse.view(B, heads, -1)[:, :, :T]
    if valid is not None:
        padding = ~valid[:, None, plan.k_len - T:]
        out, lse = out.masked_fill(padding[..., None], 0.0), lse.masked_fill(padding, -math.inf)
    return out, lse


def _whole_blocks(plan: ReadPlan, valid: Tensor | None, device: torch.device) -> Tensor:
    """(B|1,1,NQ,NK): blocks of which every row of the query block may read every key."""
    right = (torch.arange(plan.n_k_blocks, device=device) + 1) * plan.k_block
    first = plan.first_limit + torch.arange(0, plan.q_len, plan.q_block, device=device)
    whole = ((right <= plan.k_len) & (right <= first[:, None] + 1))[None, None]
    if valid is None:
        return whole
    padded = F.pad(valid, (0, plan.n_k_blocks * plan.k_block - plan.k_len))
    return whole & padded.view(valid.shape[0], 1, 1, plan.n_k_blocks, plan.k_block).all(-1)


def _key_rows(x: Tensor, plan: ReadPlan) -> Tensor:
    """(B,Hkv,S,D) -> (B·Hkv·NK, k_block, D)."""
    return F.pad(x, (0, 0, 0, plan.n_k_blocks * plan.k_block - plan.k_len)).reshape(-1, plan.k_block, x.shape[-1])


def _attend_whole(queries: Tensor, keys: Tensor, values: Tensor, whole: Tensor, key_heads: int, scale: float,
                  out: Tensor, lse: Tensor) -> None:
    """Fill in the rows of query blocks with whole key blocks; those with the same number of them go together."""
    heads, n_q, n_k = whole.shape[1:]
    counts = whole.sum(-1).flatten()
    item, block = whole.view(-1, n_k).nonzero().unbind(1)
    head = item // n_q
    source = (head // heads * key_heads + head % heads // (heads // key_heads)) * n_k + block
    starts = counts.cumsum(0) - counts
    size, dim = keys.shape[1:]
    for count in counts.unique().tolist():
        if count == 0:
            continue
        items = (counts == count).nonzero()[:, 0]
        for some in items.split(max(1, GATHER_ELEMENTS // (count * size * dim))):
            rows = source[starts[some, None] + torch.arange(count, device=items.device)]
            k, v = (x[rows.flatten()].view(len(some), 1, count * size, dim) for x in (keys, values))
            o, part = attend(queries[some][:, None], k, v, scale=scale, causal=False)
            assert part is not None
            out[some], lse[some] = o[:, 0], part[:, 0]


def _attend_rest(queries: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, cut: Tensor, listed: Tensor,
                 valid: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The part with a mask: blocks that are `cut` by the diagonal or by padding, and single columns."""
    (B, key_heads, S, D), (heads, n_q), device = k.shape, cut.shape[1:3], k.device
    limits = (plan.first_limit + torch.arange(n_q * plan.q_block, device=device)).view(n_q, plan.q_block)
    keys, real = _padded(cut)  # block numbers, then the slots of their keys
    keys = (keys[..., None] * plan.k_block + torch.arange(plan.k_block, device=device)).flatten(-2)
    real = real[..., None].expand(*real.shape, plan.k_block).flatten(-2) & (keys < S)
    columns = plan.column_map
    if columns is not None:
        single, listed_once = _padded(repeat_heads(columns, heads).expand(B, heads, -1, S))
        single, listed_once = (x.expand(B, heads, n_q, -1) for x in (single, listed_once))
        keys = torch.cat((keys, single), -1)
        real = torch.cat((real, listed_once & ~listed.gather(-1, single // plan.k_block)), -1)
    keys = keys.clamp(max=S - 1)
    if valid is not None:
        real = real & valid[:, None, None].expand(B, heads, n_q, S).gather(-1, keys)
    keys, real = keys.flatten(0, 2), real.flatten(0, 2)
    item = torch.arange(len(keys), device=device)
    first = (item // n_q // heads * key_heads + item // n_q % heads // (heads // key_heads)) * S
    flat_k, flat_v = k.reshape(-1, D), v.reshape(-1, D)
    outs, lses = [], []
    for some in item.split(max(1, GATHER_ELEMENTS // (keys.shape[1] * max(D, plan.q_block)))):
        see = real[some, None] & (keys[some, None] <= limits[some % n_q, :, None])
        rows = keys[some] + first[some, None]
        o, part = attend(queries[some][:, None], flat_k[rows][:, None], flat_v[rows][:, None], scale=scale,
                         causal=False, mask=see[:, None])
        assert part is not None
        outs.append(o[:, 0])
        lses.append(part[:, 0])
    return torch.cat(outs), torch.cat(lses)


def _padded(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The true positions along the last axis, ascending and padded to one width (at least 1), and which are real."""
    counts = mask.sum(-1)
    width = max(1, int(counts.max()))
    chosen = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    return chosen, torch.arange(width, device=mask.device) < counts[..., None]
