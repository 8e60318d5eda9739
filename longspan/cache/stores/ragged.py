"""Ragged store: heads keep different numbers of entries, and what is dropped is really freed.

The prefix (what the last compression kept) lies in flat buffers, keys and values (N,D), with B*H+1 offsets: the entries
of row b, head h are offsets[b*H+h] to offsets[b*H+h+1]. Tokens read since then stand in a dense tail. Rows of a beam
search point at the prefix they share instead of copying it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longspan.cache.base import Held, Store
from longspan.cache.store import LayerStore, View, attend_buffer
from longspan.kernels import attend_ragged, decode_attend, merge
from longspan.registry import method


class RaggedLayer(LayerStore):
    """Flat prefix and dense tail of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.positions: Int[Tensor, " N"] | None = None
        self.offsets: Int[Tensor, " BH1"] | None = None
        self.rows: Int[Tensor, " B"] | None = None
        self.heads = 0

    @property
    def untouched(self) -> bool:
        return self.offsets is None

    # -- attention

    def attend(self, q: Tensor, positions: Tensor, *, scale: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        if self.offsets is None:
            return attend_buffer(self.tail, q, positions, scale, window, softcap)[0]
        k, v = self.flat()
        tail = self.tail
        if q.shape[2] == 1 and window is None:
            assert tail.k is not None and tail.v is not None
            return decode_attend(q, (k, v, self.offsets, self.rows), tail.k, tail.v, tail.length, tail.valid,
                                 scale=scale, softcap=softcap)[0]
        past = attend_ragged(q, k, v, self.offsets, scale=scale, softcap=softcap, rows=self.rows, kv_heads=self.heads,
                             positions=self.positions, q_positions=positions.long(), window=window)
        own = attend_buffer(tail, q, positions, scale, window, softcap, return_lse=True)
        return merge([past, own])[0]  # type: ignore[list-item]

    def flat(self) -> tuple[Tensor, Tensor]:
        """The prefix's keys and values, (N,D) each."""
        assert self.k is not None and self.v is not None
        return self.k, self.v

    # -- what is held

    def view(self) -> View:
        tail = self.tail
        if self.offsets is None:
            k, v, valid = tail.keys, tail.values, tail.all_valid()
            if valid is None:
                valid = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
            return View(k, v, valid, tail.all_positions())
        k, v, valid, positions = self._padded_prefix()
        if tail.length:
            own = tail.all_valid()
            if own is None:
                own = torch.ones(tail.keys.shape[:3], dtype=torch.bool, device=k.device)
            k, v = torch.cat([k, tail.keys], 2), torch.cat([v, tail.values], 2)
            valid, positions = torch.cat([valid, own], -1), torch.cat([positions, tail.all_positions()], -1)
        return View(k, v, valid, positions)

    def _padded_prefix(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.offsets is not None and self.positions is not None
        flat_k, flat_v = self.flat()
        starts, counts = self._segments()
        longest = int(counts.max()) if counts.numel() else 0
        # Dead columns stand before a shorter head's entries, as `kept_last` has it.
        at = torch.arange(longest, device=flat_k.device) - (longest - counts[..., None])
        valid = at >= 0
        index = torch.where(valid, starts[..., None] + at, 0)
        k = torch.where(valid[..., None], flat_k[index], 0)
        v = torch.where(valid[..., None], flat_v[index], 0)
        return k, v, valid, torch.where(valid, self.positions[index], torch.iinfo(torch.int32).max)

    def _segments(self) -> tuple[Int[Tensor, "B H"], Int[Tensor, "B H"]]:
        """Start and length of every (row, head), rows taken through their pointers."""
        assert self.offsets is not None
        starts = self.offsets[:-1].view(-1, self.heads)
        counts = self.offsets.diff().view(-1, self.heads)
        return (starts, counts) if self.rows is None else (starts[self.rows], counts[self.rows])

    def keep(self, mask: Bool[Tensor, "B H S"], keys: Tensor | None = None) -> None:
        held = self.view()
        counts = mask.sum(-1)
        self.offsets = torch.cat([counts.new_zeros(1), counts.flatten().cumsum(0)])
        self.heads, self.rows = mask.shape[1], None
        self.store_flat((held.k if keys is None else keys)[mask], held.v[mask])
        self.positions = held.positions[mask].to(torch.int32)
        self.tail = type(self.tail)()

    def store_flat(self, k: Tensor, v: Tensor) -> None:
        """Take over the kept entries, (N,D) each."""
        self.k, self.v = k, v

    def lengths(self) -> Int[Tensor, "B H"]:
        tail = self.tail.all_valid() if self.tail.k is not None else None
        if self.offsets is None:
            B, H = self.tail.keys.shape[:2]
            return torch.full((B, H), self.tail.length, device=self.tail.keys.device) if tail is None else tail.sum(-1)
        _, counts = self._segments()
        return counts + (tail.sum(-1) if tail is not None else self.tail.length)

    def width(self) -> int:
        if self.offsets is None:
            return self.tail.length
        return self.tail.length + int(self._segments()[1].max())

    def prefix_tensors(self) -> dict[str, Tensor]:
        found = {"flat_k": self.k, "flat_v": self.v}
        return {n: t for n, t in found.items() if t is not None}

    def tensors(self) -> dict[str, Tensor]:
        found = {"flat_positions": self.positions, "offsets": self.offsets, "rows": self.rows}
        named = {n: t for n, t in found.items() if t is not None}
        return self.tail.tensors() | self.prefix_tensors() | named

    # -- rows

    def select(self, rows: Tensor) -> None:
        """Beams: the flat prefix stays as it is; rows point into it, and only the tail is copied."""
        if self.offsets is not None:
            index = rows.to(self.offsets.device, torch.int64)
            self.rows = index if self.rows is None else self.rows[index]
        if self.tail.k is not None:
            self.tail.select(rows)

    def state(self) -> dict[str, Tensor]:
        tail = self.tail.state() if self.tail.k is not None else {}
        own = {n: t for n, t in self.tensors().items() if n not in tail}
        return own | tail | {"heads": torch.tensor(self.heads)}

    def load(self, state: dict[str, Tensor]) -> None:
        self.heads = int(state["heads"])
        self.k, self.v = state.get("flat_k"), state.get("flat_v")
        self.positions, self.offsets, self.rows = (state.get(n) for n in ("flat_positions", "offsets", "rows"))
        if "counts" in state:
            self.tail.load(state)


@method("ragged", kind="store", summary="Flat buffers with offsets: heads keep different numbers, the rest is freed.",
        capabilities=("ragged", "rollback"))
class Ragged(Store):
    """Keys and values as the model computed them, in one flat buffer per layer."""

    def make(self) -> RaggedLayer:
        return RaggedLayer()

    def layer_bytes(self, kept: float, held: Held) -> float:
        return super().layer_bytes(kept, held) + offset_bytes(held.heads)


def offset_bytes(heads: int) -> int:
    """Bytes of the offsets of a layer's flat buffers."""
    return 8 * (heads + 1)
