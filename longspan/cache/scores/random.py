"""Random: the control that every score must beat."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score
from longspan.registry import knob, method


@method("random", kind="score", summary="Uniformly random entries: the control every other score must beat.")
class Random(Score):
    """Independent uniform scores from a seed; layers and lengths get different draws, runs the same."""

    seed: int = knob(0, "seed of the draw", low=0)

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + x.layer * 1009 + int(x.seen.max()))
        return torch.rand(x.valid.shape, generator=generator).to(x.k.device)
