"""Sketches of products: short random vectors whose dot products estimate those of tensor powers, without bias.

A *count sketch* throws every channel into one of D_s buckets, with a random sign (Charikar, Chen & Farach-Colton 2002):

    CS(x)_b = sum over i with h(i) = b of s(i) x_i,      E <CS x, CS y> = <x, y>

The tensor product x_1 ⊗ … ⊗ x_p has d^p entries, but its count sketch under the hash (sum_r h_r(i_r)) mod D_s and the sign
prod_r s_r(i_r) is the circular convolution of p count sketches (*TensorSketch*, Pham & Pagh 2013):

    TS(x_1, …, x_p) = irfft( prod_r rfft(CS_r x_r) ),    E <TS(x, …, x), TS(y, …, y)> = <x, y>^p

with variance at most (2 + 3^p) / D_s |x|^2p |y|^2p (Avron, Nguyen & Woodruff 2014). Hashes are drawn once from a seed and kept
as buffers. Everything is computed in float32 (float64 for float64 inputs), also under autocast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.registry import Refused


def count_sketch(x: Float[Tensor, "*B d"], buckets: Int[Tensor, "*#B d"], signs: Float[Tensor, "*#B d"], width: int
                 ) -> Float[Tensor, "*B w"]:
    """The definition: every channel times its sign, added into its bucket. Hashes may differ along leading axes."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    where = buckets.expand(wide.shape)
    return wide.new_zeros(*wide.shape[:-1], width).scatter_add(-1, where, wide * signs.to(wide.dtype))


def convolve(parts: Sequence[Float[Tensor, "*B w"]]) -> Float[Tensor, "*B w"]:
    """The circular convolution of sketches of one width: the sketch of the product of what they sketch."""
    if len(parts) == 1:
        return parts[0]
    product = torch.fft.rfft(parts[0])
    for part in parts[1:]:
        product = product * torch.fft.rfft(part)
    return torch.fft.irfft(product, n=parts[0].shape[-1])


class TensorSketch(nn.Module):
    """The sketch of x_1 ⊗ … ⊗ x_p for factors of `dims` channels, `width` = D_s buckets; hashes depend on `seed` alone.

    With one factor it is a count sketch, with different vectors a cross sketch; `power` sketches one vector's power.

    Raises:
        Refused: fewer than 2 buckets, or no factor.
    """

    def __init__(self, dims: Sequence[int], width: int, seed: int = 0):
        super().__init__()
        if width < 2:
            raise Refused(f"D_s={width}: expected at least 2 buckets, such as 64.")
        if not dims:
            raise Refused("a sketch of degree 0 is a constant; expected at least degree 1.")
        self.dims, self.width = tuple(dims), width
        draw = torch.Generator().manual_seed(seed)
        for r, d in enumerate(self.dims):
            self.register_buffer(f"buckets_{r}", torch.randint(width, (d,), generator=draw))
            self.register_buffer(f"signs_{r}", torch.randint(2, (d,), generator=draw) * 2.0 - 1.0)

    def hashes(self, r: int) -> tuple[Int[Tensor, " d"], Float[Tensor, " d"]]:
        """Bucket and sign of every channel of factor `r`."""
        return getattr(self, f"buckets_{r}"), getattr(self, f"signs_{r}")

    def factor(self, r: int, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B w"]:
        """The count sketch of factor `r`, as a product with the table of its hash: one matrix product for many rows."""
        if x.shape[-1] != self.dims[r]:
            raise ValueError(f"factor {r} of the sketch takes {self.dims[r]} channels, got {tuple(x.shape)}")
        buckets, signs = self.hashes(r)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide @ (F.one_hot(buckets, self.width) * signs[:, None]).to(wide.dtype)

    def forward(self, *factors: Float[Tensor, "*B d"]) -> Float[Tensor, "*B w"]:
        """The sketch of the product of the first ``len(factors)`` factors. Raises ValueError for too many or none."""
        if not 1 <= len(factors) <= len(self.dims):
            raise ValueError(f"the sketch takes 1 to {len(self.dims)} factors, got {len(factors)}")
        with torch.autocast(factors[0].device.type, enabled=False):
            return convolve([self.factor(r, x) for r, x in enumerate(factors)])

    def power(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B w"]:
        """The sketch of x ⊗ … ⊗ x."""
        return self(*(x,) * len(self.dims))
