"""Random: the control that every score must beat."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score
from longspan.registry import knob, method


@method("random", kind="score", summary="Uniformly random entries: the control every other score must beat.")
class Random(Score):
    """Independent uniform scores from a seed, one for every layer, head and position: the same in every run, however
    rows are batched and padded, and at every compression."""

    seed: int = knob(0, "seed of the draw", low=0, high=2**31 - 1)

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        positions = x.positions.masked_fill(~x.valid, 0).long()
        generator = torch.Generator("cpu").manual_seed(self.seed * 1009 + x.layer)
        # Position first: a longer text continues a shorter one's draw.
        draw = torch.rand(int(positions.max()) + 1, x.k.shape[1], generator=generator, device="cpu").to(x.k.device)
        return draw.T[None].expand(len(positions), -1, -1).gather(-1, positions)
