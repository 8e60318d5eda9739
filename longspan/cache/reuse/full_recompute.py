"""Full recompute: every token of every document is recomputed. What comes out is a plain prefill."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from longspan.cache.reuse.base import Joint, Reuse
from longspan.registry import method


@method("full-recompute", kind="reuse", summary="Recompute all of the documents: a plain prefill, as the reference.")
class FullRecompute(Reuse):
    """S is all that may be chosen."""

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        return x.context.eligible.nonzero()[:, 0]
