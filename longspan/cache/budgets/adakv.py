"""AdaKV: heads of a layer share one budget; a head with spread-out attention gets more of it."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.cache.base import Budget, LayerContext, top_mask
from longspan.registry import knob, method


@method("adakv", kind="budget", paper="arXiv:2407.11550", capabilities=("ragged",),
        summary="The best entries over all heads of a layer, with a safe share for every head.")
class AdaKV(Budget):
    """Every head first gets its best floor(alpha * B) entries, then the layer's H * B places are filled with the best
    remaining scores of all heads (Algorithm 1)."""

    scope: ClassVar[str] = "layer"
    alpha: float = knob(0.2, "share of the budget that every head is sure of", low=0.0, high=1.0)

    def keep(self, scores: Float[Tensor, "B H S"], x: LayerContext) -> Bool[Tensor, "B H S"]:
        budget = self.tokens(x)
        safe = torch.maximum((budget * self.alpha).to(torch.int64), torch.full_like(budget, x.protected))
        sure = top_mask(scores, safe[:, None].expand(scores.shape[:2]))
        lifted = scores.masked_fill(sure, torch.inf)
        return top_mask(lifted.flatten(1), budget * scores.shape[1]).view_as(sure)
