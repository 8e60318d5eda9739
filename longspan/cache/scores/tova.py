"""TOVA: keep what the very last query looks at, the same tokens for all heads."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score, newest, protect
from longspan.registry import method


@method("tova", kind="score", paper="arXiv:2401.06104", capabilities=("query-window", "shares-heads"),
        summary="The last query's attention, averaged over all heads; recomputed each time, nothing accumulates.")
class TOVA(Score):
    """Mean over all query heads of the last query's attention; the last token itself always stays."""

    def window_rows(self) -> int:
        return 1

    def protected(self, x: LayerContext) -> int:
        return 1

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        last = x.attention[:, :, :, -1].mean((1, 2), keepdim=False)
        return protect(last[:, None].expand(x.valid.shape), newest(x, 1))
