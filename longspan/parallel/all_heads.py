"""Attention with all heads exchanged at once: what Ulysses does, and a ring, whose head group is one rank.

Sequence pieces become head shares by one all-to-all each for queries, keys and values; outputs go back by another (Ulysses,
arXiv:2309.14509). In backward either what was received is still there, or it is computed and exchanged again.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.parallel.base import Job, Weights
from longspan.parallel.exchange import Moved, project, project_back, send_pieces, send_whole, take_in
from longspan.parallel.heads import Deal


def attend_all_heads(x: Float[Tensor, "B s D"], weights: Weights, job: Job, *, recompute: bool) -> Float[Tensor, "B s D"]:
    """The layer, differentiable."""
    deal = Deal(job.heads, job.kv_heads, job.comm.size, job.heads)
    return _AllHeads.apply(x, *weights.tensors(), job.with_settings(deal=deal, recompute=recompute))


class _AllHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, job: Job) -> Tensor:
        comm, recompute = job.comm, job.settings["recompute"]
        moved = _queries_keys_values(x, (wq, wk, wv), job)
        o, lse = job.engine.forward(*(m.whole() for m in moved))
        back = send_whole(o, comm, "outputs")
        if recompute:
            back.free_sent(comm)
        out = comm.live.empty((*x.shape[:2], job.heads, job.head_dim), x, output=True)
        take_in(out, back.received, job.settings["deal"].queries(0))
        kept = []
        if recompute:
            back.free(comm)
            for m in moved:
                m.free(comm)
        else:
            kept = [*_keep_received(moved, job), comm.live.hand_over(back.sent)]
            if back.sent is not back.received:
                comm.live.free(back.received)
        y = out.flatten(2) @ wo.mT
        ctx.job = job
        ctx.save_for_backward(x, wq, wk, wv, wo, comm.live.hand_over(out), lse, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        x, wq, wk, wv, wo, out, lse, *kept = ctx.saved_tensors
        comm, deal = job.comm, job.settings["deal"]
        queries = deal.queries(0)
        dy = dy.contiguous()
        dwo = dy.flatten(0, 1).mT @ out.flatten(0, 1).flatten(1)
        dout = (dy @ wo).view_as(out)
        if kept:
            q, k, v, o = (Moved(t, t) for t in kept)
            temporary = []
        else:
            q, k, v = temporary = _queries_keys_values(x, (wq, wk, wv), job)
            o = send_pieces(out, queries, comm, "outputs")
            temporary.append(o)
        dmoved = send_pieces(dout, queries, comm, "gradients of outputs")
        grads = job.engine.backward(dmoved.whole(), q.whole(), k.whole(), v.whole(), o.whole(), lse)
        for grad in grads:
            comm.live.adopt(grad)
        for m in (*temporary, dmoved):
            m.free(comm)
        dx = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        found = []
        for grad, weight, heads, turn, what in zip(
                grads, (wq, wk, wv), (queries, deal.sources(0), deal.sources(0)), (job.turn, job.turn, None), "qkv",
                strict=True):
            dw = torch.zeros(weight.shape[0] // job.head_dim, job.head_dim, x.shape[-1], dtype=weight.dtype, device=x.device)
            back = send_whole(cast(grad, x.dtype, job), comm, f"gradients of {what}")
            project_back(back.received, x, weight, heads, turn, dx, dw)
            back.free(comm)
            found.append(dw.view_as(weight))
        return dx.to(x.dtype), *found, dwo, None


def _queries_keys_values(x: Tensor, weights: tuple[Tensor, Tensor, Tensor], job: Job) -> list[Moved]:
    deal: Deal = job.settings["deal"]
    heads = (deal.queries(0), deal.sources(0), deal.sources(0))
    turn = (job.turn, job.turn, None)
    return [project(x, weights[i], heads[i], job.head_dim, turn[i], job.comm, ("queries", "keys", "values")[i])
            for i in range(3)]


def _keep_received(moved: list[Moved], job: Job) -> list[Tensor]:
    """The received buffers, which autograd keeps from now on."""
    for m in moved:
        m.free_sent(job.comm)
    return [job.comm.live.hand_over(m.received) for m in moved]


def cast(x: Tensor, dtype: torch.dtype, job: Job) -> Tensor:
    """A counted buffer in another dtype; the old one is given back."""
    if x.dtype == dtype:
        return x
    made = job.comm.live.adopt(x.to(dtype))
    job.comm.live.free(x)
    return made
