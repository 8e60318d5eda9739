"""Attention over caches whose heads keep different numbers of keys, and the decode step over such a cache.

A ragged prefix lays the keys of all (row, key head) segments end to end in one flat buffer; `offsets` says where each
segment starts. Every query attends all entries of its segment (the prefix is older than every query). Tokens read
since then stand in a dense tail buffer; `decode_attend` reads both in one pass.

Four versions agree. `by_segment` with `attend_reference` defines the result; with `attend` it runs the fused kernel
segment by segment (many query rows: a question of hundreds of tokens). `by_page` cuts all segments into pages of one
size and reads them as one batch (few query rows, any device). `ragged.c` reads few query rows on CPUs at the speed of
memory, with the keys split evenly over the threads (flash-decoding, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels import native
from longspan.kernels.attend import attend, merge

Attend = Callable[..., tuple[Tensor, Any]]
Prefix = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""k_flat (N,D), v_flat (N,D), offsets (prefix rows * Hkv + 1), row pointers (B) or None."""

NATIVE_ROWS = 64
"""Query rows of one segment (group x steps) up to which the C kernel is the fastest version."""
PAGE = 128
"""Keys a page."""
PAGED_STEPS, PAGED_SEGMENTS, PAGED_LENGTH = 16, 16, 256
"""Pages beat a loop over the segments for few queries and many short segments, and wherever launches are dear."""
PAGED_NUMBERS = 1 << 22
"""Numbers of K (and of V) that pages gather at once."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = struct.Struct("@38q2d")  # struct Call of ragged.c, field by field
_NO_PREFIX: tuple[int, ...] = (0,) * 11
_NO_TAIL: tuple[int, ...] = (0,) * 11


def attend_ragged(
    q: Float[Tensor, "B Hq T D"],
    k_flat: Float[Tensor, "N D"],
    v_flat: Float[Tensor, "N D"],
    offsets: Int[Tensor, " offsets"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    rows: Int[Tensor, " B"] | None = None,
    kv_heads: int | None = None,
    positions: Int[Tensor, " N"] | None = None,
    q_positions: Int[Tensor, "B T"] | None = None,
    window: int | None = None,
    return_lse: bool = True,
) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hq T"] | Any]:
    """Attention of every query to all entries of its segment of a ragged prefix.

    Segment r*Hkv + h, the entries offsets[r*Hkv + h] up to the next offset, holds key head h of prefix row r; batch
    row b reads prefix row rows[b] (default b; beams of one prompt share a row). `offsets` and `rows` are int64 and
    `kv_heads` is needed with `rows` only. With `window`, a query sees the entries less than `window` positions
    behind it. Scale, softcap and results as in `attend`: out in the dtype of `q`, lse float32 in natural log; an
    empty segment gives 0 and -inf. Raises ValueError on shapes that don't fit or offsets that leave the buffer.
    """
    if kv_heads is None:
        if rows is not None:
            raise ValueError("attend_ragged needs kv_heads when rows points into the prefix")
        kv_heads = (offsets.shape[0] - 1) // max(1, q.shape[0])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    ragged = Ragged(q, k_flat, v_flat, offsets, rows, kv_heads, scale, softcap, positions, q_positions, window)
    ragged.check()
    kernel = _kernel_for(ragged)
    if kernel is not None:
        return _call(kernel, ragged, None, return_lse)
    ragged.check_offsets()
    segments = q.shape[0] * kv_heads
    short = segments > PAGED_SEGMENTS and k_flat.shape[0] <= segments * PAGED_LENGTH
    if q.shape[2] <= PAGED_STEPS and (short or not q.is_cpu):
        out, lse = by_page(ragged)
    else:
        out, lse = by_segment(ragged)
    return out, lse if return_lse else None


def decode_attend(
    q: Float[Tensor, "B Hq T D"],
    prefix: Prefix | None,
    tail_k: Float[Tensor, "B Hkv capacity D"],
    tail_v: Float[Tensor, "B Hkv capacity D"],
    tail_len: int,
    tail_mask: Bool[Tensor, "B tail_len"] | None = None,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hq T"] | Any]:
    """One decode step: attention to a ragged `prefix` (or none) and to the first `tail_len` slots of a dense buffer.

    The T queries (1, or a few drafted ones) are the newest T tokens of the tail and see it causally: query t sees
    the slots up to tail_len - T + t where `tail_mask` is True, and the whole prefix. Without a prefix this is
    decoding from a dense cache buffer. Scale, softcap and results as in `attend`, lse None unless asked for.
    """
    batch, heads, steps, width = q.shape
    tail_batch, kv_heads, capacity, tail_width = tail_k.shape
    if (
        not steps <= tail_len <= capacity
        or tail_v.shape != tail_k.shape
        or tail_batch != batch
        or tail_width != width
        or heads % kv_heads
        or not q.dtype is tail_k.dtype is tail_v.dtype
        or (tail_mask is not None and (tail_mask.shape != (batch, tail_len) or tail_mask.dtype is not torch.bool))
    ):
        raise ValueError(
            f"decode_attend expects q (B,Hq,T,D) and tails (B,Hkv,capacity,D) of one dtype, T <= tail_len <= capacity "
            f"and a Boolean mask (B,tail_len), got q {q.dtype} {tuple(q.shape)}, tails {tail_k.dtype} "
            f"{tuple(tail_k.shape)} and {tail_v.dtype} {tuple(tail_v.shape)}, tail_len={tail_len}, "
            f"mask {None if tail_mask is None else tuple(tail_mask.shape)}"
        )
    scale = width**-0.5 if scale is None else scale
    k_flat, v_flat, offsets, rows = (None, None, None, None) if prefix is None else prefix
    ragged = Ragged(q, k_flat, v_flat, offsets, rows, kv_heads, scale, softcap)
    if prefix is not None:
        ragged.check()
    kernel = _kernel_for(ragged, tail_k, tail_v)
    if kernel is not None:
        return _call(kernel, ragged, (tail_k, tail_v, tail_len, tail_mask), return_lse)
    mask = None if tail_mask is None else tail_mask[:, None, None, :]
    tail = attend(q, tail_k[:, :, :tail_len], tail_v[:, :, :tail_len], scale=scale, mask=mask, softcap=softcap)
    if k_flat is None or v_flat is None or offsets is None:
        return tail[0], tail[1] if return_lse else None
    past = attend_ragged(q, k_flat, v_flat, offsets, scale=scale, softcap=softcap, rows=rows, kv_heads=kv_heads)
    out, lse = merge((past, tail))
    return out, lse if return_lse else None


class Ragged(NamedTuple):
    """The arguments of one ragged read, as `attend_ragged` takes them."""

    q: Tensor
    k_flat: Tensor | None
    v_flat: Tensor | None
    offsets: Tensor | None
    rows: Tensor | None
    kv_heads: int
    scale: float
    softcap: float | None = None
    positions: Tensor | None = None
    q_positions: Tensor | None = None
    window: int | None = None

    def check(self) -> None:
        """Raise ValueError unless the shapes fit together."""
        q, k, v, offsets, rows = self.q, self.k_flat, self.v_flat, self.offsets, self.rows
        assert k is not None and v is not None and offsets is not None
        q_shape, k_shape, ends = q.shape, k.shape, offsets.shape  # asked once: this runs for every layer and token
        if not (
            len(q_shape) == 4
            and len(k_shape) == 2
            and k_shape == v.shape
            and k_shape[1] == q_shape[3]
            and k.dtype is v.dtype is q.dtype
            and self.kv_heads > 0
            and q_shape[1] % self.kv_heads == 0
        ):
            raise ValueError(
                "expected q (B,Hq,T,D) and flat k, v (N,D) of one dtype with Hq a multiple of the key heads, got "
                f"q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}, v {v.dtype} {tuple(v.shape)}, "
                f"{self.kv_heads} key heads"
            )
        if (
            len(ends) != 1
            or offsets.dtype is not torch.int64
            or (rows is None and ends[0] - 1 != q_shape[0] * self.kv_heads)
            or (rows is not None and (rows.shape != q_shape[:1] or rows.dtype is not torch.int64))
            or (ends[0] - 1) % self.kv_heads
        ):
            raise ValueError(
                f"expected int64 offsets (rows * {self.kv_heads} + 1) with rows = {q.shape[0]} or int64 row pointers "
                f"({q.shape[0]}), got offsets {offsets.dtype} {tuple(offsets.shape)}, row pointers "
                f"{None if rows is None else (rows.dtype, tuple(rows.shape))}"
            )
        if self.window is not None and (
            self.positions is None
            or self.q_positions is None
            or self.positions.shape != k.shape[:1]
            or self.q_positions.shape != (q.shape[0], q.shape[2])
            or self.window < 1
        ):
            raise ValueError(
                f"window={self.window} needs positions ({k.shape[0]}) and q_positions {(q.shape[0], q.shape[2])}"
            )

    def check_offsets(self) -> None:
        """Raise ValueError where an offset or a row pointer leads outside the prefix (the C kernel looks itself)."""
        assert self.offsets is not None and self.k_flat is not None
        ends, rows = self.offsets, self.rows
        inside = bool((ends.diff() >= 0).all()) and int(ends[0]) >= 0 and int(ends[-1]) <= self.k_flat.shape[0]
        if rows is not None and rows.numel():
            inside &= int(rows.min()) >= 0 and int(rows.max()) < (ends.shape[0] - 1) // self.kv_heads
        if not inside:
            raise ValueError(_OUTSIDE)

    def segments(self) -> Int[Tensor, "B Hkv"]:
        """The segment each batch row and key head reads."""
        assert self.offsets is not None
        device = self.offsets.device
        rows = torch.arange(self.q.shape[0], device=device) if self.rows is None else self.rows
        return rows[:, None] * self.kv_heads + torch.arange(self.kv_heads, device=device)

    def visible(self, entries: Int[Tensor, "*n"], row: Int[Tensor, "*n"]) -> Bool[Tensor, "T ..."] | None:
        """Which entries of the prefix the T queries of batch rows `row` see through the window; None: all."""
        if self.window is None:
            return None
        assert self.positions is not None and self.q_positions is not None
        return self.q_positions.T[:, row] - self.positions[entries] < self.window


_OUTSIDE = "offsets must not fall and must stay inside the flat buffer, and row pointers inside the prefix"


# ------------------------------------------------------------------------------------------------ versions in PyTorch


def by_segment(ragged: Ragged, attend: Attend = attend) -> tuple[Tensor, Tensor]:
    """One attention per batch row and key head; with ``attend=attend_reference`` the definition."""
    q, k, v, offsets = ragged.q, ragged.k_flat, ragged.v_flat, ragged.offsets
    assert k is not None and v is not None and offsets is not None
    group = q.shape[1] // ragged.kv_heads
    ends, outs, lses = offsets.tolist(), [], []
    for b, row in enumerate(ragged.segments().tolist()):
        for h, segment in enumerate(row):
            entries = slice(ends[segment], ends[segment + 1])
            numbers = torch.arange(entries.start, entries.stop, device=q.device)
            see = ragged.visible(numbers, torch.full_like(numbers, b))
            queries = q[b : b + 1, h * group : (h + 1) * group]
            keys, values = k[entries][None, None], v[entries][None, None]
            out, lse = attend(
                queries, keys, values, scale=ragged.scale, causal=False, mask=see, softcap=ragged.softcap
            )
            outs.append(out)
            lses.append(lse)
    if not outs:
        return q.new_zeros(q.shape), q.new_zeros(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.cat(outs, 1).view(q.shape), torch.cat(lses, 1).view(q.shape[:-1])


def by_page(ragged: Ragged) -> tuple[Tensor, Tensor]:
    """All segments cut into pages of `PAGE` keys, pages read as one batch, pages of a segment merged exactly."""
    q, offsets = ragged.q, ragged.offsets
    assert offsets is not None and ragged.k_flat is not None
    B, heads, T, D = q.shape
    pairs = B * ragged.kv_heads
    queries = q.reshape(pairs, heads // ragged.kv_heads * T, D)
    segment = ragged.segments().flatten()
    start, length = offsets[segment], offsets[segment + 1] - offsets[segment]
    pages = (length + PAGE - 1) // PAGE
    pair = torch.arange(pairs, device=q.device).repeat_interleave(pages)
    number = torch.arange(pair.shape[0], device=q.device) - (pages.cumsum(0) - pages)[pair]
    begin, end = start[pair] + number * PAGE, (start + length)[pair]
    step = max(1, PAGED_NUMBERS // (PAGE * D))
    parts = [
        _read_pages(ragged, queries, pair[i : i + step], begin[i : i + step], end[i : i + step])
        for i in range(0, pair.shape[0], step)
    ]
    if not parts:
        empty = queries.new_zeros(queries.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        return torch.zeros_like(q), (empty - math.inf).view(q.shape[:-1])
    out, lse = _merge_pages(torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]), pair, pairs)
    return out.to(q.dtype).view(q.shape), lse.view(q.shape[:-1])


def _read_pages(ragged: Ragged, queries: Tensor, pair: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """(pages, rows, D), (pages, rows): attention of each page's query rows to its keys."""
    k, v = ragged.k_flat, ragged.v_flat
    assert k is not None and v is not None
    slots = begin[:, None] + torch.arange(PAGE, device=k.device)
    see = (slots < end[:, None])[:, None]
    slots = slots.clamp(max=k.shape[0] - 1)
    in_window = ragged.visible(slots, (pair // ragged.kv_heads)[:, None])
    if in_window is not None:  # (T, pages, PAGE) -> rows of a page: every head of the group, every step
        see = see & in_window.movedim(0, 1).repeat(1, queries.shape[1] // in_window.shape[0], 1)
    out, lse = attend(
        queries[pair][:, None], k[slots][:, None], v[slots][:, None],
        scale=ragged.scale, causal=False, mask=see[:, None], softcap=ragged.softcap,
    )  # fmt: skip
    return out[:, 0], lse[:, 0]


def _merge_pages(out: Tensor, lse: Tensor, pair: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """`merge` where each of `pairs` results has its own number of parts."""
    index = pair[:, None].expand_as(lse)
    top = lse.new_full((pairs, lse.shape[1]), -math.inf).scatter_reduce(0, index, lse.detach(), "amax")
    top = top.masked_fill(torch.isneginf(top), 0.0)
    weight = torch.exp(lse - top[pair])
    total = lse.new_zeros(pairs, lse.shape[1]).index_add(0, pair, weight)
    mixed = lse.new_zeros(pairs, *out.shape[1:]).index_add(0, pair, out.to(lse.dtype) * weight.unsqueeze(-1))
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return mixed / total.unsqueeze(-1), (total.log() + top).masked_fill(empty, -math.inf)


# ------------------------------------------------------------------------------------------------------ version in C


@functools.lru_cache(maxsize=1)
def _kernel() -> Callable[[bytes], int] | None:
    library = native.library("ragged.c")
    if library is None:
        return None
    function: Any = library.longspan_ragged_attend
    function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int
    return function


def _kernel_for(ragged: Ragged, *tail: Tensor) -> Callable[[bytes], int] | None:
    """The C kernel where it applies: CPU, few query rows, no gradient wanted, not inside torch.compile."""
    q = ragged.q
    rows = q.shape[1] // ragged.kv_heads * q.shape[2]
    if not q.is_cpu or q.dtype not in _DTYPES or not 0 < rows <= NATIVE_ROWS or ragged.scale <= 0:
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*ragged[:3], *tail)):
        return None
    return None if torch.compiler.is_compiling() else _kernel()


def _call(
    kernel: Callable[[bytes], int], ragged: Ragged, tail: tuple[Tensor, Tensor, int, Tensor | None] | None,
    return_lse: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Hand the arguments to `longspan_ragged_attend`, written to cost a few microseconds.

    Every name used below keeps its tensor alive during the call.
    """
    q, k, v, offsets, rows, kv_heads, scale, softcap, positions, q_positions, window = ragged
    batch, heads, steps, width = q.shape
    q, q_strides = _gapless(q)
    out = torch.empty_like(q)  # keeps the strides of q: models flatten the heads next without a copy
    lse = q.new_empty((batch, heads, steps), dtype=torch.float32) if return_lse else None
    prefix_fields, tail_fields = _NO_PREFIX, _NO_TAIL
    if offsets is not None and k is not None and v is not None:
        k, k_strides = _gapless(k)
        v, v_strides = _gapless(v)
        offsets, rows = offsets.contiguous(), None if rows is None else rows.contiguous()
        if window is not None and positions is not None and q_positions is not None:
            positions, q_positions = positions.int().contiguous(), q_positions.long().contiguous()
        prefix_fields = (
            k.data_ptr(), v.data_ptr(), offsets.data_ptr(), _pointer(rows), _pointer(positions),
            _pointer(q_positions), k_strides[0], v_strides[0], (offsets.shape[0] - 1) // kv_heads, k.shape[0],
            window or 0,
        )  # fmt: skip
    if tail is not None:
        tail_k, tail_v, tail_len, tail_mask = tail
        tail_k, tail_k_strides = _gapless(tail_k)
        tail_v, tail_v_strides = _gapless(tail_v)
        mask, mask_strides = (None, (0,)) if tail_mask is None else _gapless(tail_mask)
        tail_fields = (
            tail_k.data_ptr(), tail_v.data_ptr(), _pointer(mask), tail_len, *tail_k_strides[:3], *tail_v_strides[:3],
            mask_strides[0],
        )  # fmt: skip
    call = _CALL.pack(
        q.data_ptr(), out.data_ptr(), _pointer(lse), batch, kv_heads, heads // kv_heads, steps, width,
        _DTYPES[q.dtype], torch.get_num_threads(), *q_strides[:3], *out.stride()[:3], *prefix_fields, *tail_fields,
        scale, softcap or 0.0,
    )  # fmt: skip
    failed = kernel(call)
    if failed:
        raise ValueError(_OUTSIDE) if failed == 1 else MemoryError("no memory for the attention kernel's sums")
    return out, lse


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _gapless(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """`x` with its last axis gapless, as the kernel reads it, and the strides; other strides are free."""
    strides = x.stride()
    if strides[-1] == 1:
        return x, strides
    x = x.contiguous()
    return x, x.stride()
