"""What a layer remembers between two calls: one base class that every kind of memory shares.

A state holds tensors whose first axis is the batch (keys and values, a memory matrix, the last inputs of a
convolution), other states, tuples of either, or plain numbers. A layer never writes into a state it was given: it
returns a new one. So a snapshot is a handful of references, and going back costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from jaxtyping import Int
from torch import Tensor


@dataclasses.dataclass(eq=False)
class MixerState:
    """Base of all states. A dataclass of tensors (batch first), states, tuples, lists, dicts, numbers or None.

    A subclass that writes in place, or holds a tensor whose first axis is not the batch, overrides what that breaks.
    """

    def snapshot(self) -> Any:
        """What `restore` needs to come back here; shares the tensors, since nobody writes into them."""
        return _copy(self)

    def restore(self, snap: Any) -> None:
        """Become again what the state was when `snap` was taken. Raises ValueError for another kind of state."""
        if type(snap) is not type(self):
            raise ValueError(f"a {type(self).__name__} can't be restored from a {type(snap).__name__}")
        for field in dataclasses.fields(self):
            setattr(self, field.name, _map(getattr(snap, field.name), _same))

    def reorder(self, index: Int[Tensor, " B2"]) -> Self:
        """The state of the rows `index`, in that order; rows may repeat or be left out (beams, batches that shrink)."""
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def detach(self) -> Self:
        """The same values without their history: gradients stop here."""
        return self.map(Tensor.detach)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A new state with `change` applied to every tensor, at any depth."""
        fields = {f.name: _map(getattr(self, f.name), change) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **fields)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state, at any depth."""
        for field in dataclasses.fields(self):
            yield from _tensors(getattr(self, field.name))

    @property
    def nbytes(self) -> int:
        """Bytes the state keeps alive: whole storages, each counted once, not just the parts that are looked at."""
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages if s.nbytes()}.values())


def _copy(state: MixerState) -> MixerState:
    return state.map(_same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MixerState):
        return value.map(change)
    if isinstance(value, tuple | list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, MixerState):
        yield from value.tensors()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
