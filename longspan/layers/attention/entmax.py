"""α-entmax attention: keys that matter little get a weight of exactly 0 (AdaSplash-2, arXiv:2604.15180).

p_i = entmax_α(q_i.k_j / sqrt(d) + b_ij) over the keys j that query i may see, o_i = sum_j p_ij v_j. α = 1.5 by default; α = 2 is
sparsemax, and α -> 1 softmax. Whole sequences with α = 1.5 or 2 skip the tiles of 64 x 64 scores that hold no weight; padding,
packed documents, position biases, other α and single tokens go through all scores.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.kernels.entmax import check_alpha
from longspan.kernels.entmax_attention import entmax_attention
from longspan.layers.attention.base import AttentionModule, KVState, Visible
from longspan.layers.base import Mixer
from longspan.registry import knob, method


class EntmaxAttention(AttentionModule):
    """α-entmax over the visible keys."""

    def __init__(self, alpha: float, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        super().__init__(dim, n_heads, n_kv_heads, head_dim)
        self.alpha = alpha

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H #T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        return entmax_attention(q, held.k, held.v, self.alpha, causal=visible.mask is None, mask=visible.mask, bias=bias)


@method("entmax", kind="mixer", system="adasplash2", paper="arXiv:2604.15180", capabilities=("trains",),
        summary="Attention with exact zeros, alpha-entmax instead of softmax.")
class Entmax(Mixer):
    """Weights are α-entmax of the scores; alpha=2 is sparsemax."""

    alpha: float = knob(1.5, "above 1: how sparse; 2 is sparsemax, near 1 softmax")

    def check(self) -> None:
        check_alpha(self.alpha)

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> EntmaxAttention:
        return EntmaxAttention(self.alpha, dim, n_heads, n_kv_heads, head_dim)
