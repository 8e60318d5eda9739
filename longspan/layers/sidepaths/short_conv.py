"""A short convolution beside attention: every channel sees the last few tokens directly.

y_t = sum_{u=0}^{K-1} w_u * x_{t-u} per channel, causal and depthwise, on the layer's normalised input. It gives a layer
the neighbours' content without spending a head on it, as recurrent mixers do on their queries and keys (H3,
arXiv:2212.14052). The weights start at zero, so a model begins as if it weren't there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longspan.layers.base import SidePath, SidePathModule
from longspan.layers.context import Context
from longspan.layers.sidepaths.line import Line, earlier
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
        B, _, C = x.shape
        past = x.new_zeros(B, self.kernel - 1, C) if state is None else state.inputs
        line, weight = Line.of(x, past, ctx), self.weight.to(x.dtype)
        if line.first is None:
            taps = weight.flip(1)[:, None]  # conv1d multiplies the oldest input by its first tap
            out = F.conv1d(line.tokens.transpose(1, 2), taps, groups=C).transpose(1, 2)
        else:
            whole = sum(earlier(line.tokens, u, line.first) * weight[:, u] for u in range(self.kernel))
            out = whole[:, self.kernel - 1 :]  # type: ignore[index]
        return line.back(out), ConvState(line.newest(self.kernel - 1))


@method("short-conv", kind="side-path", paper="arXiv:2212.14052", capabilities=("trains",),
        summary="Causal depthwise convolution over the last few tokens, beside the mixer.")
class ShortConv(SidePath):
    """Add a learned weighting of the last `kernel` inputs, channel by channel."""

    kernel: int = knob(4, "tokens seen, the current one included", low=1)

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> ShortConvModule:
        return ShortConvModule(dim, self.kernel)
