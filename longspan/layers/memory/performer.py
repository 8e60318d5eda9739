"""Performer: softmax attention estimated with positive random features, read as linear attention (FAVOR+).

With x scaled by d^(-1/4) and m random directions w_r,

    phi(x)_r = exp(w_r.x - |x|^2 / 2) / sqrt(m),     E[phi(q).phi(k)] = exp(q.k / sqrt(d))

so that softmax attention is, on average over the directions, linear attention with these features (arXiv:2009.14794,
Lemma 1). Directions are Gaussian, orthogonal in blocks of d and as long as Gaussian ones, which lowers the variance. They
are drawn once from a seed and saved with the weights.

The exponentials need something subtracted, which the division by the sum of weights takes out again. For a query its own
largest exponent will do. The published choice for keys, the largest of all, can't be known before the last key is read, and
would differ with the cut of the text. Here it is the largest of the keys *so far*, kept in the state: when it grows, the
memory fades by the difference. That is the decay of `linear_loop` and `linear_chunked`, so whole sequences, chunks and
single tokens compute the same numbers, no later key touches an earlier row, and nothing overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.layers.base import Mixer
from longspan.layers.context import Context
from longspan.layers.memory.linear import LinearAttention, LinearModule, LinearState, linear_chunked, linear_loop
from longspan.layers.state import MixerState
from longspan.registry import knob, method


def orthogonal_directions(m: int, d: int, generator: torch.Generator) -> Float[Tensor, "m d"]:
    """`m` directions in `d` dimensions: each Gaussian, those of a block of `d` orthogonal to each other. Float64."""
    blocks = torch.randn(math.ceil(m / d), d, d, generator=generator, dtype=torch.float64)
    turned, upper = torch.linalg.qr(blocks)
    turned = turned * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # else the rotations would not be uniform
    lengths = torch.randn(m, d, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return turned.mT.reshape(-1, d)[:m] * lengths


def log_features(x: Float[Tensor, "*n D"], directions: Float[Tensor, "m D"]) -> Float[Tensor, "*n m"]:
    """log phi(x), with the scaling of `x` by D^(-1/4)."""
    x = x * x.shape[-1] ** -0.25
    return x @ directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2 - math.log(len(directions)) / 2


def running_max(x: Float[Tensor, "B G T"], document: Int[Tensor, "B T"] | None = None) -> Float[Tensor, "B G T"]:
    """The largest entry up to each token, of its own document only: in log2(T) steps of twice the reach."""
    if document is None:
        return x.cummax(-1).values
    reach = 1
    while reach < x.shape[-1]:
        same = document[:, None, reach:] == document[:, None, :-reach]
        before = x[..., :-reach].masked_fill(~same, -math.inf)
        x = torch.cat((x[..., :reach], torch.maximum(x[..., reach:], before)), -1)
        reach *= 2
    return x


def rescaled(
    logs: Float[Tensor, "B G T m"], top: Float[Tensor, "B G"] | None, starts: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B G T m"], Float[Tensor, "B G T"], Float[Tensor, "B G"]]:
    """Features of keys over e^M, the log-decay M_{t-1} - M_t, and the last M: the largest exponent so far.

    `logs` is -inf for padding; `top` is M of the tokens before. A document starts without one. M has no gradient: it
    cancels.
    """
    largest = logs.detach().amax(-1)
    before = torch.full_like(largest[..., :1], -math.inf) if top is None else top[..., None]
    document = None if starts is None else F.pad(starts.cumsum(1), (1, 0))
    running = running_max(torch.cat((before, largest), -1), document)
    now, earlier = running[..., 1:], running[..., :-1]
    fresh = torch.isneginf(earlier) if starts is None else torch.isneginf(earlier) | starts[:, None]
    decay = (earlier - now).masked_fill(fresh, 0.0)
    shift = now.masked_fill(torch.isneginf(now), 0.0)
    return (logs - shift[..., None]).exp(), decay, running[..., -1].clone()  # a view would keep them all


@dataclass(eq=False)
class PerformerState(LinearState):
    """The memory matrix, in units of e^top."""

    top: Float[Tensor, "B G"]
    """The largest exponent of a key of the current document; -inf before there was one."""


class PerformerModule(LinearModule):
    """Projections, positions, random features and the recurrence; normalised by the sum of the weights."""

    directions: Tensor

    def __init__(self, knobs: Performer, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int):
        plain = LinearAttention(chunk=knobs.chunk)  # type: ignore[call-arg]
        super().__init__(plain, dim, n_heads, n_kv_heads, head_dim)
        generator = torch.Generator().manual_seed(knobs.seed + layer)
        self.register_buffer("directions", orthogonal_directions(knobs.features, head_dim, generator).float())
        self.group = n_heads // n_kv_heads

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], PerformerState]:
        assert state is None or isinstance(state, PerformerState)
        B, T = x.shape[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k, v = (p(x).view(B, T, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if ctx.position.per_query_head:
            k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        q, k = ctx.position.rotate(q, k, ctx.position.places(x, ctx))
        with torch.autocast(x.device.type, enabled=False):
            q, k = (log_features(t.to(wide), self.directions) for t in (q, k))
            if ctx.valid is not None:
                k = k.masked_fill(~ctx.valid[:, None, :, None], -math.inf)
            q = (q - q.detach().amax(-1, keepdim=True)).exp()
            k, decay, top = rescaled(k, None if state is None else state.top, ctx.starts)
            v = torch.cat((v.to(wide), torch.ones_like(v[..., :1], dtype=wide)), -1)
            memory = None if state is None else state.memory
            if T == 1:
                out, memory = linear_loop(q, k, v, decay, memory, ctx.starts)
            else:
                out, memory = linear_chunked(q, k, v, decay, memory, ctx.starts, self.knobs.chunk)
            out = out[..., :-1] / out[..., -1:].clamp(min=torch.finfo(wide).tiny)
            if ctx.valid is not None:
                out = out.masked_fill(~ctx.valid[:, None, :, None], 0.0)
        return self.o_proj(out.transpose(1, 2).flatten(2).to(x.dtype)), PerformerState(memory, top)


@method("performer", kind="mixer", paper="arXiv:2009.14794", capabilities=("trains",),
        summary="Softmax attention estimated with random features; constant memory at any length.")
class Performer(Mixer):
    """Causal FAVOR+ attention."""

    features: int = knob(64, "random directions; more are nearer to softmax", low=1)
    seed: int = knob(0, "draws the directions; each layer has its own", low=0)
    chunk: int = knob(64, "tokens read at once while training and prefilling", low=1)

    positions: ClassVar[frozenset[str]] = frozenset({"rotate"})

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> PerformerModule:
        return PerformerModule(self, dim, n_heads, n_kv_heads, head_dim, layer)
