"""CacheBlend: recompute the tokens whose keys deviate most from what a full prefill would give them.

All context tokens run through the layers below `check`; there fresh and cached keys are compared,

    dev[t] = sum over heads and channels of |K_fresh[t] - K_cached[t]|

and the tokens that deviate most are recomputed in all layers. (Layer 0 depends on the embedding alone, so what is chosen
at layer 1 is exact below it.) The gradual filter starts with more tokens and drops some in every higher layer, again by
their deviation there (arXiv:2405.16444).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import top_mask
from longspan.cache.reuse.base import Joint, Reuse
from longspan.cache.reuse.repair import Narrow
from longspan.registry import Refused, knob, method


@method("cacheblend", kind="reuse", paper="arXiv:2405.16444",
        summary="Recompute the document tokens whose keys deviate most from a full prefill.")
class CacheBlend(Reuse):
    """b = floor(r x eligible) tokens by deviation at one layer."""

    r: float = knob(0.15, "share of the documents' tokens to recompute, mean over layers", low=0.0, high=1.0)
    check_layer: int = knob(1, "layer at which fresh and cached keys are compared", low=0)
    squared: bool = knob(False, "sum squares of the differences, not absolute values")
    gradual: float = knob(1.0, "first share over r; it falls linearly with the layer to (2 - gradual) r", low=1.0, high=2.0)

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        if self.check_layer >= x.n_layers:
            raise Refused(f"cacheblend(check_layer={self.check_layer}): the model has {x.n_layers} layers; expected at most "
                          f"{x.n_layers - 1}.")
        count = x.budget(min(1.0, self.gradual * self.r))
        if count == 0:
            return x.context.ids.new_empty(0)
        k, _ = x.fresh(self.check_layer)
        return x.top(deviation(k, x.context.k[self.check_layer], squared=self.squared), count)

    def narrow(self, x: Joint, chosen: Int[Tensor, " m"]) -> Narrow | None:
        if self.gradual == 1.0:
            return None
        first, steps = self.check_layer, max(1, x.n_layers - 1 - self.check_layer)

        def fewer(layer: int, change: Float[Tensor, " m"], active: Bool[Tensor, " m"]) -> Bool[Tensor, " m"]:
            done = min(1.0, max(0, layer - first) / steps)
            count = min(int(active.sum()), math.floor(x.n_eligible * self.r * (self.gradual - 2 * (self.gradual - 1) * done)))
            return top_mask(change.masked_fill(~active, -torch.inf), torch.tensor(count, device=change.device))

        return fewer


def deviation(fresh: Float[Tensor, "H N D"], cached: Float[Tensor, "H N D"], *, squared: bool = False) -> Float[Tensor, " N"]:
    """How far each token's keys (or values) are from the cached ones, summed over heads and channels (float32)."""
    change = fresh.float() - cached.float()
    return (change.square() if squared else change.abs()).sum((0, 2))
