"""Latent memory: what is evicted goes on as a small fast state, which adds an estimate of the attention it would get.

The kept entries lie as in the ragged store. When `keep` drops entries, their keys, turned back to position 0, and their
values are written into one matrix M and one vector b a layer (`longspan.cache.index_memory`); from then on `attend` adds
g(q) m(q) to the output of every head. The state is float32, its size doesn't depend on how much it has taken in, and
a write replaces it, so that snapshots stay good.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from longspan.cache.base import Store
from longspan.cache.index_memory import FAMILY, TRAINER, FastState, Memory, memory_name, read, trained_weights, written
from longspan.cache.stores.ragged import RaggedLayer
from longspan.models import profiles
from longspan.models.parts import Parts
from longspan.registry import Refused, knob, method


class LatentMemoryLayer(RaggedLayer):
    """A ragged layer with a memory of what it dropped; None until something was dropped."""

    def __init__(self, store: LatentMemory) -> None:
        super().__init__()
        self.store = store
        self.place: Place | None = None
        self.memory: FastState | None = None
        self.turned = False
        """Whether a kept key was turned to another position than the one it is noted under."""

    def bind(self, layer: int, parts: Parts) -> None:
        """Learn the layer and find the weights.

        Raises:
            Refused: there are none for this model.
        """
        if self.place is None or self.place.parts_ref() is not parts or self.place.layer != layer:
            found = self.store.weights_of(parts)
            self.place = Place(layer, parts, found.memory(parts, layer, _device(parts, layer), self.store.per_head_state))

    def attend(self, q: Tensor, positions: Tensor, *, scale: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        out = super().attend(q, positions, scale=scale, window=window, softcap=softcap)
        if self.memory is None:
            return out
        place = self._bound()
        flat = place.parts.unrotate(q, *place.parts.rope(positions, place.layer))
        return out + read(place.weights, self.memory, flat, self.store.eps).to(out.dtype)

    def keep(self, mask: Bool[Tensor, "B H S"], keys: Tensor | None = None) -> None:
        held = self.view()
        evicted = held.valid & ~mask
        # A layer that sees a window only would forget evicted entries, which a memory can't do.
        if bool(evicted.any()) and not self._bound().parts.is_sliding(self._bound().layer):
            if self.turned:
                raise Refused("latent-memory can't take in keys that were turned to other positions when they were kept, since "
                              "they can't be turned back; expected store=ragged, or a schedule that evicts once.")
            place, s = self._bound(), self.store
            cos, sin = place.parts.rope(held.positions.masked_fill(~held.valid, 0), place.layer)
            flat = place.parts.unrotate(held.k, cos, sin)
            self.memory = written(place.weights, self.memory, flat, held.v, evicted, lam=s.lam, eta=s.eta,
                                  per_head=s.per_head_state)
        del held
        self.turned |= keys is not None
        super().keep(mask, keys)

    def _bound(self) -> Place:
        if self.place is None:
            raise ValueError("a latent memory was used before bind(), which tells it the layer and the model")
        return self.place

    # -- what is held

    def tensors(self) -> dict[str, Tensor]:
        state = {} if self.memory is None else {"memory_m": self.memory.m, "memory_b": self.memory.b}
        return super().tensors() | state

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.memory is not None:
            index = rows.to(self.memory.m.device, torch.int64)
            self.memory = FastState(self.memory.m[index], self.memory.b[index])

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"memory_turned": torch.tensor(self.turned)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.turned = bool(state["memory_turned"])
        # What an earlier sequence has left is gone, whether or not this one has evicted anything.
        self.memory = FastState(state["memory_m"], state["memory_b"]) if "memory_m" in state else None


class Place:
    """Where a layer stands: shared by its copies, since it holds nothing of a sequence."""

    def __init__(self, layer: int, parts: Parts, weights: Memory) -> None:
        self.layer, self.parts_ref, self.weights = layer, weakref.ref(parts), weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self

    @property
    def parts(self) -> Parts:
        parts = self.parts_ref()
        if parts is None:
            raise RuntimeError("the model's parts are gone; use the cache inside `with recipe.on(model):`.")
        return parts


def _device(parts: Parts, layer: int) -> torch.device:
    """Where a layer computes."""
    place = next(parts.layers[layer].parameters()).device
    return torch.device("cpu") if place.type == "meta" else place


@method("latent-memory", kind="store", system="indexer-memory", paper="arXiv:2605.25475",
        capabilities=("ragged", "rollback", "profile", "trains"),
        summary="A small trained memory per layer takes in what is evicted and adds back the attention it would get.")
class LatentMemory(Store):
    """Needs weights trained for the model, which `longspan profile "indexmem(store=latent-memory)"` makes in minutes;
    those of the bundled model come with the package. They are trained with the indexer's evictions and serve any score.
    Layers with a sliding window drop what they evict."""

    family: ClassVar[str] = FAMILY
    trainer: ClassVar[str] = TRAINER

    lam: float = knob(1.0, "what is left of the state at every further write", low=0.0, high=1.0)
    eta: float = knob(1.0, "weight of what is written", low=0.0)
    eps: float = knob(1e-6, "added to the divisor of a read", low=1e-12)
    per_head_state: bool = knob(False, "a state for each key-value head, not one a layer")
    weights: str = knob(profiles.AUTO, 'file of the trained weights; "auto" finds those of the model')

    def make(self) -> LatentMemoryLayer:
        return LatentMemoryLayer(self)

    def profile_settings(self) -> dict[str, Any]:
        return {}

    def profile_tensors(self) -> tuple[str, ...]:
        return ("layers", *(f"{memory_name(self.per_head_state)}.{n}" for n in ("weight", "gate_weight", "gate_bias")))

    def profile_recipe(self) -> str:
        own = "latent-memory(per_head_state=True)" if self.per_head_state else "latent-memory"
        return f"indexmem(store={own})"

    def weights_of(self, parts: Parts) -> Any:
        return trained_weights(self, parts.model, self.weights)
