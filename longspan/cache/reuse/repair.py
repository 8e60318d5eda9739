"""Stage II: recompute chosen tokens where they stand, and read what follows the context.

One forward over the chosen tokens and the suffix, from layer 0. In every layer their keys and values are computed at
their true positions and written over the cached ones before anything attends; each token then attends to every key at a
position up to its own, repaired where repaired and cached elsewhere. What comes out is the cache of the whole prompt.

`deviations` is the same forward over all of the context, stopped early: what its tokens would be at one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.cache.cache import RecipeCache
from longspan.cache.layer import PolicyLayer, SlidingLayer
from longspan.cache.reuse.assemble import Assembled
from longspan.cache.reuse.document import rotary_digest
from longspan.cache.reuse.stage import Enough, attend_at, forward, parts_of
from longspan.cache.stores.dense import DenseLayer
from longspan.models.call import LayerCall
from longspan.registry import Refused


class Narrow(Protocol):
    """Says which of the chosen tokens are still recomputed in a layer."""

    def __call__(self, layer: int, change: Float[Tensor, " m"], active: Bool[Tensor, " m"]) -> Bool[Tensor, " m"]: ...


@dataclass(eq=False)
class Fused:
    """The cache of a whole prompt after repair, and what the model says of its last tokens."""

    ids: Int[Tensor, " M"]
    k: list[Float[Tensor, "1 H M D"]]
    v: list[Float[Tensor, "1 H M D"]]
    logits: Float[Tensor, "last V"]
    recomputed: Int[Tensor, " m"]
    """Context positions that were recomputed, ascending."""
    layer_counts: list[int] = field(default_factory=list)
    """How many of them each layer replaced."""


def repair(model: nn.Module, context: Assembled, chosen: Int[Tensor, " m"], suffix: Sequence[int] | Int[Tensor, " n"], *,
           last: int = 1, narrow: Narrow | None = None) -> Fused:
    """Recompute the chosen context tokens and read the suffix.

    Args:
        chosen: positions in the context, in any order.
        suffix: tokens that follow the context; at least one.
        last: tokens at the end whose logits are wanted.
        narrow: asked in every layer which of the chosen tokens (in the order given) are still replaced.

    Raises:
        Refused: the model changed its rotary frequencies for a prompt of this length.
        ValueError: positions outside the context, twice the same, or in the prefix; no suffix.
    """
    N, device = len(context), context.k.device
    chosen, tail = chosen.to(device), torch.as_tensor(suffix, device=device)
    if not len(tail):
        raise ValueError("repair needs at least one token after the context")
    if len(chosen) and (int(chosen.min()) < context.prefix or int(chosen.max()) >= N or len(chosen.unique()) < len(chosen)):
        raise ValueError(f"chosen positions must be distinct and in [{context.prefix}, {N})")
    positions = torch.cat([chosen, torch.arange(N, N + len(tail), device=device)])
    stage = _Repair(context, positions, len(tail), narrow)
    logits = forward(model, stage, torch.cat([context.ids[chosen], tail]), positions, last=last)
    assert logits is not None
    if rotary_digest(parts_of(model)) != context.rotary:
        raise Refused(f"this model turns keys by other rotary parameters in a prompt of {N + len(tail)} tokens than in the "
                      "documents read alone, so their caches can't be joined; use the recipe full, or fewer documents.")
    return Fused(torch.cat([context.ids, tail]), stage.k, stage.v, logits, chosen.sort().values, stage.counts)


class _Repair:
    def __init__(self, context: Assembled, positions: Int[Tensor, " T"], n: int, narrow: Narrow | None) -> None:
        self.context, self.positions, self.n, self.narrow = context, positions, n, narrow
        self.active = torch.ones(len(positions) - n, dtype=torch.bool, device=positions.device)
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.counts: list[int] = []

    def attend(self, call: LayerCall) -> Tensor:
        k, v = (self._room(t[call.layer]) for t in (self.context.k, self.context.v))
        at = self.positions
        if self.narrow is not None:
            m = len(self.active)
            change = (call.k[0, :, :m].float() - k[0, :, at[:m]].float()).abs().sum((0, 2))
            self.active = self.active & self.narrow(call.layer, change, self.active)
        write = torch.cat([self.active, self.active.new_ones(self.n)])
        k[:, :, at[write]], v[:, :, at[write]] = call.k[:, :, write], call.v[:, :, write]
        self.k.append(k)
        self.v.append(v)
        self.counts.append(int(self.active.sum()))
        return attend_at(call, k, v, at)

    def _room(self, held: Float[Tensor, "H N D"]) -> Float[Tensor, "1 H M D"]:
        """A copy with room for the suffix: what was joined stays as it is, for the next question."""
        H, N, D = held.shape
        made = held.new_empty(1, H, N + self.n, D)
        made[0, :, :N] = held
        return made


def deviations(model: nn.Module, context: Assembled, layer: int) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N D"]]:
    """Keys and values that every context token would have in `layer` if all of the context were read there and below."""
    stage = _Deviation(layer)
    forward(model, stage, context.ids, torch.arange(len(context)))
    assert stage.found is not None
    return stage.found


class _Deviation:
    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.found: tuple[Tensor, Tensor] | None = None

    def attend(self, call: LayerCall) -> Tensor:
        if call.layer == self.layer:
            self.found = call.k[0], call.v[0]
            raise Enough
        return attend_at(call, call.k, call.v, call.positions[0])


def fill(cache: RecipeCache, fused: Fused) -> RecipeCache:
    """Put a fused cache into a fresh one of a recipe's run, which goes on from there as if it had read the prompt."""
    M, device = len(fused.ids), fused.k[0].device
    for layer, k, v in zip(cache.layers, fused.k, fused.v):
        if isinstance(layer, PolicyLayer):
            layer.load_state({"k": k, "v": v, "positions": torch.arange(M, device=device)[None],
                              "counts": torch.tensor([M, 0])}, M, DenseLayer.__name__)
            layer.compress()
        else:
            assert isinstance(layer, SlidingLayer)
            layer.update(k, v)
    return cache
