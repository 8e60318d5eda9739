"""KNorm: keep the keys with the smallest norm."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score
from longspan.registry import method


@method("knorm", kind="score", paper="arXiv:2406.11430", summary="Keys with a small norm attract attention: keep those.")
class KNorm(Score):
    """Minus the Euclidean norm of the key; rotary positions don't change it."""

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return -x.k.float().norm(dim=-1)
