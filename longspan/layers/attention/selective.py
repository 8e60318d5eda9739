"""Selective attention: a token that an earlier one found useless is masked for all that follow.

Head 0's scores A_0 (before softmax) say so as well as attending (arXiv:2410.02703):

    Sel_ij = relu(A_0,ij) for the keys j before i, but the first, which is never masked
    F_ij   = sum of Sel_i'j over i' < i,      attention of every head: softmax(A - F)

There are no further weights. F only grows, so a state keeps one number a key: what all queries read so far took off it.
The first key is the first of its document, and padding selects nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.layers.attention.base import AttentionModule, KVState, Visible, who_sees_whom
from longspan.layers.attention.rows import (
    SCORES,
    averaged,
    check_call,
    recomputed,
    row_parts,
    scores_of,
    softmax_seen,
    widened,
)
from longspan.layers.base import Mixer
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import method


@dataclass(eq=False)
class SelectiveState(KVState):
    """Keys and values, what is taken off each key, and which are the first of a document."""

    taken: Float[Tensor, "B S"] | None = None
    first: Bool[Tensor, "B S"] | None = None


def selected(
    scores: Float[Tensor, "B t S"], see: Bool[Tensor, "#B t S"], first: Bool[Tensor, "B S"], start: int
) -> Float[Tensor, "B t S"]:
    """Sel of the queries that stand at keys `start`, `start` + 1, …, from head 0's scores."""
    rows, S = scores.shape[-2:]
    own = torch.arange(S, device=scores.device) == start + torch.arange(rows, device=scores.device)[:, None]
    return scores.relu().masked_fill(~see | own | first[:, None, :S], 0.0)


def accumulated(chosen: Float[Tensor, "B t S"], taken: Float[Tensor, "B S"]) -> Float[Tensor, "B t S"]:
    """F of these queries: `taken` before them, plus the Sel of the queries between."""
    return F.pad(chosen, (0, 0, 1, 0))[:, :-1].cumsum(1) + taken[:, None, : chosen.shape[-1]]


def selective_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    visible: Visible,
    first: Bool[Tensor, "B S"],
    taken: Float[Tensor, "B S"] | None = None,
    bias: Float[Tensor, "#B #H T S"] | None = None,
    most: int = SCORES,
) -> tuple[Float[Tensor, "B H T Dv"], Float[Tensor, "B S"]]:
    """Outputs, and what is taken off each key for the next query. `bias` is part of the scores. Part by part."""
    check_call(q, k, v)
    T, S = q.shape[2], k.shape[2]
    taken = widened(q).new_zeros(q.shape[0], S) if taken is None else taken
    parts = row_parts(q, k, most)

    def rows(part: slice, q: Tensor, k: Tensor, v: Tensor, taken: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scores, see = scores_of(q, k, visible, part, bias=bias)
        chosen = selected(scores[:, 0], see[:, 0], first, S - T + part.start)
        weights = softmax_seen(scores - accumulated(chosen, taken)[:, None], see)
        return averaged(weights, v), taken + F.pad(chosen.sum(1), (0, S - chosen.shape[-1]))

    outs = []
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            out, taken = recomputed(len(parts) > 1, rows, part, q, k, v, taken, bias)
            outs.append(out)
    return (torch.cat(outs, 2).to(q.dtype) if outs else q.new_zeros(*q.shape[:3], v.shape[-1])), taken


class SelectiveAttention(AttentionModule):
    """Softmax of scores less what earlier queries took off the keys."""

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], SelectiveState]:
        assert state is None or isinstance(state, SelectiveState)
        q, held, bias = self.read(x, ctx, state)
        T, first, taken = x.shape[1], first_of_document(ctx), None
        if state is not None:
            assert state.first is not None and state.taken is not None
            first, taken = torch.cat((state.first, first), 1), F.pad(state.taken, (0, T))
        out, taken = selective_attention(q, held.k, held.v, who_sees_whom(held, T, None), first, taken, bias)
        return self.output(out, x), SelectiveState(held.k, held.v, held.places, held.order, held.valid, held.segments,
                                                   taken, first)


def first_of_document(ctx: Context) -> Bool[Tensor, "B T"]:
    """True at the first real token of each document."""
    if ctx.starts is not None:
        return ctx.starts
    first = ctx.order == 0
    return first if ctx.valid is None else first & ctx.valid


@method("selective", kind="mixer", paper="arXiv:2410.02703", capabilities=("trains",),
        summary="Softmax attention in which head 0 masks tokens for all later ones.")
class Selective(Mixer):
    """Causal softmax attention whose first head also forgets, for all heads."""

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> SelectiveAttention:
        return SelectiveAttention(dim, n_heads, n_kv_heads, head_dim)
