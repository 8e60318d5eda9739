"""Ring attention: keys and values travel around the ranks, and each rank adds up what its queries see of them.

Every hop gives the attention of a rank's queries over one piece of the keys, and the pieces are merged through their
log-sum-exps. Backward sends keys and values around again, together with the sums of their gradients, which are home after
as many hops as there are ranks (arXiv:2310.01889). A causal mask leaves the first ranks idle if pieces are contiguous.
In zig-zag order rank r holds pieces r and 2P-1-r of 2P: all ranks have the same number of query-key pairs, and what they
see of another rank's keys is always all of them with half of the queries, or half of them with all queries.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.kernels import merge
from longspan.parallel.comm import Communicator
from longspan.parallel.engine import Engine, Grads, WholeSequence, attention_backward, attention_forward
from longspan.registry import Refused

ORDERS = ("zig-zag", "contiguous")


def ring_places(length: int, ranks: int, order: str) -> list[Int[Tensor, " s"]]:
    """Positions each rank of a ring holds. Refuses a length that doesn't divide."""
    pieces = 2 * ranks if order == "zig-zag" else ranks
    if length % pieces:
        raise Refused(f"S={length} positions don't divide into {pieces} pieces for P={ranks} ranks in {order} order; "
                      f"expected a multiple, such as S={-(-length // pieces) * pieces} with a masked tail.")
    cut = torch.arange(length).chunk(pieces)
    if order != "zig-zag":
        return list(cut)
    return [torch.cat((cut[r], cut[pieces - 1 - r])) for r in range(ranks)]


class RingEngine:
    """Attention over keys that other ranks hold; queries and keys lie in `order`."""

    def __init__(self, comm: Communicator, causal: bool, order: str) -> None:
        self.comm, self.causal, self.order = comm, causal, order

    def forward(self, q: Float[Tensor, "B n s d"], k: Float[Tensor, "B m s d"], v: Float[Tensor, "B m s d"]
                ) -> tuple[Float[Tensor, "B n s d"], Float[Tensor, "B n s"]]:
        comm = self.comm
        kv = comm.live.adopt(torch.stack((k, v)))
        out, lse = q, q  # set by the first hop, which sees every row
        for hop in range(comm.size):
            arriving = comm.shift(kv, f"keys and values, hop {hop}") if hop < comm.size - 1 else None
            seen = self._seen(hop, q.shape[2])
            if seen is not None:
                rows, columns, causal = seen
                part = attention_forward(q[:, :, rows], kv[0][:, :, columns], kv[1][:, :, columns], causal)
                if hop == 0:
                    out, lse = part[0].to(part[1].dtype), part[1]
                else:
                    so_far = (out[:, :, rows], lse[:, :, rows])
                    out[:, :, rows], lse[:, :, rows] = merge([so_far, (part[0].to(out.dtype), part[1])])
            if arriving is not None:
                kv = self._swap(kv, arriving())
        comm.live.free(kv)
        return out.to(q.dtype), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        comm, live = self.comm, self.comm.live
        kv = live.adopt(torch.stack((k, v)))
        dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        sums, returning = kv, None
        for hop in range(comm.size):
            arriving = comm.shift(kv, f"keys and values, hop {hop}") if hop < comm.size - 1 else None
            seen = self._seen(hop, q.shape[2])
            grads: tuple[Tensor, ...] = ()
            if seen is not None:
                rows, columns, causal = seen
                dq_part, *grads_kv = attention_backward(
                    dout[:, :, rows], q[:, :, rows], kv[0][:, :, columns], kv[1][:, :, columns], out[:, :, rows],
                    lse[:, :, rows], causal)
                dq[:, :, rows] += dq_part
                grads = tuple(live.adopt(grad) for grad in grads_kv)
            if returning is None:
                sums = live.empty(tuple(kv.shape), kv, dtype=lse.dtype).zero_()
            else:
                sums = self._swap(sums, returning())
            if seen is not None:
                for total, grad in zip(sums, grads, strict=True):
                    total[:, :, columns] += grad
                live.free(*grads)
            if comm.size > 1:
                returning = comm.shift(sums, f"gradients of keys and values, hop {hop}")
            if arriving is not None:
                kv = self._swap(kv, arriving())
        live.free(kv)
        if returning is not None:
            sums = self._swap(sums, returning())
        dk, dv = sums[0].clone(), sums[1].clone()
        live.free(sums)
        return dq, dk, dv

    def _swap(self, old: Tensor, new: Tensor) -> Tensor:
        self.comm.live.free(old)
        return new

    def _seen(self, hop: int, length: int) -> tuple[slice, slice, bool] | None:
        """(queries, keys, causal) that meet at a hop; None if all those keys come later."""
        every, half = slice(None), length // 2
        if not self.causal or hop == 0:
            return every, every, self.causal
        earlier = (self.comm.rank - hop) % self.comm.size < self.comm.rank
        if self.order == "contiguous":
            return (every, every, False) if earlier else None
        return (every, slice(0, half), False) if earlier else (slice(half, None), every, False)


def around(comm: Communicator, causal: bool, order: str, documents: tuple[int, ...], name: str) -> Engine:
    """The engine of a ring; one rank has the whole sequence. Refuses packed documents on more ranks."""
    if comm.size == 1:
        return WholeSequence(causal, documents)
    if documents:
        raise Refused(f"{name}: documents={documents} can't be told apart on {comm.size} ranks of a ring; expected "
                      "documents=() or a method that exchanges heads only, such as upipe.")
    return RingEngine(comm, causal, order)


def causal_pairs(place: Int[Tensor, " s"]) -> int:
    """Query-key pairs of the causal mask whose query stands at one of these positions."""
    return int((place + 1).sum())
