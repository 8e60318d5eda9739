"""Differential attention: two softmax maps a head, and the second, times a learned number, is taken off the first.

A head of width 2d has two queries and keys of width d and one value of width 2d (arXiv:2410.05258):

    o = (softmax(q1 k1^T / sqrt d) - lam softmax(q2 k2^T / sqrt d)) V
    lam = exp(l_q1.l_k1) - exp(l_q2.l_k2) + lam_init,   lam_init = 0.8 - 0.6 exp(-0.3 (layer - 1)), layers from 1
    o <- (1 - lam_init) RMSNorm(o), head by head

What both maps see in common, the noise of many unimportant keys, cancels. The rows of the signed map sum to 1 - lam. The
decoder's number of heads stays as it is; each is cut in two. Both maps are one call of the fused kernel: a query whose
other half is 0 meets only its own half of the key.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Real
from torch import Tensor, nn

from longspan.layers.attention.base import AttentionModule, KVState, Visible
from longspan.layers.attention.rows import widened
from longspan.layers.attention.softmax import softmax_attention
from longspan.layers.base import Mixer, PositionModule
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import Refused, knob, method

STD, EPS = 0.1, 1e-5


def lam_init(layer: int) -> float:
    """Where lam starts in layer `layer`, counted from 0: 0.2 in the first, towards 0.8."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def differential_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    visible: Visible,
    lam: Float[Tensor, ""],
    bias: Float[Tensor, "#B #H T S"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """First map minus lam times the second, on the values; q and k hold both halves side by side. In float32 at least."""
    first, second = q.chunk(2, -1)
    none = torch.zeros_like(first)
    both = torch.stack((torch.cat((first, none), -1), torch.cat((none, second), -1)), 2).flatten(1, 2)
    bias = bias if bias is None or bias.shape[1] == 1 else bias.repeat_interleave(2, 1)
    out = widened(softmax_attention(both, k, v, visible, bias, first.shape[-1] ** -0.5)).unflatten(1, (-1, 2))
    return out[:, :, 0] - lam * out[:, :, 1]


class Halves(PositionModule):
    """A position scheme for heads of two halves: each is turned as if it were a head of its own."""

    def __init__(self, whole: PositionModule):
        super().__init__()
        self.whole = whole
        self.hooks, self.per_query_head = whole.hooks, whole.per_query_head  # type: ignore[misc]

    def places(self, x: Float[Tensor, "B T C"], ctx: Context) -> Real[Tensor, "B *heads T"]:
        return self.whole.places(x, ctx)

    def rotate(
        self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], places: Real[Tensor, "B *heads T"]
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv T D"]]:
        turned = [self.whole.rotate(*halves, places) for halves in zip(q.chunk(2, -1), k.chunk(2, -1))]
        return torch.cat([q for q, _ in turned], -1), torch.cat([k for _, k in turned], -1)

    def bias(
        self, q_places: Real[Tensor, "B *heads T"], k_places: Real[Tensor, "B *heads S"]
    ) -> Float[Tensor, "#B #H #T S"] | None:
        return self.whole.bias(q_places, k_places)


class DifferentialAttention(AttentionModule):
    """Two maps a head; lam is shared by the heads of a layer."""

    def __init__(self, knobs: Differential, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int):
        super().__init__(dim, n_heads, n_kv_heads, head_dim, knobs.window)
        half = knobs.rotated(head_dim)
        self.lam_init = lam_init(layer)
        self.lam_q1, self.lam_k1, self.lam_q2, self.lam_k2 = (nn.Parameter(torch.randn(half) * STD) for _ in range(4))
        self.norm_weight = nn.Parameter(torch.ones(head_dim)) if knobs.norm else None

    def lam(self) -> Float[Tensor, ""]:
        """How much of the second map is taken off, in float32 at least."""
        q1, k1, q2, k2 = (widened(t) for t in (self.lam_q1, self.lam_k1, self.lam_q2, self.lam_k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lam_init

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        out = differential_attention(q, held.k, held.v, visible, self.lam(), bias)
        if self.norm_weight is not None:
            out = F.rms_norm(out, out.shape[-1:], self.norm_weight.to(out.dtype), EPS) * (1.0 - self.lam_init)
        return out.to(q.dtype)

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], KVState]:
        return super().forward(x, dataclasses.replace(ctx, position=Halves(ctx.position)), state)


@method("differential", kind="mixer", paper="arXiv:2410.05258", capabilities=("trains",),
        summary="The difference of two softmax maps a head, which cancels what both see.")
class Differential(Mixer):
    """Causal differential attention; each head's queries and keys are cut into two halves."""

    norm: bool = knob(True, "RMS-normalise each head's output and multiply it by 1 - lam_init")
    window: int | None = knob(None, "tokens a query sees, itself included; None for all", low=1)

    def rotated(self, head_dim: int) -> int:
        """Half a head: each half is turned as a head of its own. `Refused` for an odd width."""
        if head_dim % 2:
            raise Refused(f"differential: heads of {head_dim} channels can't be halved; expected an even number, such as "
                          f"{head_dim + 1}.")
        return head_dim // 2

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> DifferentialAttention:
        return DifferentialAttention(self, dim, n_heads, n_kv_heads, head_dim, layer)
