"""FastKV: prune a prompt by what one middle layer looks at, and compress keys and values in every layer up to it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext
from longspan.cache.policies.pruning import PromptPruner
from longspan.registry import method


@method("fastkv", kind="policy", paper="arXiv:2502.01068", capabilities=("query-window", "drops-tokens", "across-layers"),
        summary="From a middle layer on only prompt tokens that this layer's heads attended to go on.")
class FastKV(PromptPruner):
    """The scores of layer `l_p` alone, summed over its heads, rank the tokens that go on."""

    def importance(self, x: LayerContext, scores: Float[Tensor, "B H S"]) -> Float[Tensor, "B S"]:
        return scores.sum(1)
