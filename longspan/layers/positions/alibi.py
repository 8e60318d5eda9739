"""ALiBi: no positions in the content at all; a score loses m_h for every token between query and key.

Head h of H has the slope m_h = 2^(-8(h+1)/H) when H is a power of two; otherwise the slopes of the next smaller power
P, followed by every second slope of 2P (Press et al., arXiv:2108.12409).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Real
from torch import Tensor

from longspan.layers.base import Position, PositionModule
from longspan.layers.positions.base import slopes
from longspan.registry import method


class AlibiModule(PositionModule):
    """An additive bias that falls linearly with distance; holds no weights."""

    hooks = frozenset({"bias"})
    slopes: Tensor

    def __init__(self, n_heads: int):
        super().__init__()
        self.register_buffer("slopes", slopes(n_heads), persistent=False)

    def bias(
        self, q_places: Real[Tensor, "B *heads T"], k_places: Real[Tensor, "B *heads S"]
    ) -> Float[Tensor, "#B H T S"]:
        """-m_h (place of query - place of key); places per key head are shared by its query heads."""
        if q_places.ndim == 2 and q_places.stride(0) == 0 and k_places.stride(0) == 0:
            q_places, k_places = q_places[:1], k_places[:1]
        distance = (q_places[..., :, None] - k_places[..., None, :]).to(torch.float32)
        slope = self.slopes.float()
        if distance.ndim == 3:
            distance = distance[:, None]
        elif distance.shape[1] not in (1, len(slope)):
            distance = distance.repeat_interleave(len(slope) // distance.shape[1], 1)
        return -slope[:, None, None] * distance


@method("alibi", kind="position", paper="arXiv:2108.12409", summary="Scores fall linearly with distance, per head.")
class Alibi(Position):
    """Add -m_h times the distance to every score; the slopes are fixed."""

    hooks = frozenset({"bias"})

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> PositionModule:
        return AlibiModule(n_heads)
