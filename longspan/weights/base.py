"""The contract of a weight transform: a method that changes a model's weights, and gives back every bit of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from longspan.models.load import edited_weights
from longspan.registry import Method


class WeightTransform(Method):
    """Changes a model's weights inside a ``with`` block."""

    def on(self, model: nn.Module) -> AbstractContextManager[None]:
        """Change `model` in place until the block ends; then its weights are bit for bit what they were.

        Blocks may nest; the inner one starts from what the outer one made.

        Raises:
            Refused: the model's weights can't be changed so.
        """
        raise NotImplementedError(f"{type(self).__name__} must define on().")


@contextmanager
def edited(weight: Tensor, part: tuple[slice, ...], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace ``weight[part]`` by what `change` makes of it until the block ends."""
    place = weight.data_ptr()
    with torch.no_grad():
        before = weight[part].clone()
        weight[part] = change(before).to(weight.dtype)
    edited_weights[place] = edited_weights.get(place, 0) + 1
    try:
        yield
    finally:
        with torch.no_grad():
            weight[part] = before
        if edited_weights[place] == 1:
            del edited_weights[place]
        else:
            edited_weights[place] -= 1
