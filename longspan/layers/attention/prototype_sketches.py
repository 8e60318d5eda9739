"""Second-order structure given back to prototypes: sketches of what a mean forgets, added through learned gates.

For every degree p a prototype also holds the mean of the sketches of its keys' p-th powers. What the mean key can't know is

    z_m  = E TS_p(k) - TS_p(E k)                       for p = 2 a sketch of the keys' covariance
    zv_m = E TS(k^(p-1), v) - E TS(k^(p-1)) * TS(E v)  a sketch of the covariance of k^(p-1) and v (* is convolution)

with E the mean of the keys that the prototype holds, weighted by P. Both are 0 where all of them are equal, and zv doesn't
change when a constant is added to all values. They come from sums of sketches, so keys are looked at once. Then

    K_g = K_c + sum_p g_p W_p^K z_m,        V_g = V_c + sum_p g_p W_p^V zv_m

with gates g_p >= 0, one a head, 0 at the start. A degree whose gates are all 0 is not computed outside training. Small sketches
are noisy: D_s = 64 added raw does harm, which is why gates must be learned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.kernels.sketch import TensorSketch, convolve
from longspan.layers.attention.prototypes import Prototypes
from longspan.layers.base import LayerModule
from longspan.registry import Refused


class Enrichment(LayerModule):
    """Sketches, projections and gates of one layer, for `heads` key heads with keys of `dims` (D, Dv) channels.

    Raises:
        Refused: a degree below 2 (a mean knows the first moment), a gate below 0, or fewer than 2 buckets.
    """

    optimiser_settings = {"gates": {"weight_decay": 0.0}}

    def __init__(self, heads: int, dims: tuple[int, int], degrees: Sequence[int] = (2,), width: int = 64, seed: int = 0,
                 gate: float = 0.0):
        super().__init__()
        for p in degrees:
            if p < 2:
                raise Refused(f"degrees={list(degrees)}: expected degrees from 2 on; a mean holds the first one already.")
        if not gate >= 0:
            raise Refused(f"gate={gate}: expected 0 or more.")
        (D, Dv), self.degrees, self.width = dims, tuple(degrees), width
        self.of_keys = nn.ModuleList(TensorSketch((D,) * p, width, 1000 * seed + 2 * p) for p in self.degrees)
        self.of_values = nn.ModuleList(TensorSketch((D,) * (p - 1) + (Dv,), width, 1000 * seed + 2 * p + 1)
                                       for p in self.degrees)
        self.gates = nn.Parameter(torch.full((len(self.degrees), heads), float(gate)))
        self.to_keys = nn.Parameter(torch.randn(len(self.degrees), heads, width, D) * width**-0.5)
        self.to_values = nn.Parameter(torch.randn(len(self.degrees), heads, width, Dv) * width**-0.5)

    def active(self) -> tuple[int, ...]:
        """Numbers of the degrees that are computed: all in training, else those with an open gate."""
        if self.training:
            return tuple(range(len(self.degrees)))
        return tuple(i for i, row in enumerate(self.gates.detach()) if bool((row > 0).any()))

    def numbers(self, active: Sequence[int]) -> int:
        """How many numbers `features` makes of a key and a value."""
        return self.width * sum(2 + (self.degrees[i] > 2) for i in active)

    def features(self, k: Float[Tensor, "*B N D"], v: Float[Tensor, "*B N Dv"], active: Sequence[int]
                 ) -> Float[Tensor, "*B N F"] | None:
        """What a prototype sums of every key and value besides themselves; None when no degree is computed."""
        found: list[Tensor] = []
        for i in active:
            p, of_keys, of_values = self.degrees[i], self.of_keys[i], self.of_values[i]
            found += [of_keys(*(k,) * p), of_values(*(k,) * (p - 1), v)]
            if p > 2:  # for p = 2 the sketch of the mean key says the same
                found.append(of_values(*(k,) * (p - 1)))
        return torch.cat(found, -1) if found else None

    def enriched(self, centre: Prototypes, means: Float[Tensor, "*B G M F"], active: Sequence[int]) -> Prototypes:
        """K_g and V_g of prototypes (…,G,M,·) from the means of `features`."""
        k, v, parts = centre.k, centre.v, list(means.split(self.width, -1)) if active else []
        for i in active:
            p, of_keys, of_values = self.degrees[i], self.of_keys[i], self.of_values[i]
            z = parts.pop(0) - of_keys(*(centre.k,) * p)
            cross = parts.pop(0)
            powers = parts.pop(0) if p > 2 else of_values(centre.k)
            zv = cross - convolve((powers, of_values.factor(p - 1, centre.v)))  # type: ignore[operator]
            k = k + self._through(z, self.to_keys[i], self.gates[i])
            v = v + self._through(zv, self.to_values[i], self.gates[i])
        return Prototypes(centre.mass, k, v)

    @staticmethod
    def _through(z: Float[Tensor, "*B G M w"], weight: Float[Tensor, "G0 w D"], gate: Float[Tensor, " G0"]
                 ) -> Float[Tensor, "*B G M D"]:
        # A gate pushed below 0 is 0 in value and keeps its gradient, so that it may open again.
        gate = gate + (gate.clamp(min=0) - gate).detach()
        repeats = z.shape[-3] // len(gate)
        return z @ (gate[:, None, None] * weight).to(z.dtype).repeat_interleave(repeats, 0)
