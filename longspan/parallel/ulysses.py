"""Ulysses: every rank holds a piece of the sequence, and for the time of attention all of it for a share of the heads."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.parallel.account import Account, Shape, account
from longspan.parallel.all_heads import attend_all_heads
from longspan.parallel.base import HeadExchange, Job, Weights
from longspan.parallel.heads import Deal
from longspan.registry import knob, method


@method("ulysses", kind="parallel", paper="arXiv:2309.14509",
        summary="Sequence pieces become head shares by all-to-all, attention runs whole, outputs go back.")
class Ulysses(HeadExchange):
    """The exchange part of its memory grows with all heads: 2 s d (H + 2 He) + 2 s d H elements a rank."""

    recompute: bool = knob(default=False, help="exchange queries, keys, values again in backward instead of keeping them")

    def run(self, x: Float[Tensor, "B s D"], weights: Weights, job: Job) -> Float[Tensor, "B s D"]:
        return attend_all_heads(x, weights, job, recompute=self.recompute)

    def deal(self, heads: int, kv_heads: int, ranks: int) -> Deal:
        return Deal(heads, kv_heads, ranks, heads)

    def account_of(self, shape: Shape, deal: Deal, ring: int) -> Account:
        return account(shape, deal, ring, recompute=self.recompute, staged=False)
