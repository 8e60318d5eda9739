"""Gated attention: softmax attention whose output a sigmoid of the layer's input opens and closes.

o_h <- o_h * sigmoid(W_h x) with the normalised input x of the layer, after attention and before the output projection;
one gate a channel (elementwise) or one a head (headwise). A head that has nothing to say can be closed, which otherwise
takes an attention sink (arXiv:2505.06708).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from longspan.layers.attention.softmax import SoftmaxAttention
from longspan.layers.base import Mixer
from longspan.registry import knob, method


class GatedAttention(SoftmaxAttention):
    """Softmax attention with a sigmoid gate on each head's output."""

    def __init__(self, knobs: Gated, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        super().__init__(dim, n_heads, n_kv_heads, head_dim, knobs.window)
        width = head_dim if knobs.gate == "elementwise" else 1
        self.gate_proj = nn.Linear(dim, n_heads * width, bias=knobs.bias)

    def output(self, out: Float[Tensor, "B H T Dv"], x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        gate = self.gate_proj(x).sigmoid().unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return super().output(out * gate, x)


@method("gated", kind="mixer", paper="arXiv:2505.06708", capabilities=("trains",),
        summary="Softmax attention with a sigmoid gate on each head's output.")
class Gated(Mixer):
    """Causal softmax attention, then a gate read from the layer's input."""

    gate: str = knob("elementwise", "one gate a channel, or one a head", choices=("elementwise", "headwise"))
    bias: bool = knob(False, "give the gate a bias")
    window: int | None = knob(None, "tokens a query sees, itself included; None for all", low=1)

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> GatedAttention:
        return GatedAttention(self, dim, n_heads, n_kv_heads, head_dim)
