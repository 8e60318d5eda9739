"""Softmax attention: the standard mixer, with grouped queries and an optional sliding window.

o_i = sum_j softmax_j(q_i.k_j / sqrt(d) + b_ij) v_j over the keys j that query i may see (arXiv:1706.03762); query head
h reads key head h // (H/Hkv) (arXiv:2305.13245). Under a window w a query sees itself and the w - 1 tokens before it,
and the state holds no more than that.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.kernels import attend
from longspan.layers.attention.base import AttentionModule, KVState, Visible, with_visibility
from longspan.layers.base import Mixer
from longspan.registry import knob, method


class SoftmaxAttention(AttentionModule):
    """Softmax over the visible keys; the fused kernel without a dense mask wherever causality alone decides."""

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        if bias is None:
            out, _ = attend(q, held.k, held.v, causal=visible.mask is None, mask=visible.mask, return_lse=False)
            return out
        mask, grouped = with_visibility(bias, visible, q.dtype), q.shape[1] != held.k.shape[1]
        return F.scaled_dot_product_attention(q, held.k, held.v, attn_mask=mask, enable_gqa=grouped)


@method("softmax", kind="mixer", paper="arXiv:1706.03762", summary="Grouped-query causal softmax attention.",
        capabilities=("trains",))
class Softmax(Mixer):
    """Causal softmax attention over all tokens, or over the last `window` of them."""

    window: int | None = knob(None, "tokens a query sees, itself included; None for all", low=1)

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> SoftmaxAttention:
        return SoftmaxAttention(dim, n_heads, n_kv_heads, head_dim, self.window)
