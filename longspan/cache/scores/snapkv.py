"""SnapKV: keep what the last queries of the prompt look at, smoothed along the text."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score, group_mean, newest, protect
from longspan.registry import knob, method


@method("snapkv", kind="score", paper="arXiv:2404.14469", capabilities=("query-window",),
        summary="What the last prompt queries attend to, pooled along the text; the query window itself stays.")
class SnapKV(Score):
    """Mean softmax attention of the last `window` queries, pooled over neighbours, mean over the query heads of a
    KV head. The window's own entries are always kept and count towards the budget."""

    window: int = knob(32, "prompt queries that vote, and newest entries that always stay", low=1)
    kernel: int = knob(5, "width of the pooling along the text, odd", low=1)
    pool: str = knob("mean", "how neighbours are pooled", choices=("mean", "max"))

    def check(self) -> None:
        odd_kernel(self.kernel, "snapkv")

    def window_rows(self) -> int:
        return self.window

    def protected(self, x: LayerContext) -> int:
        return self.window

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        recent = newest(x, self.window)
        votes = x.attention.mean(3)
        # The window's columns stay out of the pooling, or their large weights would leak into what lies before them.
        votes = votes.masked_fill(recent[:, :, None], 0.0)
        return protect(group_mean(smooth(votes, self.kernel, self.pool)), recent)


def smooth(votes: Float[Tensor, "B H G S"], kernel: int, pool: str) -> Float[Tensor, "B H G S"]:
    """Pool every entry with its neighbours ("same" length; zeros beyond the ends)."""
    pooling = F.avg_pool1d if pool == "mean" else F.max_pool1d
    return pooling(votes.flatten(0, 2)[:, None], kernel, stride=1, padding=kernel // 2).view(votes.shape)


def odd_kernel(kernel: int, owner: str) -> None:
    from longspan.registry import Refused

    if kernel % 2 == 0:
        raise Refused(f"{owner}(kernel={kernel}): expected an odd width, such as {kernel + 1}.")
