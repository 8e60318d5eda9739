"""Ring attention as a layer: projections stay on their rank, keys and values travel."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from longspan.parallel.account import Account, Shape, account
from longspan.parallel.all_heads import attend_all_heads
from longspan.parallel.base import ContextParallel, Job, Weights
from longspan.parallel.comm import Communicator
from longspan.parallel.engine import Engine
from longspan.parallel.heads import Deal
from longspan.parallel.ring_engine import ORDERS, around, ring_places
from longspan.registry import knob, method


@method("ring-attention", kind="parallel", paper="arXiv:2310.01889",
        summary="Keys and values travel around the ranks; parts are merged by their log-sum-exps.")
class RingAttention(ContextParallel):
    """Any number of heads; sends 2 s d Hkv (P-1) elements a rank in forward."""

    order: str = knob(default="zig-zag", help="which pieces of the sequence a rank holds", choices=ORDERS)

    def places(self, length: int, ranks: int) -> list[Int[Tensor, " s"]]:
        return ring_places(length, ranks, self.order)

    def engine(self, comm: Communicator, causal: bool, documents: tuple[int, ...]) -> Engine:
        return around(comm, causal, self.order, documents, self.card.name)

    def head_group(self, comm: Communicator) -> Communicator:
        return Communicator(traffic=comm.traffic, live=comm.live, timeout=comm.timeout)

    def run(self, x: Float[Tensor, "B s D"], weights: Weights, job: Job) -> Float[Tensor, "B s D"]:
        return attend_all_heads(x, weights, job, recompute=True)

    def account(self, shape: Shape, ranks: int) -> Account:
        return account(shape, Deal(shape.heads, shape.kv_heads, 1, shape.heads), ranks, staged=False)
