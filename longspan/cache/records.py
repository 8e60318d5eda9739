"""What a layer of the cache remembers beside keys and values: sizes, notes of scores, and what may be taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from longspan.cache.base import LayerContext
from longspan.models.call import LayerCall


@dataclass
class LayerRecord:
    """What the last compression of one layer achieved."""

    seen: int
    """Slots read so far, pads included."""
    real: int
    """Real tokens read so far, summed over rows and heads."""
    kept: Int[Tensor, "B H"]
    bytes: int


@dataclass
class Notes:
    """What a policy's score noted about a layer: per held entry, and over all query rows it saw."""

    per_key: dict[str, Float[Tensor, "B H S"]] = field(default_factory=dict)
    stats: dict[str, Tensor] = field(default_factory=dict)

    def mapped(self, per_key: Callable[[Tensor], Tensor], stats: Callable[[Tensor], Tensor] = lambda t: t) -> Notes:
        return Notes({n: per_key(t) for n, t in self.per_key.items()}, {n: stats(t) for n, t in self.stats.items()})


@dataclass
class Drafts:
    """The part of the latest call that may be taken back: rows `first` on, and the layer as it was before them."""

    before: dict[str, Any]
    call: LayerCall
    first: int

    @property
    def stop(self) -> int:
        return self.call.k.shape[2]


def select_rows(x: LayerContext, rows: Int[Tensor, " R"]) -> LayerContext:
    """The context of some rows of a batch."""
    names = ["k", "v", "valid", "positions", "seen", "q", "q_valid", "q_positions"] + ["prompt"] * (x.prompt is not None)
    return replace(
        x, **{n: getattr(x, n)[rows] for n in names}, per_key={n: t[rows] for n, t in x.per_key.items()},
        stats={n: t[rows] for n, t in x.stats.items()}, hidden=None if x.hidden is None else x.hidden[rows],
    )
