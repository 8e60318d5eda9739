"""Uniform: every head of every layer keeps the same number."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from longspan.cache.base import Budget, LayerContext, top_mask
from longspan.registry import method


@method("uniform", kind="budget", summary="The same number of tokens in every head of every layer.")
class Uniform(Budget):
    """What a score with a `budget=` of its own means."""

    shorthand: ClassVar[bool] = True

    def keep(self, scores: Float[Tensor, "B H S"], x: LayerContext) -> Bool[Tensor, "B H S"]:
        return top_mask(scores, self.tokens(x)[:, None].expand(scores.shape[:2]))
