"""Full: keep everything, for stores that hold it in fewer bytes."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score
from longspan.registry import method


@method("full", kind="score", capabilities=("content-free", "shares-heads"),
        summary="Everything stays; alone it is the empty recipe, with a store it says how everything is held.")
class Full(Score):
    """``full(store=quantised(bits=4))`` evicts nothing and codes all entries."""

    default_budget: ClassVar[float] = 1.0

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return torch.zeros(x.valid.shape, device=x.k.device)
