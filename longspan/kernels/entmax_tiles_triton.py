"""Causal α-entmax attention in tiles on a GPU: `longspan.kernels.entmax_triton`, called as `longspan.kernels.entmax_tiles` is."""

from __future__ import annotations

from jaxtyping import Float, Int, Int32
from torch import Tensor

from longspan.kernels.entmax_tiles import Forward
from longspan.kernels.entmax_triton import Kept, entmax_backward_triton, entmax_forward_triton


def forward(q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"], alpha: float, scale: float,
            varlen: Int[Tensor, " B"] | None, skip: bool, second: bool) -> Forward:
    """`longspan.kernels.entmax_tiles.forward`; o2 is always computed. Raises ValueError where Triton can't run."""
    out, kept = entmax_forward_triton(q, k, v, alpha, scale, varlen=varlen, skip=skip)
    return out, kept.mean, kept.top, kept.tau - 1, kept.words


def backward(q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"],
             grad: Float[Tensor, "B H N D"], o2: Float[Tensor, "B H N D"], top: Float[Tensor, "B H N"],
             tau: Float[Tensor, "B H N"], words: Int32[Tensor, "B H NQ NW"], alpha: float, scale: float,
             varlen: Int[Tensor, " B"] | None, skip: bool
             ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"], Float[Tensor, "B G N D"]]:
    """`longspan.kernels.entmax_tiles.backward`; the bits that `forward` gave say what is skipped."""
    return entmax_backward_triton(grad, q, k, v, Kept(top, tau + 1, o2, words), alpha, scale, varlen=varlen)
