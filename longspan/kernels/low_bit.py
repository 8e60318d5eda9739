"""The low-bit estimate: which key blocks hold a score above its query's limit, found with 4-bit codes of Q and K.

SALE (arXiv:2505.24179) looks at every query-key pair, cheaply:

1. *Smoothing.* ``Qs = Q - qm`` and ``Ks = K - km`` with means over the sequence. Since
   ``Q K^T = Qs Ks^T + qm Ks^T + Q km^T`` and the last term is the same for all keys of a query, a softmax only needs
   ``E[i,j] = Qs[i].Ks[j] + qm.Ks[j]``.
2. *Codes.* Symmetric and 4 bits wide: scale ``s = amax / 7``, code ``round(x / s)`` in [-7, 7]. ``per_token`` has a scale for
   every row; ``per_thread`` shares scales as a tensor core's threads hold rows: of queries, rows r and r + 8 of every 16; of
   keys, rows with equal ``(j mod 8) // 2`` of a block.
3. *Estimate.* ``E~[i,j] = sq[i] sk[j] (Q4[i].K4[j]) + qm.Ks[j]``; ``per_thread`` rounds the second term to a whole multiple
   of ``sq sk``, as an integer sum needs it.
4. *Question.* Key block v matters to query block u if ``E~[i,j] > limit[i]`` for any of their pairs.

Codes are held as int8, one to a byte, which CPUs and Hopper GPUs multiply; `pack` puts two into a byte. `reference_blocks`
defines the answer; the C version (`low_bit.c`) and the Triton version (`low_bit_triton`) give the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int8, Num, UInt8
from torch import Tensor

from longspan.kernels.plan import repeat_heads
from longspan.registry import Refused

GROUPS = ("per_thread", "per_token")
BACKENDS = ("reference", "cpu", "triton")
MOST_CODE = 7
Q_TILE = 16
"""Query rows that `per_thread` cuts the sequence into."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, eq=False)
class LowBit:
    """Queries or keys as codes times scales. Codes of floating point stand for themselves: a quantiser that does nothing."""

    codes: Num[Tensor, "B H L D"]
    scales: Float[Tensor, "B H L"]
    groups: str = "per_thread"

    @property
    def values(self) -> Float[Tensor, "B H L D"]:
        """What the codes stand for."""
        return self.codes.float() * self.scales[..., None]


# --------------------------------------------------------------------------------------------------------------- codes


def quantise(x: Float[Tensor, "B H L D"], mean: Float[Tensor, "B H D"], weigh: Float[Tensor, "B H G D"], *, groups: str,
             k_block: int | None = None, valid: Bool[Tensor, "B L"] | None = None, backend: str | None = None
             ) -> tuple[LowBit, Float[Tensor, "B H G L"]]:
    """4-bit codes of ``x - mean``, and its products with the vectors `weigh`, exact up to float32.

    Args:
        k_block: rows of a key block, where `x` are keys; queries otherwise.
        valid: false for padding, whose rows count as 0.
        backend: "reference" or "cpu"; by default the fastest that applies.

    Raises ValueError for shapes that don't fit, groups that don't exist, and key blocks that are no multiple of 8.
    """
    if groups not in GROUPS or (groups == "per_thread" and k_block is not None and k_block % 8):
        raise ValueError(f"expected groups of {', '.join(GROUPS)} and key blocks of a multiple of 8, got {groups!r}, {k_block}")
    B, H, _, D = x.shape
    if mean.shape != (B, H, D) or weigh.shape[:2] != (B, H) or weigh.shape[3:] != (D,):
        raise ValueError(f"expected mean and vectors for x {tuple(x.shape)}, got {tuple(mean.shape)}, {tuple(weigh.shape)}")
    library = _library() if _on_cpu(x, backend) and D % 16 == 0 and x.dtype in _DTYPES else None
    if library is not None:
        return _compiled_codes(library, x, mean, weigh, groups, k_block, valid)
    rows = x.float() - mean[:, :, None]
    if valid is not None:
        rows = rows.masked_fill(~valid[:, None, :, None], 0.0)
    most = _shared(rows.abs().amax(-1), groups, k_block)
    tiny = torch.finfo(torch.float32).tiny
    scales = torch.where(most < MOST_CODE * tiny, 1.0, most / MOST_CODE)
    return LowBit((rows / scales[..., None]).round().to(torch.int8), scales, groups), weigh.float() @ rows.mT


def _shared(most: Float[Tensor, "B H L"], groups: str, k_block: int | None) -> Float[Tensor, "B H L"]:
    """The largest of the rows that share a scale."""
    if groups == "per_token":
        return most
    tile = Q_TILE if k_block is None else k_block
    tiles = F.pad(most, (0, -most.shape[-1] % tile)).unflatten(-1, (-1, tile))
    # Queries: (16,) = (2, 8), and r goes with r + 8. Keys: (k_block,) = (k_block / 8, 4, 2).
    tiles = tiles.unflatten(-1, (2, 8, 1) if k_block is None else (-1, 4, 2))
    return tiles.amax((-3, -1), keepdim=True).expand_as(tiles).flatten(-4)[..., : most.shape[-1]]


def pack(codes: Int8[Tensor, "... D"]) -> UInt8[Tensor, "... D/2"]:
    """Two codes to a byte: even channels in the low half, odd ones in the high half.

    Raises:
        Refused: D is no multiple of 16, which loads of whole words need, or a code is outside [-7, 7].
    """
    D = codes.shape[-1]
    if D % 16 or not D:
        raise Refused(f"packed codes of {D} channels: expected a multiple of 16; the nearest is {max(16, round(D / 16) * 16)}.")
    if codes.numel() and int(codes.abs().max()) > MOST_CODE:
        raise Refused(f"a code of {int(codes.abs().max())}: expected codes from -{MOST_CODE} to {MOST_CODE}.")
    low, high = codes.unflatten(-1, (-1, 2)).to(torch.int16).unbind(-1)
    return ((low & 15) | (high & 15) << 4).to(torch.uint8)


def unpack(packed: UInt8[Tensor, "... n"]) -> Int8[Tensor, "... 2n"]:
    """The codes that `pack` took."""
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8)
    return torch.where(halves > MOST_CODE, halves - 16, halves)


# ------------------------------------------------------------------------------------------------------------ question


def important_blocks(
    q: LowBit, k: LowBit, bias: Float[Tensor, "B Hq S"], limit: Float[Tensor, "B Hq T"], begin: Int[Tensor, "B NQ"],
    end: Int[Tensor, "B NQ"], *, q_block: int, k_block: int, backend: str | None = None,
) -> Bool[Tensor, "B Hq NQ NK"]:
    """Whether any pair of a query block and a key block has an estimated score above the query's limit.

    Query head h reads key head h // (Hq/Hkv). `bias` is the exact part of the scores, -inf for keys to leave out; rows
    with a limit of inf ask for nothing, and those with -inf for everything. Query block u is compared with the key blocks
    ``begin[u]`` to ``end[u] - 1``, all others are false; nothing is masked below the block, so its rows must be allowed to
    read them. `backend` is "reference", "cpu" or "triton"; by default the fastest that applies.

    Raises ValueError for shapes that don't fit, and where a block reaches beyond the keys.
    """
    _check(q, k, bias, limit, begin, end, q_block, k_block, backend)
    given = (q, k, bias.float(), limit.float(), begin.contiguous(), end.contiguous(), q_block, k_block)
    if backend == "triton" or (backend is None and q.codes.is_cuda and _triton_applies(q)):
        from longspan.kernels.low_bit_triton import important_blocks_triton

        return important_blocks_triton(*given)
    library = _library() if _on_cpu(q.codes, backend) and q.codes.dtype == torch.int8 and k_block % 16 == 0 else None
    return reference_blocks(*given) if library is None else compiled_blocks(library, *given)


def reference_blocks(q: LowBit, k: LowBit, bias: Tensor, limit: Tensor, begin: Tensor, end: Tensor, q_block: int, k_block: int
                     ) -> Bool[Tensor, "B Hq NQ NK"]:
    """The definition, one query block at a time. A score and its limit are compared in units of the query's scale."""
    out = torch.zeros(_out_shape(limit, bias, q_block, k_block), dtype=torch.bool, device=limit.device)
    for u, rows, blocks, scores in _strips(q, k, bias, begin, end, q_block, k_block):
        above = scores > (limit * q.scales.reciprocal())[:, :, rows, None]
        out[:, :, u, blocks] = above.unflatten(-1, (-1, k_block)).any(-1).any(2)
    return out & asked_blocks(begin, end, out.shape[-1])[:, None]


def largest_excess(q: LowBit, k: LowBit, bias: Tensor, limit: Tensor, begin: Tensor, end: Tensor, q_block: int, k_block: int
                   ) -> Float[Tensor, "B Hq NQ NK"]:
    """By how much the best pair of two blocks is above its limit, -inf outside `begin` and `end`: one pass for all limits that
    differ by a constant."""
    out = limit.new_full(_out_shape(limit, bias, q_block, k_block), -torch.inf)
    for u, rows, blocks, scores in _strips(q, k, bias, begin, end, q_block, k_block):
        above = scores * q.scales[:, :, rows, None] - limit[:, :, rows, None]
        out[:, :, u, blocks] = above.unflatten(-1, (-1, k_block)).amax(-1).amax(2)
    return out.masked_fill(~asked_blocks(begin, end, out.shape[-1])[:, None], -torch.inf)


def asked_blocks(begin: Int[Tensor, "B NQ"], end: Int[Tensor, "B NQ"], n_k: int) -> Bool[Tensor, "B NQ NK"]:
    """The key blocks that lie between `begin` and `end`."""
    v = torch.arange(n_k, device=begin.device)
    return (v >= begin[..., None]) & (v < end[..., None])


def _strips(q: LowBit, k: LowBit, bias: Tensor, begin: Tensor, end: Tensor, q_block: int, k_block: int
            ) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """(query block, its rows, key blocks, estimates over the query's scale) wherever there is something to ask."""
    heads, T = q.codes.shape[1:3]
    for u, (low, high) in enumerate(zip(begin.amin(0).tolist(), end.amax(0).tolist())):
        if low < high:
            rows, keys = slice(u * q_block, min((u + 1) * q_block, T)), slice(low * k_block, high * k_block)
            scale, inverse = repeat_heads(k.scales, heads)[:, :, None, keys], q.scales[:, :, rows, None].reciprocal()
            product = q.codes[:, :, rows].float() @ repeat_heads(k.codes[:, :, keys].float(), heads).mT
            own = bias[:, :, None, keys]
            scores = (product + (own / scale * inverse).round()) * scale if _rounds(q) else product * scale + own * inverse
            yield u, rows, slice(low, high), scores


def _rounds(q: LowBit) -> bool:
    return q.groups == "per_thread" and not q.codes.is_floating_point()


def _out_shape(limit: Tensor, bias: Tensor, q_block: int, k_block: int) -> tuple[int, ...]:
    return *limit.shape[:2], -(-limit.shape[2] // q_block), -(-bias.shape[2] // k_block)


def _check(q: LowBit, k: LowBit, bias: Tensor, limit: Tensor, begin: Tensor, end: Tensor, q_block: int, k_block: int,
           backend: str | None) -> None:
    shapes = f"q {tuple(q.codes.shape)}, k {tuple(k.codes.shape)}, bias {tuple(bias.shape)}, limit {tuple(limit.shape)}"
    (B, heads, T, D), (_, key_heads, S, _) = q.codes.shape, k.codes.shape
    if k.codes.shape[::3] != (B, D) or heads % key_heads or bias.shape != (B, heads, S) or limit.shape != (B, heads, T):
        raise ValueError(f"expected q (B,Hq,T,D), k (B,Hkv,S,D), bias (B,Hq,S) and limit (B,Hq,T), got {shapes}")
    if q.groups != k.groups or q.groups not in GROUPS:
        raise ValueError(f"expected q and k with scales of one kind, {' or '.join(GROUPS)}, got {q.groups!r} and {k.groups!r}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if begin.shape != (B, -(-T // q_block)) or end.shape != begin.shape or begin.dtype != torch.int64 != end.dtype:
        raise ValueError(f"begin, end: expected int64 {(B, -(-T // q_block))}, got {tuple(begin.shape)}, {tuple(end.shape)}")
    asked = begin < end
    if bool((asked & ((begin < 0) | (end * k_block > S))).any()):
        raise ValueError(f"key blocks of {k_block} from {int(begin.min())} to {int(end.max())} reach beyond the {S} keys")


# -------------------------------------------------------------------------------------------------------- the C version


class _Job(ctypes.Structure):
    """Mirrors `Job` in low_bit.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "k_scale", "bias", "q_inverse", "limit", "begin", "end", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "k_len", "dim", "q_block", "k_block",
                                              "rounded", "threads")),
    ]  # fmt: skip


class _Codes(ctypes.Structure):
    """Mirrors `Codes` in low_bit.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "mean", "weigh", "valid", "codes", "scales", "dots")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "dim", "x_batch", "x_head", "x_row", "dtype", "tile",
                                              "shared", "weights", "threads")),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL | None:
    from longspan.kernels import native

    library = native.library("low_bit.c")
    return None if library is None else declared(library)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    for name, job in (("low_bit_blocks", _Job), ("low_bit_codes", _Codes)):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.POINTER(job)]
    return library


def compiled_blocks(library: ctypes.CDLL, q: LowBit, k: LowBit, bias: Tensor, limit: Tensor, begin: Tensor, end: Tensor,
                    q_block: int, k_block: int) -> Bool[Tensor, "B Hq NQ NK"]:
    """`important_blocks` as one call into the C kernel."""
    (B, heads, T, D), (_, key_heads, S, _) = q.codes.shape, k.codes.shape
    fill = -D % 4
    codes = [F.pad(x, (0, fill)) if fill else x.contiguous() for x in (q.codes, k.codes)]
    inverse = q.scales.reciprocal()
    bias = bias / repeat_heads(k.scales, heads) if _rounds(q) else bias
    out = torch.zeros(_out_shape(limit, bias, q_block, k_block), dtype=torch.bool)
    held = [*codes, *(x.contiguous() for x in (k.scales, bias, inverse, limit * inverse, begin, end)), out]
    job = _Job(*(x.data_ptr() for x in held), B, heads, key_heads, T, S, D + fill, q_block, k_block, int(_rounds(q)),
               torch.get_num_threads())
    if library.low_bit_blocks(ctypes.byref(job)):
        raise MemoryError("low-bit estimate: no memory for its work space")
    return out


def _compiled_codes(library: ctypes.CDLL, x: Tensor, mean: Tensor, weigh: Tensor, groups: str, k_block: int | None,
                    valid: Tensor | None) -> tuple[LowBit, Tensor]:
    (B, H, L, D), G = x.shape, weigh.shape[2]
    x = x if x.stride(-1) == 1 else x.contiguous()
    mean, weigh = mean.float().contiguous(), weigh.float().contiguous()
    valid = None if valid is None else valid.contiguous()
    codes, scales, dots = x.new_empty(x.shape, dtype=torch.int8), mean.new_empty(B, H, L), mean.new_empty(B, H, G, L)
    shared = 0 if groups == "per_token" else 1 if k_block is None else 2
    held = (x.detach(), mean, weigh, valid, codes, scales, dots)
    job = _Codes(*(None if t is None else t.data_ptr() for t in held), B, H, L, D, *x.stride()[:3], _DTYPES[x.dtype],
                 Q_TILE if k_block is None else k_block, shared, G, torch.get_num_threads())
    if library.low_bit_codes(ctypes.byref(job)):
        raise MemoryError("4-bit codes: no memory for their work space")
    return LowBit(codes, scales, groups), dots


def _on_cpu(x: Tensor, backend: str | None) -> bool:
    return backend == "cpu" or (backend is None and x.device.type == "cpu")


def _triton_applies(q: LowBit) -> bool:
    from longspan.kernels.low_bit_triton import available

    return available() and q.codes.dtype == torch.int8
