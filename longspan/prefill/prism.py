"""Prism: block means of fast and of slow rotary channels are scored apart, each at its own temperature.

The mean of a block stands for its tokens, but rotary positions turn frequency j by theta_j a token, and the mean of Bs
turned copies of a vector is shorter than the vector by ``|sin(Bs theta_j / 2)| / (Bs |sin(theta_j / 2)|)``
(`pooling_gain`). Frequencies that turn a whole circle within a block almost vanish, and with them what attention by
distance (a "slash" of the map) is made of. What is left of them still has the right order, it is only small. So

1. queries and keys are pooled per block of Bs tokens;
2. two bands of channels are taken apart: the dh fastest, the dl slowest (they overlap: between is a transition);
3. each band gets the temperature at which its logits are as large as those of all channels together:
   ``tau_z = sqrt(dz/d) * RMS(q_z)/RMS(q) * RMS(k_z)/RMS(k)``;
4. ``softmax_v(q_z . k_z / (sqrt(dz) tau_z))`` over the causal blocks, in each band;
5. each row keeps the fewest blocks that hold a share p in one band, and those that do in the other;
6. the first block and the diagonal are always read.

Xinghao Wang et al., "Prism: Spectral-Aware Block-Sparse Attention" (arXiv:2602.08426).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels.plan import ReadPlan, query_slots, repeat_heads
from longspan.prefill.base import (
    ReadContext,
    Selector,
    block_sums,
    in_blocks,
    keep_top_p,
    masked_softmax,
    plan_from_blocks,
    readable,
)
from longspan.registry import Refused, knob, method

BANDS = ("dual", "high", "low", "full")
LAYOUTS = ("half", "interleaved")
SMALLEST = 1e-6
"""Least root mean square, and least temperature, that is divided by."""
STRIP = 1 << 20
"""Weights of blocks that are held at once: with 128 thousand tokens the whole map would take 4 MiB a head and band."""


# ---------------------------------------------------------------------------------------------- rotation and its bands


def pooling_gain(theta: Float[Tensor, "*F"], block: int) -> Float[Tensor, "*F"]:
    """Length of the mean of `block` copies of a unit vector, each turned by `theta` (radians) more than the one before.

    Paper: lambda_j, the attenuation of frequency j by mean pooling where content is constant. 1 for theta = 0.
    """
    half = theta.double() / 2
    gain = (block * half).sin().abs() / (block * half.sin().abs()).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(half.sin() == 0, 1.0, gain).to(theta.dtype)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How the channels of a head are rotated.

    `size` channels turn, the first ones, in pairs (j, j + size/2) for the layout "half" or (2j, 2j + 1) for
    "interleaved"; the first pairs are the fastest. `fast` of the pairs turn a whole circle or more within a block.
    """

    size: int
    layout: str
    fast: int

    def band_sizes(self) -> tuple[int, int]:
        """dh and dl, in quarters of the rotated channels.

        With c channels up to the cut-off (``Bs theta = 2 pi``), the transition ends at about 2c, where pooling leaves
        99.6 % (Bs = 128): dh is 2c and dl is all but c, rounded. That gives the paper's 64 and 96 of 128 channels for
        bases of 5e5 and 1e6, and 32 and 48 of 64 channels for 1e5.
        """
        unit = max(2, self.size // 8 * 2)
        cut = 2 * self.fast
        high, low = ((2 * wanted + unit) // (2 * unit) * unit for wanted in (2 * cut, self.size - cut))
        return min(max(high, unit), self.size), min(max(low, unit), self.size)

    def band_channels(self, dim: int, dh: int, dl: int) -> tuple[Int[Tensor, " dh"], Int[Tensor, " dl+dim-size"]]:
        """Channels of the dh/2 fastest pairs, and of the dl/2 slowest; those of `dim` that don't turn are slow."""
        pairs = torch.arange(self.size)
        pairs = pairs.view(2, -1) if self.layout == "half" else pairs.view(-1, 2).mT
        still = torch.arange(self.size, dim)
        return pairs[:, : dh // 2].flatten(), torch.cat((pairs[:, self.size // 2 - dl // 2 :].flatten(), still))


def rotation_of(x: ReadContext, block: int, size: int | None = None, layout: str | None = None) -> Rotation:
    """The rotation of a layer: the model's own, else `size` (default: all channels) and `layout` (default: "half").

    Without a model a quarter of the channels counts as before the cut-off, as in the published settings.

    Raises:
        Refused: the model rotates other channels than `size` and `layout` say, or `size` exceeds the head.
    """
    dim = x.q.shape[-1]
    if x.parts is None:
        size = dim if size is None else size
        if size % 2 or not 2 <= size <= dim:
            raise Refused(f"prism: heads of {dim} channels of which {size} rotate; expected an even number of rotated "
                          f"channels, up to the head's size, such as rotary={dim // 2 * 2}.")
        return Rotation(size, layout or "half", size // 8)
    cos, sin = x.parts.rope(torch.ones((), dtype=torch.long, device=x.k.device), x.layer)
    found = Rotation(cos.shape[-1], "half" if x.parts.pairing == "halves" else "interleaved", 0)
    if size not in (None, found.size) or layout not in (None, found.layout):
        raise Refused(f"prism(rotary={size}, rope_layout={layout}): expected {found.size} and {found.layout!r}, which is "
                      "how this model rotates, or None.")
    theta = torch.atan2(sin.float(), cos.float())  # every frequency twice, once a channel
    return dataclasses.replace(found, fast=int((theta * block > 2 * math.pi).sum()) // 2)


# ------------------------------------------------------------------------------------------------ scores of one band


def block_means(x: Float[Tensor, "B H L D"], block: int, valid: Bool[Tensor, "B L"] | None = None
                ) -> Float[Tensor, "B H N D"]:
    """Sums over the blocks' tokens divided by Bs, in float32: padding, and what the last block lacks, counts as 0."""
    return block_sums(x, block, valid) / block


def rms(x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H 1 1"]:
    """Root mean square over blocks and channels."""
    return x.square().mean((-2, -1), keepdim=True).sqrt()


def temperature(q: Float[Tensor, "B H NQ D"], k: Float[Tensor, "B H NK D"], channels: Int[Tensor, " dz"]
                ) -> Float[Tensor, "B H 1 1"]:
    """tau_z of a band of channels, per row and head, from block means: between 0 and sqrt(D/dz); 1 for all channels."""
    shares = [rms(t[..., channels]) / rms(t).clamp(min=SMALLEST) for t in (q, k)]
    return math.sqrt(len(channels) / q.shape[-1]) * shares[0] * shares[1]


def band_weights(
    q: Float[Tensor, "B H NQ D"], k: Float[Tensor, "B H NK D"], channels: Int[Tensor, " dz"],
    tau: Float[Tensor, "B H 1 1"], scale: float, mask: Bool[Tensor, "#B #H NQ NK"],
) -> Float[Tensor, "B H NQ NK"]:  # fmt: skip
    """``softmax_v(q_z . k_z / (sqrt(dz) tau_z))`` where `mask` is true; rows without any are 0.

    `scale` is the one attention itself uses, 1/sqrt(D) as a rule; another one rescales both bands alike.
    """
    factor = scale * math.sqrt(q.shape[-1] / len(channels)) / tau.clamp(min=SMALLEST)
    return masked_softmax((q[..., channels] * factor) @ k[..., channels].mT, mask)


# ----------------------------------------------------------------------------------------------------------- the method


@method("prism", kind="selector", system="prism", paper="arXiv:2602.08426",
        summary="Read the key blocks that block means of fast or of slow rotary channels point to.",
        capabilities=("block-plan", "all-queries"))
class Prism(Selector):
    """Union of two bands' top-p; first block and diagonal are always read.

    Queries and keys must carry their rotary positions: that they do can't be seen from the tensors.
    """

    p: float = knob(0.95, "share of a band's pooled attention that each row of blocks keeps", low=0, high=1)
    dh: int | None = knob(None, "channels of the fast band; None: by the rotary frequencies, 64 of 128", low=2)
    dl: int | None = knob(None, "channels of the slow band; None: by the rotary frequencies, 96 of 128", low=2)
    block: int = knob(128, "tokens per query and key block", low=1)
    calibrate: bool = knob(True, "give each band the temperature that its energy asks for, else 1")
    bands: str = knob("dual", "which bands choose: both, the fast or the slow one, or all channels as one", choices=BANDS)
    rope_layout: str | None = knob(
        None, "which channels rotate as a pair: (j, j+d/2) or (2j, 2j+1); None: as the model does", choices=LAYOUTS)
    rotary: int | None = knob(None, "channels that rotate, the first of each head; None: as the model does, else all", low=2)

    def check(self) -> None:
        if self.p <= 0:
            raise Refused(f"{self}: expected p above 0 and up to 1, such as p=0.95.")
        for name in ("dh", "dl", "rotary"):
            value = getattr(self, name)
            if value is not None and value % 2:
                raise Refused(f"{self}: {name}={value} cuts a pair of channels; expected an even number, such as {value + 1}.")

    def select(self, x: ReadContext) -> ReadPlan:
        q = block_means(x.q, self.block, x.valid_queries)
        k = repeat_heads(block_means(x.k, self.block, x.valid), x.heads)
        mask = readable(x, self.block)
        if x.valid_queries is not None:  # blocks of padding ask nothing
            mask = mask & in_blocks(x.valid_queries, self.block).any(-1)[:, None, :, None]
        bands = [(c, temperature(q, k, c) if self.calibrate else q.new_ones(1)) for c in self.channels(x)]
        _, last = query_slots(x.q_len, x.k_len, self.block)
        (B, heads, n_q), n_k = q.shape[:3], k.shape[2]
        rows, strips = max(1, STRIP // (B * heads * n_k)), []
        for start in range(0, n_q, rows):
            stop = min(start + rows, n_q)
            seen = int(last[stop - 1]) // self.block + 1  # later key blocks are closed to all these rows
            kept = [keep_top_p(band_weights(q[:, :, start:stop], k[:, :, :seen], c, tau, x.scale,
                                            mask[:, :, start:stop, :seen]), self.p) for c, tau in bands]
            strips.append(F.pad(functools.reduce(torch.bitwise_or, kept), (0, n_k - seen)))
        return plan_from_blocks(x, torch.cat(strips, 2), self.block)

    def channels(self, x: ReadContext) -> list[Int[Tensor, " dz"]]:
        """The channels of each band that chooses.

        Raises:
            Refused: dh or dl is larger than what rotates, or the model rotates otherwise than the knobs say.
        """
        dim = x.q.shape[-1]
        if self.bands == "full":
            return [torch.arange(dim, device=x.q.device)]
        rotation = rotation_of(x, self.block, self.rotary, self.rope_layout)
        sizes = [own or rule for own, rule in zip((self.dh, self.dl), rotation.band_sizes(), strict=True)]
        if max(sizes) > rotation.size:
            raise Refused(f"{self}: {rotation.size} channels of a head rotate; expected dh and dl up to {rotation.size}.")
        both = rotation.band_channels(dim, *sizes)
        wanted = {"dual": both, "high": both[:1], "low": both[1:]}[self.bands]
        return [channels.to(x.q.device) for channels in wanted]
