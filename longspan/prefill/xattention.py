"""XAttention: sums over antidiagonals of small tiles stand for the attention weight of a block.

Every S x S tile of the logits is replaced by the sum along its antidiagonal, which meets every row, every column and
every diagonal pattern of the tile once. With keys grouped in order and queries in reverse order,
``k~_n = concat_s K[nS+s]`` and ``q~_n = concat_s Q[nS+S-1-s]``, that sum is the single product ``q~_m . k~_n``, so the
map at 1/S resolution costs 1/S of the full one. Its causal softmax, summed per block, ranks the key blocks; each row
keeps the fewest whose share reaches the threshold (arXiv:2503.16428).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.kernels.plan import ReadPlan
from longspan.prefill.base import (
    ReadContext,
    Selector,
    forced,
    in_blocks,
    keep_top_p,
    masked_softmax,
    plan_from_blocks,
)
from longspan.registry import Refused, knob, method

STRIP_BLOCKS = 8
"""Rows of blocks scored at once."""


@method("xattention", kind="selector", system="baselines", paper="arXiv:2503.16428",
        summary="Read the key blocks with the largest antidiagonal sums.", capabilities=("block-plan", "all-queries"))
class XAttention(Selector):
    """Threshold on antidiagonal block scores; first block and diagonal are counted first and always read."""

    stride: int = knob(8, "side of the tiles whose antidiagonals are summed", low=1)
    threshold: float = knob(0.9, "share of the estimated attention that each row of blocks keeps", low=0, high=1)
    block: int = knob(128, "tokens per query and key block", low=1)

    def check(self) -> None:
        if self.threshold <= 0:
            raise Refused(f"{self}: expected a threshold above 0 and up to 1, such as 0.9.")
        if self.block % self.stride:
            fits = max(s for s in range(1, self.stride) if self.block % s == 0)
            raise Refused(f"{self}: expected a stride that divides the block of {self.block}; the nearest is {fits}.")

    def select(self, x: ReadContext) -> ReadPlan:
        scores = antidiagonal_scores(x, self.stride, self.block)
        return plan_from_blocks(x, keep_top_p(scores, self.threshold, first=forced(x, self.block)), self.block)


def antidiagonal_scores(x: ReadContext, stride: int, block: int) -> Float[Tensor, "B Hq NQ NK"]:
    """Block sums of ``softmax_causal(q~ k~^T scale / S)``; with S = 1 the exact attention weight of each block.

    A group of keys is open to a group of queries when its first key is not after the group's last query.
    """
    (B, heads, _, D), key_heads, per = x.q.shape, x.k.shape[1], block // stride
    queries = grouped(x.q, stride, block, x.valid_queries, reverse=True)
    keys = grouped(x.k, stride, block, x.valid).mT
    starts = torch.arange(keys.shape[-1], device=x.q.device) * stride
    ends = x.k_len - x.q_len + (torch.arange(queries.shape[2], device=x.q.device) + 1) * stride - 1
    there = group_valid(x.valid, x.k_len, stride, block, x.q.device)
    asked = group_valid(x.valid_queries, x.q_len, stride, block, x.q.device)
    rows = []
    for part in torch.arange(queries.shape[2], device=x.q.device).split(STRIP_BLOCKS * per):
        seen = -(-min(int(ends[part[-1]]) + 1, x.k_len) // block) * per  # later key groups are closed to all these rows
        q = queries[:, :, part].reshape(B, key_heads, -1, stride * D)
        logits = (q @ keys[..., :seen]).view(B, heads, len(part), seen).float() * (x.scale / stride)
        mask = (starts[:seen] <= ends[part, None]) & there[:, None, None, :seen] & asked[:, None, part, None]
        weights = in_blocks(masked_softmax(logits, mask), per).sum(-1)
        scores = weights.unflatten(2, (-1, per)).sum(3)
        rows.append(F.pad(scores, (0, keys.shape[-1] // per - scores.shape[-1])))
    return torch.cat(rows, 2)


def grouped(x: Float[Tensor, "B H L D"], stride: int, block: int, valid: Tensor | None = None, *,
            reverse: bool = False) -> Float[Tensor, "B H n SD"]:
    """S neighbouring rows as one long row, in order or reversed; padding, and what fills the last block, is 0."""
    if valid is not None:
        x = x.masked_fill(~valid[:, None, :, None], 0.0)
    x = F.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, stride))
    return (x.flip(3) if reverse else x).flatten(3)


def group_valid(valid: Tensor | None, length: int, stride: int, block: int, device: torch.device) -> Tensor:
    """(B|1, n): groups with at least one token."""
    real = torch.ones(1, length, dtype=torch.bool, device=device) if valid is None else valid
    return F.pad(real, (0, -length % block)).unflatten(-1, (-1, stride)).any(-1)
