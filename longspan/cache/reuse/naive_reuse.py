"""Naive reuse: join the documents' caches and recompute nothing. The floor that every method is compared with."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from longspan.cache.reuse.base import Joint, Reuse
from longspan.registry import method


@method("naive-reuse", kind="reuse", summary="Join documents' caches and recompute nothing.")
class NaiveReuse(Reuse):
    """S is empty."""

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        return x.context.ids.new_empty(0)
