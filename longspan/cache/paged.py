"""Layout regularisation: heads that keep different tokens, as an engine with paged memory wants to see them.

Engines read every sequence through a table of pages, one length per sequence, and capture the whole step as a graph of
fixed shapes. Heads of unequal length fit in when the page size is 1 and every (sequence, KV head) counts as a sequence of
its own, with G query heads over one KV head (*flattening*). The memory holds token slots; head h's part of token slot s
is slot s*Hkv + h, so a table row may name any subset of a head's tokens. What a head still needs of a slot is one bit;
a slot of a head is free once all layers cleared it (HARD-KV, arXiv:2606.28831).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from longspan.kernels import attend, attend_ragged

# --------------------------------------------------------------------------------------------------------------- bits


def pack_bits(mask: Bool[Tensor, "... n"]) -> UInt8[Tensor, "... bytes"]:
    """Eight entries to a byte along the last axis, the lowest bit first; bits beyond n are 0."""
    n = mask.shape[-1]
    octets = F.pad(mask.to(torch.uint8), (0, -n % 8)).unflatten(-1, ((n + 7) // 8, 8))
    return (octets << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: UInt8[Tensor, "... bytes"], n: int) -> Bool[Tensor, "... n"]:
    """The inverse of `pack_bits`, for the first `n` entries."""
    return ((bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1).flatten(-2)[..., :n].bool()


def freed(bits: UInt8[Tensor, "L H bytes"], n: int) -> Bool[Tensor, "H n"]:
    """Slots of a head that no layer needs any more."""
    needed = bits[0]
    for layer in bits[1:]:
        needed = needed | layer
    return ~unpack_bits(needed, n)


class SlotBits:
    """Which of `slots` token slots every layer and KV head needs: bits (L,H,slots/8). Rounds only clear bits."""

    def __init__(self, layers: int, heads: int, slots: int, device: torch.device | str = "cpu") -> None:
        self.slots = slots
        self.bits: UInt8[Tensor, "L H bytes"] = torch.zeros(layers, heads, (slots + 7) // 8, dtype=torch.uint8, device=device)

    def take(self, slots: Int[Tensor, " n"]) -> None:
        """New tokens stand in `slots`: every head of every layer needs them."""
        fresh = torch.zeros(self.slots, dtype=torch.bool, device=self.bits.device)
        fresh[slots] = True
        self.bits = self.bits | pack_bits(fresh)

    def clear(self, layer: int, keep: Bool[Tensor, "H slots"]) -> None:
        """A round of one layer: only what is in `keep` stays. A bit that was cleared never comes back."""
        cut = self.bits.clone()
        cut[layer] &= pack_bits(keep)
        self.bits = cut

    def live(self, layer: int) -> Bool[Tensor, "H slots"]:
        """What one layer needs."""
        return unpack_bits(self.bits[layer], self.slots)

    def freed(self) -> Bool[Tensor, "H slots"]:
        """Slots of a head that no layer needs."""
        return freed(self.bits, self.slots)


# -------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class PageTable:
    """Pages of one token each, a row for every (sequence, KV head)."""

    seq_to_slot: Int[Tensor, "R P"]
    """Slots of row b*Hkv + h in order of the tokens; 0 behind its length."""
    lengths: Int[Tensor, " R"]
    """Pages of every row."""
    bits: UInt8[Tensor, "R bytes"] | None = None
    """Packed mask over the pages, for tokens that were dropped but not moved; None: all count."""

    @property
    def counted(self) -> Bool[Tensor, "R P"]:
        """Pages that attention reads."""
        pages = self.seq_to_slot.shape[1]
        inside = torch.arange(pages, device=self.lengths.device) < self.lengths[:, None]
        return inside if self.bits is None else inside & unpack_bits(self.bits, pages)


def page_table(token_slots: Int[Tensor, "B n"], live: Bool[Tensor, "B Hkv n"]) -> PageTable:
    """The compact table of what is live: each row names only the slots that its head needs."""
    lengths, heads = live.sum(-1), live.shape[1]
    first = (~live).to(torch.int8).argsort(dim=-1, stable=True)[..., : int(lengths.max())]
    slots = token_slots[:, None].expand(live.shape).gather(-1, first) * heads + torch.arange(heads, device=live.device)[:, None]
    inside = torch.arange(first.shape[-1], device=live.device) < lengths[..., None]
    return PageTable(torch.where(inside, slots, 0).flatten(0, 1), lengths.flatten())


def masked_table(token_slots: Int[Tensor, "B n"], live: Bool[Tensor, "B Hkv n"]) -> PageTable:
    """The table of everything in place, with a packed mask of what is live."""
    whole = page_table(token_slots, torch.ones_like(live))
    return PageTable(whole.seq_to_slot, whole.lengths, pack_bits(live).flatten(0, 1))


class IndexBuffers:
    """A page table in tensors that stay where they are, for graphs captured once and replayed with other tables.

    Args:
        rows: sequences x KV heads.
        pages: most pages a row may have.
    """

    def __init__(self, rows: int, pages: int, device: torch.device | str = "cpu") -> None:
        self.table = PageTable(torch.zeros(rows, pages, dtype=torch.int64, device=device),
                               torch.zeros(rows, dtype=torch.int64, device=device),
                               torch.zeros(rows, (pages + 7) // 8, dtype=torch.uint8, device=device))

    def load(self, table: PageTable) -> PageTable:
        """Copy a table in; rows and pages it doesn't have are empty. Returns the fixed table.

        Raises:
            ValueError: it has more rows, or a longer one, than the buffers.
        """
        mine, (rows, pages) = self.table, table.seq_to_slot.shape
        if rows > mine.lengths.shape[0] or pages > mine.seq_to_slot.shape[1]:
            raise ValueError(f"a table of {rows} rows and {pages} pages doesn't fit into buffers "
                             f"{tuple(mine.seq_to_slot.shape)}")
        assert mine.bits is not None
        mine.lengths.zero_()[:rows] = table.lengths
        mine.seq_to_slot.zero_()[:rows, :pages] = table.seq_to_slot
        mine.bits.fill_(255)
        if table.bits is not None:
            mine.bits[:rows, : table.bits.shape[1]] = table.bits
        return mine


# ----------------------------------------------------------------------------------------------------------- attention


def flattened(q: Float[Tensor, "B Hq T D"], kv_heads: int) -> Float[Tensor, "R G T D"]:
    """Queries with every (sequence, KV head) as a row: its G query heads, over one KV head."""
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads don't divide among {kv_heads} KV heads")
    return q.reshape(q.shape[0] * kv_heads, q.shape[1] // kv_heads, *q.shape[2:])


def attend_pages(q: Float[Tensor, "B Hq T D"], k: Float[Tensor, "slots Hkv D"], v: Float[Tensor, "slots Hkv D"],
                 table: PageTable, *, scale: float | None = None) -> Float[Tensor, "B Hq T D"]:
    """Eager: attention of every row to the pages it counts, whatever their number. Shapes depend on the table."""
    rows, counted = flattened(q, k.shape[1]), table.counted
    index, lengths = table.seq_to_slot[counted], counted.sum(-1)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    out = attend_ragged(rows, k.flatten(0, 1)[index], v.flatten(0, 1)[index], offsets, scale=scale, return_lse=False)[0]
    return out.view(q.shape)


def attend_fixed(q: Float[Tensor, "B Hq T D"], k: Float[Tensor, "slots Hkv D"], v: Float[Tensor, "slots Hkv D"],
                 table: PageTable, *, scale: float | None = None) -> Float[Tensor, "B Hq T D"]:
    """The same through all pages of the table, masked: shapes depend on nothing but the table's size, so that the call can
    be captured once and replayed. A row without pages gives zeros."""
    rows = flattened(q, k.shape[1])
    if rows.shape[0] != table.lengths.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows of queries need a table of as many, got {table.lengths.shape[0]}")
    keys, values = (t.flatten(0, 1)[table.seq_to_slot][:, None] for t in (k, v))
    out = attend(rows, keys, values, scale=scale, causal=False, mask=table.counted[:, None, None])[0]
    return out.view(q.shape)
