"""Mean pooling: attention between block means decides which key blocks a query block reads.

``softmax_v(mean(Q_u) . mean(K_v) * scale)`` over the causal blocks stands for the attention weight that query block u
gives to key block v; each row keeps the blocks that hold a share p of it, or a fixed number of them. The training-free
form of SeerAttention's gate (arXiv:2410.13276) and MInference's block-sparse head (arXiv:2407.02490).
"""

from __future__ import annotations

import torch

from longspan.kernels.plan import ReadPlan
from longspan.prefill.base import ReadContext, Selector, keep_top_k, keep_top_p, plan_from_blocks, pooled_map, readable
from longspan.registry import Refused, knob, method


@method("mean-pool", kind="selector", system="baselines", paper="arXiv:2410.13276",
        summary="Read the key blocks whose mean key attracts the mean query.",
        capabilities=("block-plan", "all-queries"))
class MeanPool(Selector):
    """Top-p (or top-k) of the attention between block means; first block and diagonal are always read."""

    p: float = knob(0.95, "share of the pooled attention that each row of blocks keeps", low=0, high=1)
    k: int | None = knob(None, "keep this many blocks per row instead", low=1)
    density: float | None = knob(None, "keep this share of each row's causal blocks instead", low=0, high=1)
    block: int = knob(128, "tokens per query and key block", low=1)

    def check(self) -> None:
        if self.p <= 0 or self.density == 0:
            raise Refused(f"{self}: expected p and density above 0 and up to 1, such as p=0.95.")
        if self.k is not None and self.density is not None:
            raise Refused(f"{self}: k and density exclude each other; give one of them.")

    def select(self, x: ReadContext) -> ReadPlan:
        weights = pooled_map(x, self.block)
        if self.k is not None:
            chosen = keep_top_k(weights, self.k)
        elif self.density is not None:
            row = readable(x, self.block).sum(-1)
            chosen = keep_top_k(weights, torch.ceil(row * self.density).long().expand(weights.shape[:-1]))
        else:
            chosen = keep_top_p(weights, self.p)
        return plan_from_blocks(x, chosen, self.block)
