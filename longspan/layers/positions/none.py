"""No positions: order reaches the model only through causality, or through what the mixer itself knows of order."""

from __future__ import annotations

from longspan.layers.base import Position, PositionModule
from longspan.registry import method


@method("nope", kind="position", paper="arXiv:2305.19466", summary="No position signal; causality alone tells order.")
class NoPositions(Position):
    """Neither rotation nor bias."""

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> PositionModule:
        return PositionModule()
