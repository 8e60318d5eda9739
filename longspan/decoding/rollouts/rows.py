"""A cache for sequences that grow by different numbers of tokens: after each call every row drops what didn't stand.

Rows end at the same slot. A call writes all rows' new tokens behind that slot, padded on the right; `keep` then moves each row
so that what it keeps ends at one slot again. So a row's slots are as far apart as its positions, and no row
sees another's padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.models.hook import cache_keyword
from longspan.registry import Refused


class RowCache:
    """Keys and values of some sequences of one model."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        from transformers import DynamicCache

        self.model = model
        self.cache: Any = DynamicCache()
        self.lengths = [0] * rows
        """Tokens that each row has read."""
        self.slots = 0

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]], last: int | None = None) -> Float[Tensor, "B w V"]:
        """Read new tokens of every row, w at most; float32 logits after each, of the `last` positions only if given.

        Logits of a row beyond its own tokens mean nothing. `keep` must follow.
        """
        device = next(self.model.parameters()).device
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        counts = torch.tensor([len(row) for row in rows], device=device)
        lengths = torch.tensor(self.lengths, device=device)
        step = torch.arange(width, device=device)
        positions = lengths[:, None] + step.minimum((counts - 1).clamp(min=0)[:, None])
        slots = torch.arange(self.slots + width, device=device)
        mask = (slots >= self.slots - lengths[:, None]).long()
        out = self.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True,
                         logits_to_keep=last or width, **{cache_keyword(self.model): self.cache})
        self.width = width
        if any(getattr(layer, "keys", None) is None for layer in self.cache.layers):
            raise Refused("rollouts of this model: expected layers that all keep keys and values.")
        return out.logits.float()

    def keep(self, counts: Sequence[int]) -> None:
        """Take back all but the first `counts` of the tokens each row has just read."""
        lengths = [n + c for n, c in zip(self.lengths, counts)]
        slots = max(lengths)
        ends = [self.slots + c for c in counts]
        if len(set(ends)) == 1:
            self._each(lambda x: x[:, :, ends[0] - slots : ends[0]])
        else:
            at = torch.tensor(ends)[:, None] - slots + torch.arange(slots)
            index = at.clamp(min=0)[:, None, :, None]
            self._each(lambda x: x.gather(2, index.to(x.device).expand(-1, x.shape[1], -1, x.shape[3])))
        self.lengths, self.slots = lengths, slots

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows; one may be named twice."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[i] for i in rows]
        slots = max(self.lengths, default=0)
        cut = self.slots - slots
        at = torch.tensor(list(rows), dtype=torch.long)
        self._each(lambda x: x[at.to(x.device), :, cut:])
        self.slots = slots

    def join(self, other: RowCache) -> None:
        """Take over the rows of another cache of the same model, behind one's own."""
        if not self.lengths or not other.lengths:
            if other.lengths:
                self.cache, self.lengths, self.slots = other.cache, other.lengths, other.slots
            return
        slots = max(self.slots, other.slots)
        if slots:
            for mine, theirs in zip(self._layers(other), other._layers(self)):
                mine.keys = torch.cat([_padded(mine.keys, slots), _padded(theirs.keys, slots)])
                mine.values = torch.cat([_padded(mine.values, slots), _padded(theirs.values, slots)])
        self.lengths, self.slots = [*self.lengths, *other.lengths], slots

    def _layers(self, like: RowCache) -> list[Any]:
        """The layers; of rows that have read nothing, made with as many slots as that: none."""
        if not self.cache.layers:
            for i, layer in enumerate(like.cache.layers):
                shape = (len(self.lengths), layer.keys.shape[1], 0)
                self.cache.update(layer.keys.new_zeros(*shape, layer.keys.shape[3]),
                                  layer.values.new_zeros(*shape, layer.values.shape[3]), i)
        return self.cache.layers

    def _each(self, change: Any) -> None:
        for layer in self.cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)


def _padded(x: Tensor, slots: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, slots - x.shape[2], 0))
