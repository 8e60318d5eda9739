"""Tiered store: compressions that only clear bits, and now and then one that moves what is left together.

Three tiers (the cascade cache of HARD-KV, arXiv:2606.28831):

- *dense*: what was read since the last compression, never masked;
- *sparse*: entries that stay where they were written, with one packed bit per head and entry. A compression only clears
  bits; the memory is not freed yet, and attention reads past the dead entries;
- *condensed*: what the last rewrite kept, one compact run per head, dead entries freed.

`sparse_rounds` compressions clear bits before the next one rewrites; with 0 every one rewrites. Entries of the condensed
tier have bits too, once a sparse round follows a rewrite. Attention over the tiers is added exactly by log-sum-exp.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from longspan.cache.base import POSITION_BYTES, Held, Store
from longspan.cache.paged import flattened, pack_bits, unpack_bits
from longspan.cache.store import Buffer, View, attend_buffer, kept_last
from longspan.cache.stores.ragged import RaggedLayer, offset_bytes
from longspan.kernels import attend_ragged, decode_attend, merge
from longspan.registry import knob, method


class InPlaceBuffer(Buffer):
    """A buffer whose older entries (the `kept` first) carry a packed bit per head: the sparse tier, then the dense one."""

    bits: UInt8[Tensor, "B H bytes"] | None = None

    @property  # type: ignore[override]
    def kept_valid(self) -> Bool[Tensor, "B H m"] | None:
        return None if self.bits is None else unpack_bits(self.bits, self.kept)

    @kept_valid.setter
    def kept_valid(self, mask: Bool[Tensor, "B H m"] | None) -> None:
        self.bits = None if mask is None else pack_bits(mask)

    def settle(self, live: Bool[Tensor, "B H S"]) -> None:
        """Everything becomes sparse, in place: `live` says what still counts."""
        B, H = live.shape[:2]
        # Nothing moved, so all heads share their positions.
        old = None if self.kept_positions is None else self.kept_positions[:, 0]
        parts = [p for p in (old, self.positions) if p is not None]
        self.kept_positions = torch.cat(parts, -1)[:, None].expand(B, H, -1)
        self.positions = self.valid = None
        self.kept, self.kept_valid = self.length, live

    def tensors(self) -> dict[str, Tensor]:
        found = {n: t for n, t in super().tensors().items() if n != "kept_valid"}
        return found if self.bits is None else found | {"bits": self.bits}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.bits = state.get("bits")


class TieredLayer(RaggedLayer):
    """A ragged layer (the condensed tier) whose entries, and those of its tail, may be dead without being gone."""

    tail: InPlaceBuffer

    def __init__(self, sparse_rounds: int) -> None:
        super().__init__()
        self.tail = InPlaceBuffer()
        self.sparse_rounds = sparse_rounds
        self.rounds = 0
        """Compressions since the last rewrite."""
        self.bits: UInt8[Tensor, "B H bytes"] | None = None
        """Live entries of the condensed runs, padded in front to the longest; None: all."""

    @property
    def untouched(self) -> bool:
        return self.offsets is None and self.tail.kept == 0

    # -- attention

    def attend(self, q: Tensor, positions: Tensor, *, scale: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        if self.bits is None and self.tail.kept == 0:
            return super().attend(q, positions, scale=scale, window=window, softcap=softcap)
        if q.shape[2] == 1 and window is None:
            return self._decode(q, scale, softcap)
        own, own_lse = attend_buffer(self.tail, q, positions, scale, window, softcap, return_lse=True)
        if self.offsets is None:
            return own
        k, v, offsets, rows, at = self._live_prefix()
        past, lse = attend_ragged(flattened(q, self.heads), k, v, offsets, scale=scale, softcap=softcap, rows=rows, kv_heads=1,
                                  positions=at, q_positions=positions.long().repeat_interleave(self.heads, 0), window=window)
        assert own_lse is not None
        return merge([(past.view(q.shape), lse.view(q.shape[:-1])), (own, own_lse)])[0]

    def _decode(self, q: Float[Tensor, "B Hq 1 D"], scale: float, softcap: float | None) -> Float[Tensor, "B Hq 1 D"]:
        """One step over all tiers in one pass: as rows of their own, heads may have masks of their own."""
        tail, prefix = self.tail, None
        assert tail.k is not None and tail.v is not None
        if self.offsets is not None:
            prefix = self._live_prefix()[:4]
        k, v = (t.flatten(0, 1)[:, None] for t in (tail.k, tail.v))
        valid = tail.all_valid()
        out = decode_attend(flattened(q, tail.k.shape[1]), prefix, k, v, tail.length,
                            None if valid is None else valid.flatten(0, 1), scale, softcap=softcap)[0]
        return out.view(q.shape)

    def _live_prefix(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Keys, values, offsets, row pointers and positions of the condensed entries that count, for flattened heads."""
        assert self.positions is not None and self.offsets is not None
        k, v = self.flat()
        if self.bits is None:
            rows = self.rows
            if rows is not None:
                rows = (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()
            return k, v, self.offsets, rows, self.positions
        index, live = self._condensed()
        at = index[live]
        return k[at], v[at], F.pad(live.sum(-1).flatten().cumsum(0), (1, 0)), None, self.positions[at]

    def _condensed(self) -> tuple[Int[Tensor, "B H m"], Bool[Tensor, "B H m"]]:
        """Where the padded runs lie in the flat buffers, and which entries count."""
        starts, counts = self._segments()
        longest = int(counts.max()) if counts.numel() else 0
        at = torch.arange(longest, device=counts.device) - (longest - counts[..., None])
        live = at >= 0 if self.bits is None else unpack_bits(self.bits, longest)
        return torch.where(at >= 0, starts[..., None] + at, 0), live

    # -- what is held

    def view(self) -> View:
        whole = super().view()  # all that is in memory
        settled = self._settled()
        if settled is None:
            return whole
        order, n = settled
        index = order[..., None].expand(*order.shape, whole.k.shape[-1])
        older, newer = (slice(None), slice(None), slice(None, n)), (slice(None), slice(None), slice(n, None))
        pick = lambda t, where: torch.cat([t[older].gather(2, where), t[newer]], 2)  # noqa: E731
        return View(pick(whole.k, index), pick(whole.v, index), pick(whole.valid, order), pick(whole.positions, order))

    def _padded_prefix(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v, valid, positions = super()._padded_prefix()
        return k, v, valid if self.bits is None else unpack_bits(self.bits, valid.shape[-1]), positions

    def _older(self) -> Bool[Tensor, "B H n"]:
        """Which of the condensed and sparse entries in memory count, in the order of their columns."""
        parts = [] if self.offsets is None else [self._condensed()[1]]
        if self.tail.kept:
            assert self.tail.kept_valid is not None
            parts.append(self.tail.kept_valid)
        return torch.cat(parts, -1)

    def _settled(self) -> tuple[Int[Tensor, "B H m"], int] | None:
        """Columns in memory that `view` shows of the older tiers, and how many there are; None if it shows all as they are."""
        if self.bits is None and self.tail.kept == 0:
            return None
        live = self._older()
        return kept_last(live, int(live.sum(-1).max())), live.shape[-1]

    def keep(self, mask: Bool[Tensor, "B H S"], keys: Tensor | None = None) -> None:
        if self.rounds >= self.sparse_rounds or keys is not None:
            super().keep(mask, keys)  # a rewrite
            self.bits, self.rounds = None, 0
            return
        live = self._in_memory(mask)
        width = live.shape[-1] - self.tail.length
        if width:
            self.bits = pack_bits(live[..., :width])
        if self.tail.length:
            self.tail.settle(live[..., width:])
        self.rounds += 1

    def _in_memory(self, mask: Bool[Tensor, "B H S"]) -> Bool[Tensor, "B H n"]:
        """A mask over `view` as one over the columns in memory: bits are only ever cleared."""
        settled = self._settled()
        if settled is None:
            return mask
        order, older = settled[0], self._older()
        shown = order.shape[-1]
        return torch.cat([torch.zeros_like(older).scatter(-1, order, mask[..., :shown]) & older, mask[..., shown:]], -1)

    def lengths(self) -> Int[Tensor, "B H"]:
        if self.bits is None:
            return super().lengths()
        tail = self.tail.all_valid()
        return self._condensed()[1].sum(-1) + (self.tail.length if tail is None else tail.sum(-1))

    def width(self) -> int:
        settled = self._settled()
        return super().width() if settled is None else settled[0].shape[-1] + self.tail.length - self.tail.kept

    def prefix_tensors(self) -> dict[str, Tensor]:
        return super().prefix_tensors() | ({} if self.bits is None else {"flat_bits": self.bits})

    # -- rows

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.bits is not None:
            self.bits = self.bits[rows.to(self.bits.device)]

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"rounds": torch.tensor(self.rounds)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.bits, self.rounds = state.get("flat_bits"), int(state["rounds"])


@method("tiered", kind="store", system="hard-kv", paper="arXiv:2606.28831", capabilities=("ragged", "rollback"),
        summary="Dense, sparse and condensed tiers: some compressions only clear bits, others free the memory.")
class Tiered(Store):
    """Keys and values as the model computed them. A compression that only clears bits costs no copy and frees nothing."""

    sparse_rounds: int = knob(0, "compressions that only clear bits before one moves what is left together", low=0)

    def make(self) -> TieredLayer:
        return TieredLayer(self.sparse_rounds)

    def layer_bytes(self, kept: float, held: Held) -> float:
        if not self.sparse_rounds:
            return super().layer_bytes(kept, held) + offset_bytes(held.heads)
        # All entries stay, a bit each; heads share their positions.
        entries = held.seen * self.entry_bytes(held.head_dim, held.itemsize) + math.ceil(held.seen / 8)
        return held.heads * entries + held.rows * held.seen * POSITION_BYTES
