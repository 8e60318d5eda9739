"""Softmax attention: the standard mixer, with grouped queries, an optional sliding window and an optional sink.

o_i = sum_j softmax_j(q_i.k_j / sqrt(d) + b_ij) v_j over the keys j that query i may see (arXiv:1706.03762); query head
h reads key head h // (H/Hkv) (arXiv:2305.13245). Under a window w a query sees itself and the w - 1 tokens before it,
and the state holds no more than that.

With a sink, one learned number c_h a head enters the denominator only, p_ij = e^{s_ij} / (e^{c_h} + sum_j e^{s_ij}): a
head may attend to nothing. It is one more key that every query sees, with score c_h and value 0 (arXiv:2309.17453,
"zero sink" with c_h = 0; learned as in arXiv:2508.10925).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longspan.kernels import attend
from longspan.layers.attention.base import AttentionModule, KVState, Visible, with_visibility
from longspan.layers.base import Mixer
from longspan.registry import knob, method

NO_SINK = -1e3
"""A sink's number from which it weighs nothing; -inf would meet zeros."""


def softmax_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    visible: Visible,
    bias: Float[Tensor, "#B #H T S"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Softmax over the visible keys; the fused kernel without a dense mask wherever causality alone decides."""
    if bias is None:
        causal = visible.mask is None
        return attend(q, k, v, scale=scale, causal=causal, mask=visible.mask, return_lse=False)[0]
    mask, grouped = with_visibility(bias, visible, q.dtype), q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def sink_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    visible: Visible,
    sink: Float[Tensor, " H"],
    bias: Float[Tensor, "#B #H T S"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """Softmax attention with e^sink more in every denominator.

    Where no gradient is wanted, plain attention times the share of the visible keys, sigmoid(lse - sink), which copies no
    key. The log-sum-exp of the fused kernel has no gradient, so training takes the further key.
    """
    sink = sink.to(torch.promote_types(q.dtype, torch.float32)).clamp(min=NO_SINK)
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, sink))
    if bias is not None or trained:
        return _further_key(q, k, v, visible, sink, bias)
    out, lse = attend(q, k, v, causal=visible.mask is None, mask=visible.mask)
    return (out * (lse - sink[:, None]).sigmoid()[..., None]).to(q.dtype)


def _further_key(q: Tensor, k: Tensor, v: Tensor, visible: Visible, sink: Tensor, bias: Tensor | None) -> Tensor:
    """A key in front that meets queries in a channel of its own, where they carry the sink's number."""
    (B, H, T, D), S = q.shape, k.shape[2]
    number = (sink * D**0.5).to(q.dtype)[:, None, None].expand(B, H, T, 1)
    q, k, v = torch.cat((q, number), -1), F.pad(k, (0, 1, 1, 0)), F.pad(v, (0, 1, 1, 0))
    k[:, :, 0, -1] = 1.0
    mask = None if visible.mask is None else F.pad(visible.mask, (1, 0), value=True)
    if bias is not None:
        bias, mask = F.pad(bias, (1, 0)), F.pad(visible.full(), (1, 0), value=True)
    # Without a mask the kernel wants as many queries as keys: one in front, whose output is dropped.
    square = mask is None and T == S
    seen = Visible(T + square, S + 1, mask, visible.device)
    out = softmax_attention(F.pad(q, (0, 0, int(square), 0)), k, v, seen, bias, D**-0.5)
    return out[:, :, int(square) :, :-1]


class SoftmaxAttention(AttentionModule):
    """Softmax over the visible keys, and a learned sink if wanted; its numbers start at 0."""

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, window: int | None = None, sink: bool = False
    ):
        super().__init__(dim, n_heads, n_kv_heads, head_dim, window)
        self.sink = nn.Parameter(torch.zeros(n_heads)) if sink else None

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        if self.sink is None:
            return softmax_attention(q, held.k, held.v, visible, bias)
        return sink_attention(q, held.k, held.v, visible, self.sink, bias)


@method("softmax", kind="mixer", paper="arXiv:1706.03762", summary="Grouped-query causal softmax attention.",
        capabilities=("trains",))
class Softmax(Mixer):
    """Causal softmax attention over all tokens, or over the last `window` of them."""

    window: int | None = knob(None, "tokens a query sees, itself included; None for all", low=1)
    sink: bool = knob(default=False, help="let a learned number of each head enter the denominator: a key of value 0")

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> SoftmaxAttention:
        return SoftmaxAttention(dim, n_heads, n_kv_heads, head_dim, self.window, self.sink)
