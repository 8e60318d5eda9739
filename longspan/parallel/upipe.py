"""Untied Ulysses: the exchange of Ulysses in stages of a few heads, whose buffers are used again.

A stage of U query heads (u a rank) projects, exchanges, attends and sends its outputs home before the next begins, so the
exchange buffers are U/H of Ulysses'. Heads are taken in an order in which stages that read the same keys follow each
other: keys and values are exchanged once a round, and no more bytes are sent than by Ulysses. Nothing of q, k, v is kept
for backward; they are computed and exchanged again, stage by stage (arXiv:2602.21196).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.parallel.account import Account, Shape, account
from longspan.parallel.all_heads import cast
from longspan.parallel.base import HeadExchange, Job, Weights
from longspan.parallel.exchange import Moved, project, project_back, send_pieces, send_whole, take_in
from longspan.parallel.heads import Deal
from longspan.registry import knob, method


@method("upipe", kind="parallel", system="upipe", paper="arXiv:2602.21196",
        summary="Ulysses in stages of a few heads: the same bytes sent, exchange buffers U/H as large.")
class UPipe(HeadExchange):
    """Small U saves memory, large U saves operations; U=H is Ulysses with recomputation."""

    U: int | None = knob(default=None, help="query heads per stage over all ranks; None: one for each rank", low=1)

    def run(self, x: Float[Tensor, "B s D"], weights: Weights, job: Job) -> Float[Tensor, "B s D"]:
        deal = self.deal(job.heads, job.kv_heads, job.comm.size)
        return _Stages.apply(x, *weights.tensors(), job.with_settings(deal=deal))

    def deal(self, heads: int, kv_heads: int, ranks: int) -> Deal:
        """The order of heads; refuses numbers that don't divide."""
        return Deal(heads, kv_heads, ranks, self.U or ranks)

    def account_of(self, shape: Shape, deal: Deal, ring: int) -> Account:
        return account(shape, deal, ring)


class _Stages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, job: Job) -> Tensor:
        comm, deal = job.comm, job.settings["deal"]
        out = comm.live.empty((*x.shape[:2], job.heads, job.head_dim), x, output=True)
        lses, keys = [], _Round(x, (wk, wv), job)
        for stage in range(deal.stages):
            q = _queries(x, wq, job, stage)
            k, v = keys.of(stage)
            o, lse = job.engine.forward(q.whole(), k.whole(), v.whole())
            back = send_whole(o, comm, f"outputs, stage {stage}")
            take_in(out, back.received, deal.queries(stage))
            lses.append(lse)
            q.free(comm)
            back.free(comm)
        keys.free()
        ctx.job = job
        ctx.save_for_backward(x, wq, wk, wv, wo, comm.live.hand_over(out), *lses)
        return out.flatten(2) @ wo.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        x, wq, wk, wv, wo, out, *lses = ctx.saved_tensors
        comm, deal = job.comm, job.settings["deal"]
        dy = dy.contiguous()
        dwo = dy.flatten(0, 1).mT @ out.flatten(0, 1).flatten(1)
        dout = (dy @ wo).view_as(out)
        dx = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        dwq, dwk, dwv = (w.new_zeros(w.shape[0] // job.head_dim, job.head_dim, w.shape[1]) for w in (wq, wk, wv))
        keys = _Round(x, (wk, wv), job)
        sums: list[Tensor] = []
        for stage in range(deal.stages):
            queries = deal.queries(stage)
            q = _queries(x, wq, job, stage)
            k, v = keys.of(stage)
            o = send_pieces(out, queries, comm, f"outputs, stage {stage}")
            do = send_pieces(dout, queries, comm, f"gradients of outputs, stage {stage}")
            dq, *dkv = job.engine.backward(do.whole(), q.whole(), k.whole(), v.whole(), o.whole(), lses[stage])
            comm.live.adopt(dq)
            sums = _added(sums, dkv, job)
            for m in (q, o, do):
                m.free(comm)
            back = send_whole(cast(dq, x.dtype, job), comm, f"gradients of queries, stage {stage}")
            project_back(back.received, x, wq, queries, job.turn, dx, dwq)
            back.free(comm)
            if (stage + 1) % deal.stages_per_round == 0:
                keys.free()
                heads = deal.sources(stage // deal.stages_per_round)
                for grad, weight, dweight, turn in zip(sums, (wk, wv), (dwk, dwv), (job.turn, None), strict=True):
                    back = send_whole(cast(grad, x.dtype, job), comm, f"gradients of keys or values, stage {stage}")
                    project_back(back.received, x, weight, heads, turn, dx, dweight)
                    back.free(comm)
                sums = []
        return dx.to(x.dtype), dwq.view_as(wq), dwk.view_as(wk), dwv.view_as(wv), dwo, None


def _queries(x: Tensor, wq: Tensor, job: Job, stage: int) -> Moved:
    heads = job.settings["deal"].queries(stage)
    return project(x, wq, heads, job.head_dim, job.turn, job.comm, f"queries, stage {stage}")


def _added(sums: list[Tensor], grads: list[Tensor], job: Job) -> list[Tensor]:
    """The gradients of a round's keys and values, summed up over its stages in float32 or wider."""
    live = job.comm.live
    for grad in grads:
        live.adopt(grad)
    if not sums:
        return [cast(grad, torch.promote_types(grad.dtype, torch.float32), job) for grad in grads]
    for total, grad in zip(sums, grads, strict=True):
        total.add_(grad)
        live.free(grad)
    return sums


class _Round:
    """Keys and values of the round that a stage belongs to, exchanged when its first stage asks for them."""

    def __init__(self, x: Tensor, weights: tuple[Tensor, Tensor], job: Job) -> None:
        self.x, self.weights, self.job = x, weights, job
        self.held: list[Moved] = []

    def of(self, stage: int) -> list[Moved]:
        job, deal = self.job, self.job.settings["deal"]
        round, first = divmod(stage, deal.stages_per_round)
        if first == 0:
            self.free()
            heads = deal.sources(round)
            self.held = [
                project(self.x, weight, heads, job.head_dim, turn, job.comm, f"{what}, round {round}")
                for weight, turn, what in zip(self.weights, (job.turn, None), ("keys", "values"), strict=True)]
        return self.held

    def free(self) -> None:
        for m in self.held:
            m.free(self.job.comm)
        self.held = []
