"""How a block attends to what stands before it while it is denoised: the frozen prefix, and what is remembered of it.

A block-diffusion model reads the same block many times, each time after the same frozen prefix. Attention over prefix and
block is the exact merge of the two parts (`longspan.kernels.merge`), so a method of kind *denoising* says only where the
prefix's part comes from: computed anew, kept from an earlier step (`PrefixPart`), or computed from some pages of the
prefix. The part inside the block is always computed.

    reader = method.begin(prefix, length, model.config.block)
    reader.begin(step)
    found = model(ids, prefix.places(length), block_attention(reader))
    reader.changed(committed)

Everything works on batches: rows may have prefixes of different lengths (padded on the left), decide by themselves when
to read, and leave when their block is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels import attend, merge
from longspan.models.block_diffusion import Attention, BlockDiffusion, block_mask
from longspan.registry import Method

Part = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]
"""Attention over some of the keys: output and log-sum-exp, float32."""


@dataclass(eq=False)
class Prefix:
    """Frozen keys and values of a prompt and of finished blocks, layer by layer. Growing makes a new one."""

    k: list[Float[Tensor, "B Hkv N D"]]
    v: list[Float[Tensor, "B Hkv N D"]]
    pad: Int[Tensor, " B"] | None = None
    """Keys at the front of each row that are padding; None: none anywhere."""
    notes: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What methods know about these very keys, such as the bounds of their pages."""

    @classmethod
    def empty(cls, model: BlockDiffusion, rows: int = 1) -> Prefix:
        """Nothing read yet."""
        c = model.config
        nothing = torch.empty(rows, c.n_kv_heads, 0, c.head_dim, device=model.device, dtype=model.dtype)
        return cls([nothing] * c.n_layers, [nothing] * c.n_layers)

    @property
    def length(self) -> int:
        """N, padding included."""
        return self.k[0].shape[2]

    @property
    def rows(self) -> int:
        return self.k[0].shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    @property
    def padding(self) -> Int[Tensor, " B"]:
        """`pad`, zeros where there is none."""
        return torch.zeros(self.rows, dtype=torch.long, device=self.k[0].device) if self.pad is None else self.pad

    @property
    def valid(self) -> Bool[Tensor, "B N"] | None:
        """True where a key is real; None when all are."""
        return None if self.pad is None else torch.arange(self.length, device=self.pad.device) >= self.pad[:, None]

    def places(self, time: int) -> Int[Tensor, "B T"]:
        """Where the `time` tokens after the prefix stand."""
        return (self.length - self.padding)[:, None] + torch.arange(time, device=self.k[0].device)

    def extended(self, k: Sequence[Float[Tensor, "B Hkv T D"]], v: Sequence[Float[Tensor, "B Hkv T D"]]) -> Prefix:
        """With the keys and values of more tokens behind it."""
        both = ((self.k, k), (self.v, v))
        grown_k, grown_v = ([torch.cat(pair, 2) for pair in zip(old, new, strict=True)] for old, new in both)
        return Prefix(grown_k, grown_v, self.pad, dict(self.notes))

    def keep(self, rows: Int[Tensor, " R"]) -> Prefix:
        """These rows only."""
        return Prefix([k[rows] for k in self.k], [v[rows] for v in self.v], None if self.pad is None else self.pad[rows])

    def check(self, q: Tensor) -> None:
        """Raise ValueError for queries that can't read these keys."""
        k = self.k[0]
        if q.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
            raise ValueError(f"expected queries (B,H,T,D) with H a multiple of Hkv for a prefix of keys {tuple(k.shape)}, got "
                             f"{tuple(q.shape)}")


@dataclass(eq=False)
class PrefixPart:
    """What one layer remembers of a block's attention to the prefix."""

    o: Float[Tensor, "B H T D"]
    """Output, float32 (float64 in a float64 model)."""
    lse: Float[Tensor, "B H T"]
    """Log-sum-exp of the scores, float32 at least: in bfloat16 a merge would be off by whole nats at long prefixes."""
    q_ref: Float[Tensor, "B H T D"] | None = None
    """The queries that `o` was computed for, where a method compares with them."""

    def __post_init__(self) -> None:
        if self.o.shape[:-1] != self.lse.shape:
            raise ValueError(f"a prefix part has o (B,H,T,D) with lse (B,H,T), got {tuple(self.o.shape)} and "
                             f"{tuple(self.lse.shape)}")
        if self.lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a prefix part's log-sum-exp must be float32, got {self.lse.dtype}")

    def check(self, q: Float[Tensor, "B H T D"]) -> None:
        """Raise ValueError unless it is of a block shaped like `q`."""
        if self.lse.shape != q.shape[:-1]:
            raise ValueError(f"the cached prefix part is of a block (B,H,T) = {tuple(self.lse.shape)}, the queries are "
                             f"{tuple(q.shape[:-1])}")

    def put(self, rows: Int[Tensor, " R"], part: Part, q: Tensor | None = None) -> None:
        """New values for these rows of the batch."""
        self.o[rows], self.lse[rows] = part
        if q is not None and self.q_ref is not None:
            self.q_ref[rows] = q

    def keep(self, rows: Int[Tensor, " R"]) -> PrefixPart:
        return PrefixPart(self.o[rows], self.lse[rows], None if self.q_ref is None else self.q_ref[rows])

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.o, self.lse, self.q_ref) if t is not None)


@dataclass
class Reads:
    """What was read of the prefix: keys, counted once for every sequence, layer and key-value head."""

    keys: int = 0
    dense: int = 0
    """What reading all of it in every pass would take."""
    bounds: int = 0
    """Page bounds read to choose pages (two vectors a page)."""
    steps: int = 0
    """Passes over blocks, saving passes included."""
    refreshes: int = 0
    """Passes in which a sequence's prefix part was computed from the whole prefix."""
    later_keys: int = 0
    later_dense: int = 0
    """The same without the first pass over each block, and without saving passes."""
    cache_bytes: int = 0
    """Most bytes held in prefix parts at once."""
    notes: list[str] = field(default_factory=list)

    def add(self, other: Reads) -> None:
        """Count `other` in."""
        for name in ("keys", "dense", "bounds", "steps", "refreshes", "later_keys", "later_dense"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cache_bytes = max(self.cache_bytes, other.cache_bytes)
        self.notes += [n for n in other.notes if n not in self.notes]

    @property
    def share(self) -> float:
        """Keys read, as a share of what reading everything in every pass takes."""
        return self.keys / self.dense if self.dense else 1.0

    @property
    def density(self) -> float:
        """The share in the steps after a block's first."""
        return self.later_keys / self.later_dense if self.later_dense else 1.0


class BlockReader:
    """How one block (of every sequence in a batch) reads its prefix, from its first step to its saving pass.

    This base computes the prefix's part anew in every pass. Subclasses override `part` and, if they remember
    something, `begin`, `changed` and `keep`.
    """

    def __init__(self, prefix: Prefix, length: int) -> None:
        if length < 1:
            raise ValueError(f"a block has at least one token, got {length}")
        self.prefix, self.length = prefix, length
        self.parts: list[PrefixPart | None] = [None] * len(prefix.k)
        self.reads = Reads()
        self.step, self.save = 0, False

    def begin(self, step: int, save: bool = False) -> None:
        """A pass begins: denoising step `step` (from 0), or the saving pass over the finished block."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        self.step, self.save = step, save
        self.reads.steps += self.prefix.rows

    def read(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        """The prefix's part of a layer's attention. An empty prefix weighs nothing, and nothing of it is remembered."""
        self.prefix.check(q)
        if not self.prefix.length:
            return q.new_zeros(q.shape, dtype=_wide(q)), q.new_full(q.shape[:-1], -math.inf, dtype=_wide(q))
        found = self.part(layer, q)
        if held := sum(part.nbytes for part in self.parts if part is not None):
            self.reads.cache_bytes = max(self.reads.cache_bytes, held)
        return found

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        """`read` for a prefix that isn't empty; override this."""
        return self.fresh(layer, q)

    def changed(self, where: Bool[Tensor, "B T"]) -> None:
        """Tokens of the block that were committed (or masked again) after this step."""

    def use(self, prefix: Prefix) -> None:
        """Go on with a prefix that was edited or lost keys: everything remembered is forgotten."""
        self.prefix = prefix
        self.parts = [None] * len(prefix.k)

    def keep(self, rows: Int[Tensor, " R"]) -> None:
        """Only these sequences go on; what was remembered for the others is dropped."""
        self.prefix = self.prefix.keep(rows)
        self.parts = [None if part is None else part.keep(rows) for part in self.parts]

    # -- for subclasses

    def fresh(self, layer: int, q: Float[Tensor, "R H T D"], rows: Int[Tensor, " R"] | None = None) -> Part:
        """Attention of all rows (or some) to the whole prefix, counted."""
        k, v, valid = self.prefix.k[layer], self.prefix.v[layer], self.prefix.valid
        if rows is not None:
            k, v, valid = k[rows], v[rows], None if valid is None else valid[rows]
        out, lse = attend(q, k, v, causal=False, mask=None if valid is None else valid[:, None, None])
        pad = 0 if self.prefix.pad is None else int((self.prefix.pad if rows is None else self.prefix.pad[rows]).sum())
        self.count(k.shape[1] * (k.shape[0] * k.shape[2] - pad))
        if layer == 0:
            self.reads.refreshes += k.shape[0]
        return out.to(_wide(out)), lse

    def count(self, keys: int) -> None:
        """Note keys that were read, over sequences and key-value heads of one layer."""
        self.reads.keys += keys
        self.reads.later_keys += keys if self.step and not self.save else 0

    def offered(self) -> None:
        """Note what a dense pass of one layer would read."""
        k = self.prefix.k[0]
        keys = k.shape[1] * (k.shape[0] * k.shape[2] - int(self.prefix.padding.sum()))
        self.reads.dense += keys
        self.reads.later_dense += keys if self.step and not self.save else 0


class Denoising(Method):
    """A method of kind ``denoising``: how blocks read their prefix while they are denoised. This base reads all of it."""

    def begin(self, prefix: Prefix, length: int, block: int) -> BlockReader:
        """What reads `prefix` for a block of `length` tokens; `block` is the model's own block size.

        Raises:
            Refused: a knob doesn't suit the model's blocks.
        """
        return BlockReader(prefix, length)


def block_attention(reader: BlockReader) -> Attention:
    """Attention to prefix and block: the prefix's part as `reader` has it, merged with the block's own."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _check_heads(reader.prefix, k)
        own, own_lse = attend(q, k, v, causal=False)
        if reader.prefix.length:
            reader.offered()
        out, _ = merge([reader.read(layer, q), (own.to(_wide(own)), own_lse)])
        return out.to(q.dtype)

    return attention


def known_attention(prefix: Prefix, block: int) -> Attention:
    """Attention of tokens that are all known: each sees the prefix, the blocks before its own, and its own block."""
    reader = BlockReader(prefix, 1)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _check_heads(prefix, k)
        own, own_lse = attend(q, k, v, causal=False, mask=block_mask(q.shape[2], block, q.device))
        out, _ = merge([reader.read(layer, q), (own.to(_wide(own)), own_lse)])
        return out.to(q.dtype)

    return attention


@torch.no_grad()
def read_blocks(model: BlockDiffusion, prefix: Prefix, ids: Int[Tensor, "B T"]) -> Prefix:
    """The prefix after known tokens, whole blocks of them, read in one dense pass.

    Raises ValueError when `ids` aren't whole blocks.
    """
    if ids.shape[1] % model.config.block:
        raise ValueError(f"expected whole blocks of {model.config.block} tokens, got {ids.shape[1]} tokens")
    if not ids.shape[1]:
        return prefix
    found = model(ids, prefix.places(ids.shape[1]), known_attention(prefix, model.config.block))
    return prefix.extended(found.k, found.v)


def padded(prefixes: Sequence[Prefix]) -> Prefix:
    """One batch of prefixes of one row each and of different lengths, padded on the left."""
    longest = max(p.length for p in prefixes)
    pad = torch.tensor([longest - p.length for p in prefixes], device=prefixes[0].k[0].device)

    def joined(layers: Sequence[Tensor], pads: Sequence[int]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(t, (0, 0, n, 0)) for t, n in zip(layers, pads, strict=True)])

    k, v = ([joined(layers, pad.tolist()) for layers in zip(*(getattr(p, name) for p in prefixes), strict=True)] for name in "kv")
    return replace(prefixes[0], k=k, v=v, pad=pad if bool(pad.any()) else None, notes={})


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check_heads(prefix: Prefix, k: Tensor) -> None:
    if prefix.k[0].shape[:2] != k.shape[:2] or prefix.k[0].shape[3] != k.shape[3]:
        raise ValueError(f"the block's keys {tuple(k.shape)} don't go with a prefix of keys {tuple(prefix.k[0].shape)}: rows, "
                         "key-value heads and head size must be equal")
