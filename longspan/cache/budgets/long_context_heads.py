"""Long-context heads: heads whose weights suit far look-ups keep everything, all others a small share.

Which heads those are is read off the weights (`longspan.models.frequency_kernels`), before any text is seen. A KV head
is as good as the best query head that reads it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.cache.base import Budget, LayerContext, top_mask
from longspan.models.frequency_kernels import DISTANCE, RANKS, best_heads, known_head_scores
from longspan.registry import knob, method


@method("long-context-heads", kind="budget", system="long-context-heads", paper="ICML 2026, poster 65465",
        capabilities=("ragged", "layer-budgets"),
        summary="Heads whose weights suit far look-ups keep everything, as far as the budget goes; no data needed.")
class LongContextHeads(Budget):
    """Every head is sure of a share `alpha` of the mean budget B. What is left of all heads' budgets together goes to
    the heads in the order of their score: each keeps everything until nothing is left. The mean over the model is B.

    Layers that see only a sliding window keep B a head and take no part, unless all layers do.
    """

    scope: ClassVar[str] = "model"
    alpha: float = knob(0.5, "share of the budget that every head is sure of", low=0.0, high=1.0)
    score: str = knob("rps", "which score of the weights ranks the heads", choices=RANKS)
    distance: int = knob(DISTANCE, "key position minus query position at which heads are scored")
    per_layer: bool = knob(False, "rank heads by how far they stand out in their own layer (z-score)")

    def keep(self, scores: Float[Tensor, "B H S"], x: LayerContext) -> Bool[Tensor, "B H S"]:
        places, ranked = self.places(x)
        counts = [[self.head_tokens(int(mean), int(length), place, ranked, x.protected) for place in places]
                  for mean, length in zip(self.tokens(x), x.seen)]
        return top_mask(scores, torch.tensor(counts, device=scores.device))

    def head_tokens(self, mean: int, length: int, place: int | None, ranked: int, protected: int) -> int:
        """Entries of one head.

        Args:
            mean: entries a head keeps on average.
            length: tokens there are.
            place: the head's place among the `ranked` ones, 0 the best; None for one that takes no part.
            protected: entries that every head needs.
        """
        if place is None:
            return mean
        sure = min(mean, max(int(self.alpha * mean), protected, 1))
        left = (mean - sure) * ranked - place * (length - sure)
        return sure + max(0, min(left, length - sure))

    def places(self, x: LayerContext) -> tuple[list[int | None], int]:
        """For every KV head of the layer its place in the model, and how many heads are ranked."""
        parts = x.parts
        whole = [i for i in range(parts.n_layers) if parts.window(i) is None] or list(range(parts.n_layers))
        if x.layer not in whole:
            return [None] * parts.n_kv_heads, len(whole) * parts.n_kv_heads
        found = known_head_scores(parts, self.distance).by(self.score, self.per_layer)
        best = best_heads(found.unflatten(1, (parts.n_kv_heads, -1)).amax(-1)[whole])
        place = {(whole[row], head): i for i, (row, head) in enumerate(best)}
        return [place[x.layer, head] for head in range(parts.n_kv_heads)], len(best)
