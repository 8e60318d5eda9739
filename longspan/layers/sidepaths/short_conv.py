"""A short convolution beside attention: every channel sees the last few tokens directly.

y_t = sum_{u=0}^{K-1} w_u * x_{t-u} per channel, causal and depthwise, on the layer's normalised input. It gives a layer
the neighbours' content without spending a head on it, as recurrent mixers do on their queries and keys (H3,
arXiv:2212.14052). The weights start at zero, so a model begins as if it weren't there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.layers.base import SidePath, SidePathModule
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import knob, method


@dataclass(eq=False)
class ConvState(MixerState):
    """The last K - 1 real inputs of the current document, zeros where there were fewer."""

    inputs: Float[Tensor, "B K1 C"]


class ShortConvModule(SidePathModule):
    """Depthwise causal convolution over the real tokens of a document."""

    def __init__(self, dim: int, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.zeros(dim, kernel))

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], ConvState]:
        assert state is None or isinstance(state, ConvState)
        B, T, C = x.shape
        past = x.new_zeros(B, self.kernel - 1, C) if state is None else state.inputs.to(x.dtype)
        line = torch.cat((past, x), 1)
        if ctx.valid is None and ctx.starts is None:
            taps = self.weight.to(x.dtype).flip(1)[:, None]  # conv1d multiplies the oldest input by its first tap
            out = F.conv1d(line.transpose(1, 2), taps, groups=C).transpose(1, 2)
            return out, ConvState(line[:, T:].clone())  # a view would keep the whole line
        return self._with_gaps(x, line, ctx)

    def _with_gaps(self, x: Tensor, line: Tensor, ctx: Context) -> tuple[Tensor, ConvState]:
        """Padding anywhere and packed documents: each tap is gathered from where the u-th real token before stands."""
        (B, T, _), K1 = x.shape, self.kernel - 1
        valid = torch.ones(B, T, dtype=torch.bool, device=x.device) if ctx.valid is None else ctx.valid
        count = torch.zeros_like(valid, dtype=torch.long) if ctx.starts is None else ctx.starts.cumsum(1)
        # The K - 1 inputs of earlier calls stand first, as real tokens of the document we come from (number 0).
        document = F.pad(count, (K1, 0))
        slots, ranks = _slots(F.pad(valid, (K1, 0), value=True))
        out = torch.zeros_like(x)
        for u in range(self.kernel):
            source = slots.gather(1, (ranks[:, K1:] - u).clamp(min=0))
            same = document.gather(1, source) == count
            out = out + _take(line, source) * same[..., None] * self.weight[:, u].to(x.dtype)
        newest = torch.arange(-K1, 0, device=x.device) + ranks[:, -1:] + 1
        source = slots.gather(1, newest)
        kept = _take(line, source) * (document.gather(1, source) == document[:, -1:])[..., None]
        return out * valid[..., None], ConvState(kept)


def _slots(valid: Bool[Tensor, "B S"]) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Where the r-th real token stands (column r), and the rank of the last real token up to each slot."""
    ranks = valid.cumsum(1) - 1
    slots = (~valid).int().argsort(dim=1, stable=True)
    return slots, ranks


def _take(line: Float[Tensor, "B S C"], source: Int[Tensor, "B T"]) -> Float[Tensor, "B T C"]:
    return line.gather(1, source[..., None].expand(-1, -1, line.shape[-1]))


@method("short-conv", kind="side-path", paper="arXiv:2212.14052", capabilities=("trains",),
        summary="Causal depthwise convolution over the last few tokens, beside the mixer.")
class ShortConv(SidePath):
    """Add a learned weighting of the last `kernel` inputs, channel by channel."""

    kernel: int = knob(4, "tokens seen, the current one included", low=1)

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> ShortConvModule:
        return ShortConvModule(dim, self.kernel)
