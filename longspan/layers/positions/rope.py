"""Rotary positions: queries and keys are turned by angles that grow with their place.

Channels form pairs (r, r + d/2) (the half-split layout of Llama and transformers); pair r of a token at place z is
turned by the angle z * theta_r with theta_r = theta^(-2r/d). The product of a turned query and a turned key then
depends on the difference of their places only (RoFormer, arXiv:2104.09864). Places may be real and differ per head.
"""

from __future__ import annotations

from jaxtyping import Float, Real
from torch import Tensor

from longspan.layers.base import Position, PositionModule
from longspan.layers.positions.base import inverse_frequencies, rotate
from longspan.registry import knob, method


class RopeModule(PositionModule):
    """Rotation by fixed frequencies; holds no weights."""

    hooks = frozenset({"rotate"})

    def __init__(self, inv_freq: Float[Tensor, " half"]):
        super().__init__()
        # Float64, and out of reach of ``module.bfloat16()``: rounded frequencies would bend long distances.
        self._inv_freq = inv_freq

    def rotate(
        self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], places: Real[Tensor, "B *heads T"]
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv T D"]]:
        """Turn both; places (B,Hkv,T) are shared by the query heads of a key head."""
        if self._inv_freq.device != q.device:
            self._inv_freq = self._inv_freq.to(q.device)
        k_places = places
        if places.ndim == 3 and places.shape[1] not in (1, q.shape[1]):
            places = places.repeat_interleave(q.shape[1] // places.shape[1], 1)
        return rotate(q, places, self._inv_freq), rotate(k, k_places, self._inv_freq)


@method("rope", kind="position", paper="arXiv:2104.09864", summary="Rotary positions with one base for all layers.")
class Rope(Position):
    """Rotate queries and keys by place times theta^(-2r/d), pair by pair."""

    theta: float = knob(10_000.0, "base of the frequencies; larger turns slower", low=1.0)
    hooks = frozenset({"rotate"})

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> PositionModule:
        return RopeModule(inverse_frequencies(head_dim, self.theta))
