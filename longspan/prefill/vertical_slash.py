"""Vertical-slash: whole key columns and whole diagonals, found from the last queries of the prompt.

In many heads important keys are either the same for all queries (columns) or at a fixed distance (diagonals). The exact
attention of the last 64 queries shows both: its column sums rank the columns, its sums along diagonals rank the
distances, and every query then reads the best columns and distances (MInference, arXiv:2407.02490). The first columns
and the smallest distances are always among them. Columns are read singly; a diagonal is read in the blocks it crosses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.kernels.plan import ReadPlan, query_slots
from longspan.prefill.base import (
    ReadContext,
    Selector,
    diagonal_sums,
    keep_top_k,
    last_rows_attention,
    plan_from_blocks,
)
from longspan.registry import knob, method

SCALED_TO = 131_072
"""The published numbers, 1,000 columns and 6,096 diagonals, are for prompts of this length."""
FIRST_COLUMNS, FIRST_OFFSETS = 30, 100
LEAST_COLUMNS, LEAST_OFFSETS = 30, 50


@method("vertical-slash", kind="selector", system="baselines", paper="arXiv:2407.02490",
        summary="Read the key columns and diagonals that the last queries attend to.",
        capabilities=("block-plan", "columns", "query-window"))
class VerticalSlash(Selector):
    """Top columns and top diagonals of the last queries' attention, per query head."""

    vertical: int | None = knob(None, "key columns to read; by default 1000 per 128K tokens", low=1)
    slash: int | None = knob(None, "diagonals to read; by default 6096 per 128K tokens", low=1)
    last_q: int = knob(64, "last queries whose exact attention is looked at", low=1)
    block: int = knob(64, "tokens per query and key block", low=1)

    def budgets(self, length: int) -> tuple[int, int]:
        """How many columns and diagonals a prompt of `length` tokens gets: at least 30 and 50, at most all."""
        vertical = round(1000 * length / SCALED_TO) if self.vertical is None else self.vertical
        slash = round(6096 * length / SCALED_TO) if self.slash is None else self.slash
        return min(max(vertical, LEAST_COLUMNS), length), min(max(slash, LEAST_OFFSETS), length)

    def select(self, x: ReadContext) -> ReadPlan:
        n_columns, n_offsets = self.budgets(x.k_len)
        columns, offsets = vertical_slash_scores(x, self.last_q)
        place = torch.arange(x.k_len, device=x.q.device)
        if x.valid is None:
            early = place < FIRST_COLUMNS
        else:
            early = (x.valid & (x.valid.cumsum(-1) <= FIRST_COLUMNS))[:, None]
            columns = columns.masked_fill(~x.valid[:, None], -1.0)
        best_columns = keep_top_k(columns.masked_fill(early, torch.inf), n_columns)
        best_offsets = keep_top_k(offsets.masked_fill(place < FIRST_OFFSETS, torch.inf), n_offsets)
        if x.valid is not None:
            best_columns &= x.valid[:, None]
        chosen = blocks_of_offsets(best_offsets, x.q_len, self.block)
        return plan_from_blocks(x, chosen, self.block, columns=best_columns, sink=0)


def vertical_slash_scores(x: ReadContext, last_q: int) -> tuple[Float[Tensor, "B Hq S"], Float[Tensor, "B Hq S"]]:
    """Attention of the last queries summed per key and per distance; each sums to the number of those queries."""
    attention = last_rows_attention(x, last_q)
    return attention.sum(-2), diagonal_sums(attention)


def blocks_of_offsets(offsets: Bool[Tensor, "B H S"], q_len: int, block: int) -> Bool[Tensor, "B H NQ NK"]:
    """Key blocks that hold, for at least one query of the block, a key at one of the distances `offsets`."""
    S = offsets.shape[-1]
    begin, last = query_slots(q_len, S, block, device=offsets.device)
    left = torch.arange(0, S, block, device=offsets.device)
    right = (left + block).clamp(max=S) - 1
    below = F.pad(offsets.long().cumsum(-1), (1, 0))  # entry o: chosen distances smaller than o
    near = (begin[:, None] - right).clamp(0, S)
    far = (last[:, None] - left + 1).clamp(0, S)
    return below[..., far] > below[..., near]
