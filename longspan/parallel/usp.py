"""Ulysses or untied Ulysses inside a node, a ring across nodes: the hybrid of both exchanges.

The ranks form a grid. Neighbours exchange heads; each then holds a longer stretch of the sequence for its share of the
heads, and keys and values of that share travel around the ring of ranks with the same share (USP, arXiv:2405.07719).
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from longspan.parallel.account import Account, Shape
from longspan.parallel.base import ContextParallel, HeadExchange, Job, Weights
from longspan.parallel.comm import Communicator
from longspan.parallel.engine import Engine
from longspan.parallel.ring_engine import ORDERS, around, ring_places
from longspan.parallel.ulysses import Ulysses
from longspan.registry import Refused, knob, method


@method("usp", kind="parallel", paper="arXiv:2405.07719",
        summary="Heads are exchanged inside groups of ranks, keys and values travel around a ring of groups.")
class USP(ContextParallel):
    """`ring` groups; with ring=1 the inner method alone."""

    inner: HeadExchange = knob(default_factory=Ulysses, help="how heads are exchanged: ulysses or upipe", kind="parallel")
    ring: int = knob(default=2, help="ranks of a ring, which is the number of groups that exchange heads", low=1)
    order: str = knob(default="zig-zag", help="which pieces of the sequence a group holds", choices=ORDERS)

    def check(self) -> None:
        if not isinstance(self.inner, HeadExchange):
            raise Refused(f"usp(inner={self.inner}): expected a method that exchanges heads, such as ulysses or upipe.")

    def places(self, length: int, ranks: int) -> list[Int[Tensor, " s"]]:
        inner = self._inner_ranks(ranks)
        return [piece for group in ring_places(length, self.ring, self.order) for piece in self._cut(group, inner)]

    def engine(self, comm: Communicator, causal: bool, documents: tuple[int, ...]) -> Engine:
        return around(comm.grid(self.ring)[1], causal, self.order, documents, self.card.name)

    def head_group(self, comm: Communicator) -> Communicator:
        return comm.grid(self.ring)[0]

    def check_heads(self, heads: int, kv_heads: int, ranks: int) -> None:
        self.inner.check_heads(heads, kv_heads, self._inner_ranks(ranks))

    def run(self, x: Float[Tensor, "B s D"], weights: Weights, job: Job) -> Float[Tensor, "B s D"]:
        return self.inner.run(x, weights, job)

    def account(self, shape: Shape, ranks: int) -> Account:
        deal = self.inner.deal(shape.heads, shape.kv_heads, self._inner_ranks(ranks))
        return self.inner.account_of(shape, deal, self.ring)

    def _inner_ranks(self, ranks: int) -> int:
        if ranks % self.ring:
            raise Refused(f"usp(ring={self.ring}) doesn't divide P={ranks} ranks; expected a divisor, such as ring=1.")
        return ranks // self.ring

    @staticmethod
    def _cut(group: Tensor, inner: int) -> list[Tensor]:
        if len(group) % inner:
            raise Refused(f"a group's {len(group)} positions don't divide over its {inner} ranks; expected a multiple.")
        return list(group.chunk(inner))
