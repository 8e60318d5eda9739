"""VATP: what a token is worth is the attention it gets times the size of its value.

A token that many queries look at still adds little to the layer's output when its value is small; attention sinks are
of that kind, so the first tokens stay whatever their score.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan import knob, method
from longspan.cache import LayerContext, Score, group_mean, newest, oldest, protect


@method("vatp", kind="score", paper="arXiv:2406.12335", capabilities=("query-window", "values", "value-norm"),
        summary="What the last prompt queries attend to, times the L1 norm of the value.")
class VATP(Score):
    """Mean attention of the last `window` queries times the L1 norm of the value, mean over the query heads of a KV
    head. The window's own entries and the first `n_sink` tokens always stay and count towards the budget."""

    window: int = knob(32, "prompt queries that vote, and newest entries that always stay", low=1)
    n_sink: int = knob(4, "first tokens that always stay", low=0)

    def window_rows(self) -> int:
        return self.window

    def protected(self, x: LayerContext) -> int:
        return self.window + self.n_sink

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        attention = group_mean(x.attention.mean(3))
        worth = attention * x.v.float().norm(p=1, dim=-1)
        return protect(worth, newest(x, self.window) | oldest(x, self.n_sink))
