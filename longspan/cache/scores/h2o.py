"""H2O: keep the heavy hitters, the entries that received most attention from all queries so far, and the newest ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score, column_sums, group_mean, newest, protect
from longspan.registry import knob, method


@method("h2o", kind="score", paper="arXiv:2306.14048", capabilities=("all-queries",),
        summary="Attention received from all queries so far; part of the budget goes to the newest tokens.")
class H2O(Score):
    """Column sums of the attention matrix, accumulated as queries pass, mean over the query heads of a KV head.

    With ``normalise`` the sum is divided by the number of queries that could see the entry ("observed attention"),
    which takes away the advantage of early tokens.
    """

    recent: float = knob(0.5, "share of the budget kept for the newest tokens", low=0.0, high=1.0)
    normalise: bool = knob(False, "divide by the number of queries that can see the entry")

    def observe(self, x: LayerContext) -> None:
        """Add the attention that the new query rows give; entries that appeared since start from zero."""
        before = x.per_key.get("received")
        sums = group_mean(column_sums(x))
        if before is not None:
            sums = sums + F.pad(before, (0, sums.shape[-1] - before.shape[-1]))
        x.per_key["received"] = sums

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        received = x.per_key["received"]
        if self.normalise:
            last = x.positions.masked_fill(~x.valid, -1).amax((-1, -2), keepdim=True)
            received = received / (last - x.positions + 1).clamp(min=1)
        assert x.budget is not None
        recent = (x.budget * self.recent).to(torch.int64)
        return protect(received, newest(x, recent))
