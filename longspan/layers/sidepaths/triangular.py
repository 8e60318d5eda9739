"""The causal triangular filter of TRSP (arXiv:2607.20484): a moving average of a moving average.

Sums over a window of any length are made by doubling in float32: of sums over n tokens, sums over 2n. A difference of two
prefix sums says the same but loses digits as texts grow, and needs care where documents meet.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.layers.sidepaths.line import earlier
from longspan.registry import Refused


def bandwidth(layer: int, length: int) -> int:
    """b = min(2^layer, L_ctx). `Refused` for a length that is no whole number of at least 1."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise Refused(f"L_ctx={length!r}: expected a whole number of at least 1, such as the tokens of the text.")
    return min(2**layer, length)


def box(x: Float[Tensor, "B T C"], window: int, first: Int[Tensor, "B T"] | None = None) -> Float[Tensor, "B T C"]:
    """The sum over the last `window` tokens divided by `window`, in float32 (float64 for float64 input).

    `first` says in which column each token's document begins; nothing before it is summed. Raises ValueError for a rank
    other than 3 and `Refused` for a window below 1.
    """
    if x.ndim != 3:
        raise ValueError(f"a moving average takes hidden states (B,T,C), got {tuple(x.shape)}")
    if window < 1:
        raise Refused(f"W={window}: expected a window of at least 1 token.")
    return window_sums(wide(x), window, first) / window


def tri_box(x: Float[Tensor, "B T C"], window: int, first: Int[Tensor, "B T"] | None = None) -> Float[Tensor, "B T C"]:
    """box_W(box_W(x)): the causal triangular kernel `taps` of support 2W - 1. Arguments and errors are those of `box`."""
    return box(box(x, window, first), window, first)


def taps(window: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Float[Tensor, " n"]:
    """The kernel of `tri_box` by lag u = 0..2W-2: min(u + 1, 2W - 1 - u) / W^2."""
    lags = torch.arange(2 * window - 1, dtype=dtype, device=device)
    return torch.minimum(lags + 1, 2 * window - 1 - lags) / window**2


def window_sums(x: Float[Tensor, "B T C"], window: int, first: Int[Tensor, "B T"] | None = None) -> Float[Tensor, "B T C"]:
    """Sums over the last `window` tokens, those of the token's own document where `first` says where that begins."""
    if window >= x.shape[1]:
        if first is None:
            return x.cumsum(1)
        window = x.shape[1]
    # A window is put together from windows of 1, 2, 4, … tokens, the binary digits of its length.
    part, size, total, reach = x, 1, None, 0
    while True:
        if window & size:
            total = part if total is None else total + earlier(part, reach, first)
            reach += size
        if 2 * size > window:
            assert total is not None
            return total
        part = part + earlier(part, size, first)
        size *= 2


def newest_tri_box(line: Float[Tensor, "B S C"], window: int) -> Float[Tensor, "B 1 C"]:
    """The last row of `tri_box`, as one weighted sum."""
    lags = torch.arange(line.shape[1] - 1, -1, -1, device=line.device, dtype=line.dtype)
    weights = torch.minimum(lags + 1, 2 * window - 1 - lags).clamp(min=0) / window**2
    return torch.einsum("s,bsc->bc", weights, line)[:, None]


def wide(x: Tensor) -> Tensor:
    """In float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
