"""Leaving prompt tokens out from some layer on, inside one unchanged forward.

A policy that drops tokens chooses while a layer attends. That layer's output, and for every later layer the position
ids and rotary positions, are then gathered to the tokens that go on. Positions stay those of the whole text, and the
padding mask keeps a column for every token: the cache's layers know which of them they were given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from longspan.models.parts import Parts

PROMPT_ROWS = "prompt_rows"
"""Where a policy leaves its choice among the notes that layers share: (B,S), True for the prompt tokens that go on."""


@dataclass(frozen=True)
class Dropped:
    """Which tokens of the forward in flight the layers after `layer` compute."""

    layer: int
    rows: Int[Tensor, "B T"]
    """Their places in the forward, ascending; a row of the batch that keeps fewer starts with places that don't count."""
    real: Bool[Tensor, "B T"] | None
    """False for places that don't count; None where all do."""
    gap: int
    """Slots of the forward that later layers aren't given."""

    @classmethod
    def after(cls, layer: int, keep: Bool[Tensor, "B N"], width: int) -> Dropped:
        """Go on with the marked ones of the first N tokens, and with all that follow them in a forward of `width` tokens."""
        keep = torch.nn.functional.pad(keep, (0, width - keep.shape[1]), value=True)
        counts = keep.sum(1)
        longest = int(counts.max())
        # A stable sort: what is left out comes first, both parts in their order.
        rows = keep.to(torch.int8).argsort(dim=1, stable=True)[:, width - longest :]
        real = keep.gather(1, rows)
        return cls(layer, rows, None if bool(real.all()) else real, width - longest)

    def gather(self, t: Tensor) -> Tensor:
        """The tokens of (B,N,…) or (1,N,…) that go on, (B,T,…)."""
        rows = self.rows.to(t.device)
        t = t.expand(rows.shape[0], *t.shape[1:])
        return t.gather(1, rows.view(*rows.shape, *(1,) * (t.dim() - 2)).expand(-1, -1, *t.shape[2:]))


def watch_layers(parts: Parts, keyword: str) -> list[Callable[[], Any]]:
    """Hook the decoder layers so that they follow what the cache in `keyword` says was dropped; returns what undoes it."""
    undo: list[Callable[[], Any]] = []
    for index, layer in enumerate(parts.layers):
        if index + 1 < parts.n_layers:
            after = functools.partial(_after_layer, index, keyword)
            undo.append(layer.register_forward_hook(after, with_kwargs=True).remove)
        before = functools.partial(_before_layer, index, keyword)
        undo.append(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
    return undo


def _dropped(kwargs: dict[str, Any], keyword: str) -> Dropped | None:
    return getattr(kwargs.get(keyword), "dropped", None)


def _after_layer(index: int, keyword: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    dropped = _dropped(kwargs, keyword)
    if dropped is None or dropped.layer != index:
        return None
    return (dropped.gather(output[0]), *output[1:]) if isinstance(output, tuple) else dropped.gather(output)


def _before_layer(index: int, keyword: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    dropped = _dropped(kwargs, keyword)
    if dropped is None or dropped.layer >= index:
        return None
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_ids": dropped.gather(kwargs["position_ids"]),
                  "position_embeddings": (dropped.gather(cos), dropped.gather(sin))}
