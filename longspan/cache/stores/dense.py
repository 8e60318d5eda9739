"""Dense store: every head of every row holds the same number of entries, in one tensor that also takes new tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longspan.cache.base import Store
from longspan.cache.store import LayerStore, View, attend_buffer, kept_last
from longspan.registry import method


class DenseLayer(LayerStore):
    def attend(self, q: Tensor, positions: Tensor, *, scale: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        return attend_buffer(self.tail, q, positions, scale, window, softcap)[0]

    def view(self) -> View:
        k, v, valid = self.tail.keys, self.tail.values, self.tail.all_valid()
        if valid is None:
            valid = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
        return View(k, v, valid, self.tail.all_positions())

    def keep(self, mask: Bool[Tensor, "B H S"], keys: Tensor | None = None) -> None:
        self.tail.replace(*pack(self.view(), mask, keys))

    def lengths(self) -> Int[Tensor, "B H"]:
        valid = self.tail.all_valid()
        if valid is not None:
            return valid.sum(-1)
        B, H = self.tail.keys.shape[:2]
        return torch.full((B, H), self.tail.length, device=self.tail.keys.device)

    def tensors(self) -> dict[str, Tensor]:
        return self.tail.tensors()

    def select(self, rows: Tensor) -> None:
        self.tail.select(rows)

    def state(self) -> dict[str, Tensor]:
        return self.tail.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self.tail.load(state)


def pack(held: View, mask: Bool[Tensor, "B H S"],
         keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Kept entries in a tensor as long as the longest head: keys, values, positions, mask of live ones (None: all)."""
    counts = mask.sum(-1)
    longest = int(counts.max())
    order = kept_last(mask, longest)
    index = order[..., None].expand(*order.shape, held.k.shape[-1])
    valid = mask.gather(-1, order)
    k = (held.k if keys is None else keys).gather(2, index)
    return k, held.v.gather(2, index), held.positions.gather(-1, order), None if bool(valid.all()) else valid


@method("dense", kind="store", summary="One tensor per layer; every head of every row holds the same number.",
        capabilities=("equal-lengths", "rollback"))
class Dense(Store):
    """Keys and values as the model computed them, (B,H,n,D). Rows of unequal length are padded and masked."""

    def make(self) -> DenseLayer:
        return DenseLayer()
