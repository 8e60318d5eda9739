"""What position schemes share: rotation by real-valued places, rotary frequencies, and slopes that fall over heads."""

from __future__ import annotations

import torch
from jaxtyping import Float, Real
from torch import Tensor

from longspan.registry import Refused


def inverse_frequencies(
    head_dim: int, theta: float = 10_000.0, device: torch.device | str | None = None
) -> Float[Tensor, " half"]:
    """theta^(-2r/d) for r = 0 .. d/2-1, in float64. `Refused` for an odd head dimension."""
    if head_dim % 2:
        raise Refused(f"rope: head dimension {head_dim} is odd; expected an even one, such as {head_dim + 1}.")
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    return theta ** (-steps / head_dim)


def rotate(
    x: Float[Tensor, "B H T D"], z: Real[Tensor, "*places T"], inv_freq: Float[Tensor, " half"], scale: float = 1.0
) -> Float[Tensor, "B H T D"]:
    """Turn `x` to the places `z`: (T,), (B,T) or (B,H,T), whole or real numbers, differentiable.

    Pair (r, r + half) is turned by ``z * inv_freq[r]``; channels beyond twice the frequencies stay as they are (partial
    rotary). `scale` multiplies cosine and sine (YaRN's attention factor). Whole places and float64 ones give angles in
    float64, so they stay exact at any length; other real places give angles in float32. The result has the dtype of
    `x`. Raises ValueError when shapes don't fit.
    """
    half = inv_freq.shape[-1]
    if 2 * half > x.shape[-1] or z.ndim > 3 or z.shape[-1] != x.shape[2]:
        raise ValueError(
            f"rotate expects x (B,H,T,D>={2 * half}) and places (T,), (B,T) or (B,H,T), got x {tuple(x.shape)}, "
            f"places {tuple(z.shape)}"
        )
    if z.ndim == 2:
        z = (z[:1] if z.stride(0) == 0 else z)[:, None]  # rows that share their places are computed once
    exact = not z.is_floating_point() or z.dtype == torch.float64
    wide = torch.float64 if exact else torch.float32
    angles = z.to(wide)[..., None] * inv_freq.to(device=x.device, dtype=wide)
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    first, second = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def slopes(n_heads: int) -> Float[Tensor, " H"]:
    """ALiBi's slope of every head, in float32; all positive. Raises ValueError for fewer than one head."""
    if n_heads < 1:
        raise ValueError(f"slopes needs at least one head, got {n_heads}")
    power = 1 << (n_heads.bit_length() - 1)
    wanted = _power_of_two(power) + _power_of_two(2 * power)[::2][: n_heads - power]
    return torch.tensor(wanted)


def _power_of_two(n: int) -> list[float]:
    return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
