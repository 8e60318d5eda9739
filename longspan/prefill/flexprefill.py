"""FlexPrefill: each head picks its own pattern and its own budget (arXiv:2502.20766).

The exact attention of the last block of queries, pooled per key block, is compared with its cheap estimate from block
means. Where the two agree (Jensen-Shannon distance below tau) block means can be trusted, and the head is
*query-aware*: the pooled map over all rows keeps its largest entries until they hold gamma of it. Elsewhere the head is
*vertical-slash*: as many blocks of columns and of diagonals as the last queries need to cover gamma.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels.plan import ReadPlan, query_slots, repeat_heads
from longspan.prefill.base import (
    ReadContext,
    Selector,
    dense_plan,
    diagonal_sums,
    in_blocks,
    keep_top_k,
    keep_top_p,
    last_rows_attention,
    masked_softmax,
    plan_from_blocks,
    pooled,
    pooled_map,
    readable,
)
from longspan.registry import Refused, knob, method


@method("flexprefill", kind="selector", system="baselines", paper="arXiv:2502.20766",
        summary="Per head, read blocks from pooled attention or columns and diagonals, as the head's pattern asks.",
        capabilities=("block-plan", "query-window", "all-queries"))
class FlexPrefill(Selector):
    """Query-aware or vertical-slash per head; first block and diagonal are always read."""

    gamma: float = knob(0.95, "share of the attention to cover", low=0, high=1)
    tau: float = knob(0.1, "largest Jensen-Shannon distance at which block means are trusted", low=0, high=1)
    min_budget: int = knob(1024, "least tokens of columns and of diagonals to read", low=1)
    block: int = knob(128, "tokens per query and key block", low=1)

    def check(self) -> None:
        if self.gamma <= 0:
            raise Refused(f"{self}: expected gamma above 0 and up to 1, such as 0.95.")

    @property
    def dense_until(self) -> int:
        return max(2 * self.block, self.min_budget)

    def select(self, x: ReadContext) -> ReadPlan:
        if self.gamma >= 1:
            return dense_plan(x, self.block)
        attention = last_rows_attention(x, self.block)
        aware = pattern_distance(x, attention, self.block) < self.tau
        columns, offsets = attention.sum(-2), diagonal_sums(attention)
        least = math.ceil(self.min_budget / self.block)
        n_columns, n_offsets = (torch.where(aware, least, self._needed(w, least)) for w in (columns, offsets))
        chosen = column_and_diagonal_blocks(x, columns, offsets, n_columns, n_offsets, self.block)
        chosen |= aware[..., None, None] & query_aware_blocks(pooled_map(x, self.block), self.gamma)
        return plan_from_blocks(x, chosen, self.block)

    def _needed(self, weights: Float[Tensor, "B H S"], least: int) -> Int[Tensor, "B H"]:
        """Blocks for as many columns (or diagonals) as cover gamma."""
        return (keep_top_p(weights, self.gamma).sum(-1) // self.block + 1).clamp(min=least)


def pattern_distance(x: ReadContext, attention: Float[Tensor, "B Hq rows S"], block: int) -> Float[Tensor, "B Hq"]:
    """Jensen-Shannon distance between the last queries' true and estimated block weights."""
    rows = attention.shape[-2]
    queries = None if x.valid is None else x.valid[:, x.k_len - rows:]
    true = in_blocks(attention.sum(-2), block).sum(-1)
    true = true / true.sum(-1, keepdim=True).clamp(min=torch.finfo(true.dtype).tiny)
    mean = pooled(x.q[:, :, x.q_len - rows:], rows, queries)
    keys = repeat_heads(pooled(x.k, block, x.valid), x.heads)
    estimate = masked_softmax((mean @ keys.mT * x.scale)[:, :, 0], readable(x, block)[:, :, -1])
    return js_distance(true, estimate)


def js_distance(a: Float[Tensor, "... N"], b: Float[Tensor, "... N"]) -> Tensor:
    """sqrt of the Jensen-Shannon divergence in nats, with 0 log 0 = 0: from 0 to sqrt(ln 2)."""
    middle = (a + b) / 2

    def divergence(p: Tensor) -> Tensor:
        return torch.where(p > 0, p * (p / middle).log(), 0.0).sum(-1)

    return ((divergence(a) + divergence(b)) / 2).clamp(min=0).sqrt()


def query_aware_blocks(weights: Float[Tensor, "B H NQ NK"], gamma: float) -> Bool[Tensor, "B H NQ NK"]:
    """The largest entries of the whole pooled map, over all its rows, that hold at least `gamma` of its sum."""
    return keep_top_p(weights.flatten(-2), gamma).view_as(weights)


def column_and_diagonal_blocks(x: ReadContext, columns: Tensor, offsets: Tensor, n_columns: Tensor, n_offsets: Tensor,
                               block: int) -> Bool[Tensor, "B Hq NQ NK"]:
    """The key blocks with the largest column sums, for all rows, and the block diagonals with the largest sums."""
    best_columns = keep_top_k(in_blocks(columns, block).sum(-1), n_columns)
    best_diagonals = keep_top_k(in_blocks(offsets, block).sum(-1), n_offsets)
    begin, _ = query_slots(x.q_len, x.k_len, block, device=x.q.device)
    distance = (begin // block)[:, None] - torch.arange(best_columns.shape[-1], device=x.q.device)
    return best_columns[..., None, :] | (best_diagonals[..., distance.clamp(min=0)] & (distance >= 0))
