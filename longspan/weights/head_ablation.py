"""Head ablation: silence some heads, to see whether they are the ones that matter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from longspan.models import Parts, find_parts
from longspan.models.frequency_kernels import DISTANCE, RANKS, best_heads, head_scores
from longspan.registry import Refused, knob, method
from longspan.weights.base import WeightTransform
from longspan.weights.heads import Head, silent_heads


@method("head-ablation", kind="weight-transform", system="long-context-heads", paper="ICML 2026, poster 65465",
        summary="Silence the heads best suited to far look-ups, or random ones, to see what they were good for.")
class HeadAblation(WeightTransform):
    """The heads' columns of the output projection are zero while the recipe is on."""

    heads: int = knob(10, "how many heads are silenced", low=1)
    score: str = knob("rps", "which score of the weights ranks the heads; random: none", choices=(*RANKS, "random"))
    distance: int = knob(DISTANCE, "key position minus query position at which heads are scored")
    seed: int = knob(0, "seed of the random choice", low=0)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Silence the heads until the block ends."""
        parts = find_parts(model)
        with silent_heads(parts, self.chosen(parts)):
            yield

    def chosen(self, parts: Parts) -> list[Head]:
        """The heads that are silenced."""
        every = [(layer, head) for layer in range(parts.n_layers) for head in range(parts.n_heads)]
        if self.heads > len(every):
            raise Refused(f"head-ablation(heads={self.heads}): the model has {len(every)} query heads; expected at most "
                          "that many.")
        if self.score == "random":
            return sorted(random.Random(self.seed).sample(every, self.heads))
        return best_heads(head_scores(parts, self.distance).by(self.score))[: self.heads]
