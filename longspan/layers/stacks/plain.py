"""The plain stack: layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from longspan.layers.base import Stack, StackModule
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import method


@dataclass(eq=False)
class StackState(MixerState):
    """The states of the layers, in order."""

    layers: tuple[MixerState, ...]


class PlainModule(StackModule):
    """Every layer reads what the one before wrote."""

    def __init__(self, make_layer: Callable[[int], nn.Module], n_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(make_layer(index) for index in range(n_layers))

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], StackState]:
        assert state is None or isinstance(state, StackState)
        after = []
        for index, layer in enumerate(self.layers):
            x, new = layer(x, ctx, None if state is None else state.layers[index])
            after.append(new)
        return x, StackState(tuple(after))


@method("plain", kind="stack", summary="Layers one after the other.")
class Plain(Stack):
    """The usual decoder: no loops, no branches."""

    def build(self, make_layer: Callable[[int], nn.Module], n_layers: int, dim: int) -> PlainModule:
        return PlainModule(make_layer, n_layers)
