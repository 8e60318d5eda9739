"""What mean pooling does to rotary positions: how much of each frequency it leaves, and a head that it can't see.

Content that stays the same within a block is turned by its position; the block's mean keeps ``pooling_gain`` of each
frequency's length. A *slash head* attends to the block `off` blocks back by its fast frequencies alone, while the slow
ones, which the mean keeps, carry unrelated noise.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.prefill import ReadContext
from longspan.prefill.base import readable
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.prism import Prism, band_weights, block_means, pooling_gain, temperature

CONTENT, FAST_PAIRS, DIM, BASE = 3.0, 30, 128, 1e6
"""The slash head: its constant content, the pairs that hold it, its size, and the base of its frequencies."""
SKIP = 8
"""Rows of blocks that are left out at the start, where there is little to choose from."""


def prism(**knobs: Any) -> Prism:
    """The method with these knobs."""
    return Prism(**knobs)


def mean_pool(**knobs: Any) -> MeanPool:
    """What it is compared with, with these knobs."""
    return MeanPool(**knobs)


def frequencies(dim: int, base: float) -> Float[Tensor, " dim/2"]:
    """Radians per token of each pair of channels, the fastest first."""
    return base ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)


def rotated(x: Float[Tensor, "L D"], base: float, first: int = 0) -> Float[Tensor, "L D"]:
    """Rows turned by their positions, from `first` on; pairs are (j, j + D/2)."""
    turn = (first + torch.arange(len(x)))[:, None] * frequencies(x.shape[-1], base)
    cos, sin = turn.cos(), turn.sin()
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).float()


def pair_norms(x: Float[Tensor, "... D"]) -> Float[Tensor, "... D/2"]:
    """Length of each pair of channels."""
    return x.double().unflatten(-1, (2, -1)).norm(dim=-2)


def blind_spot(dim: int, base: float, block: int) -> list[dict[str, float]]:
    """Per frequency: its channel 2j, radians per token, what is left by the closed form, and what is left when measured."""
    content = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    tokens = rotated(content.expand(block, dim), base)[None, None]
    measured = pair_norms(block_means(tokens, block)[0, 0, 0]) / pair_norms(content)
    theta = frequencies(dim, base)
    return [{"channel": 2 * j, "theta": float(t), "closed_form": float(c), "measured": float(m)}
            for j, (t, c, m) in enumerate(zip(theta, pooling_gain(theta, block), measured))]


def left_by_pooling(x: Float[Tensor, "B H L D"], block: int) -> Float[Tensor, " D/2"]:
    """Per frequency: root mean square of the whole blocks' means over that of their tokens, over rows and heads."""
    whole = x[:, :, : x.shape[2] // block * block]
    tokens, means = (pair_norms(t).square().mean((0, 1, 2)) for t in (whole, block_means(whole, block)))
    return (means / tokens).sqrt()


def slash_head(off: int, noise: float, seed: int, n_blocks: int = 64, block: int = 128) -> ReadContext:
    """Queries and keys of one head in which block u should read block u - `off`."""
    draw = torch.Generator().manual_seed(seed)

    def content() -> Tensor:
        pairs = torch.randn(n_blocks, 2, DIM // 2, generator=draw) * (CONTENT * noise)
        pairs[..., :FAST_PAIRS] = CONTENT
        return pairs.flatten(-2).repeat_interleave(block, 0)

    q, k = rotated(content(), BASE), rotated(content(), BASE, first=off * block)
    return ReadContext(q[None, None], k[None, None], k[None, None], DIM**-0.5)


def found(x: ReadContext, off: int, block: int = 128) -> dict[str, float]:
    """Share of rows in which a band ranks the true block among its first two, and in which a plan reads it."""
    q, k, mask = block_means(x.q, block), block_means(x.k, block), readable(x, block)
    rows = torch.arange(off + SKIP, q.shape[2])
    rates: dict[str, float] = {}
    for name, bands in (("mean pooling", "full"), ("low band", "low"), ("high band", "high")):
        (channels,) = prism(bands=bands, block=block).channels(x)
        weights = band_weights(q, k, channels, temperature(q, k, channels), x.scale, mask)[0, 0, rows]
        above = (weights > weights.gather(-1, (rows - off)[:, None])).sum(-1)
        rates[name] = float((above < 2).double().mean())
    methods: dict[str, Any] = {"mean-pool": mean_pool(block=block), "prism": prism(block=block)}
    for name, method in methods.items():
        plan = method.plan(x)
        rates[f"{name} reads it"] = float(plan.block_map[0, 0, rows, rows - off].double().mean())
        rates[f"{name} density"] = plan.density
    return rates
