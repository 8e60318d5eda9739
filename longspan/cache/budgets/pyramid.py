"""PyramidKV: early layers keep more, late layers less, the mean stays."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import Budget, LayerContext, top_mask
from longspan.registry import knob, method


@method("pyramid", kind="budget", paper="arXiv:2406.02069", capabilities=("layer-budgets",),
        summary="Budgets that fall linearly from the first layer to the last; the mean is what was asked.")
class Pyramid(Budget):
    """The best entries of every head, with `layer_tokens` places each."""

    beta: float = knob(20.0, "steepness: the smallest layer keeps about 1/beta of the mean", low=1.0)

    def keep(self, scores: Float[Tensor, "B H S"], x: LayerContext) -> Bool[Tensor, "B H S"]:
        counts = [self.layer_tokens(int(b), int(n), x) for b, n in zip(self.tokens(x), x.seen)]
        budget: Int[Tensor, " B"] = torch.tensor(counts, device=scores.device)
        return top_mask(scores, budget[:, None].expand(scores.shape[:2]))

    def layer_tokens(self, mean: int, length: int, x: LayerContext) -> int:
        """Entries of one head of layer x.layer when `mean` is kept of `length` on average.

        The always-kept window w stands outside the slope: with C = w + mean, the last layer keeps (C-w)/beta and the
        first 2(C-w) minus that; both are clipped where the first would exceed what there is.
        """
        w = x.protected
        low = mean / self.beta
        high = 2 * mean - low
        if high >= length - w:
            high = length - w
            low = 2 * mean - high
        # Where the slope doesn't fit (a layer would keep nothing but its window), every layer keeps the mean.
        if not length >= high >= low >= max(w, 1) or x.n_layers == 1:
            return mean
        return round(high - x.layer * (high - low) / (x.n_layers - 1))
