"""L-CUBE's sequences: Gaussian, hierarchical, with a dependence on the past that is known in closed form.

L = 2^H tokens are vectors of H slots, one for each level. Level h cuts the sequence into blocks of 2^h tokens with two
halves of 2^(h-1). Each block owns

    n_h = min(half // r, max(1, round(c 2^(beta h))))

latents. A latent z joins r tokens of the left half with r of the right half in slot h: each of these slots is
sqrt(rho) z + sqrt(1 - rho) e. For r = 1 that is a pair at distance 2^(h-1) with correlation rho. All other slots are
noise of their own, and every slot is N(0, 1) by itself. So the information between two halves of the sequence grows as
L^beta, as it does in text, and no vocabulary or knowledge of the world helps.

The benchmark is "L-CUBE: Isolating Long-Context Capacity from Knowledge with Controllable Mutual Information Scaling"
(Chen et al., ICML 2026). Its generator isn't published; this is the simplest one with all the properties it states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.registry import Refused

MOST_LEVELS = 24
"""Some 17 million tokens; the tables of more would not fit into memory."""


@dataclass(frozen=True)
class LCube:
    """The settings of the benchmark, and the table of which slots belong together.

    Raises `Refused` for settings out of their range.
    """

    H: int = 6
    """Levels, and slots of a token; sequences have 2^H tokens."""
    beta: float = 0.75
    """Exponent with which the information across a cut grows, above 0 up to 1."""
    c: float = 1.0
    """Factor of the number of latents a block."""
    rho: float = 0.95
    """Correlation of two slots that share a latent, between 0 and 1."""
    r: int = 1
    """Copies of a latent in each half."""
    lowest: int = 1
    """The first level in use; the slots of those below are noise. Level h has room for 2^(h-1) copies in each half."""
    shuffle: int | None = None
    """Seed of a fixed shuffle of each level's right partners, so that distances are no powers of two; None for none."""

    def __post_init__(self) -> None:
        for name, least, most in (("H", 1, MOST_LEVELS), ("r", 1, None), ("lowest", 1, self.H)):
            _whole(name, getattr(self, name), least, most)
        for name, fits, expected in (
            ("beta", lambda v: 0 < v <= 1, "above 0 up to 1, such as 0.75"),
            ("rho", lambda v: 0 < v < 1, "between 0 and 1, both left out, such as 0.95"),
            ("c", lambda v: 0 < v < math.inf, "above 0, such as 1.0"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
                raise Refused(f"l-cube: {name}={value!r}; expected a number {expected}.")
        if 2 * self.r > 2**self.lowest:
            needed = math.ceil(math.log2(2 * self.r))
            raise Refused(f"l-cube: r={self.r} with lowest={self.lowest}: a block of level {self.lowest} has {2**self.lowest} "
                          f"tokens for {2 * self.r} copies; expected r={2**self.lowest // 2} or lowest={needed}.")

    @classmethod
    def of_length(cls, length: int, **settings: Any) -> LCube:
        """The benchmark at `length` tokens. `Refused` unless that is a power of two, at least 2."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 2 or length & (length - 1):
            near = 2 ** max(1, round(math.log2(max(2, length)))) if isinstance(length, int) else 64
            raise Refused(f"l-cube: length={length!r}; expected a power of two, such as {near}.")
        return cls(length.bit_length() - 1, **settings)

    @property
    def length(self) -> int:
        """L, the tokens of a sequence."""
        return 2**self.H

    @property
    def size(self) -> int:
        """Copies of a latent, 2r."""
        return 2 * self.r

    @property
    def pair_information(self) -> float:
        """I_pair = -1/2 log(1 - rho^2), in nats."""
        return -0.5 * math.log1p(-(self.rho**2))

    def latents(self, level: int) -> int:
        """n_h of a level in use (1 to H); 0 below the lowest."""
        if level < self.lowest:
            return 0
        half = 2 ** (level - 1)
        return min(half // self.r, max(1, round(self.c * 2 ** (self.beta * level))))

    @cached_property
    def times(self) -> Int[Tensor, "G copies"]:
        """Tokens of each latent's copies, in order; latents go level by level, block by block."""
        return torch.cat([self._times_of(level) for level in range(self.lowest, self.H + 1)])

    @cached_property
    def levels(self) -> Int[Tensor, " G"]:
        """The level (1 to H) of each latent."""
        counts = [self.latents(h) * 2 ** (self.H - h) for h in range(self.lowest, self.H + 1)]
        return torch.repeat_interleave(torch.arange(self.lowest, self.H + 1), torch.tensor(counts))

    @cached_property
    def members(self) -> Int[Tensor, "G copies"]:
        """Places of each latent's copies in a sequence whose tokens and slots are flattened, (L H)."""
        return self.times * self.H + (self.levels - 1)[:, None]

    def _times_of(self, level: int) -> Int[Tensor, "G copies"]:
        half, n = 2 ** (level - 1), self.latents(level)
        offsets = torch.arange(self.r * n) * half // (self.r * n)
        right = offsets
        if self.shuffle is not None:
            right = offsets[torch.from_numpy(np.random.default_rng([self.shuffle, level]).permutation(len(offsets)))]
        # Offset q belongs to latent q mod n.
        left, right = (part.view(self.r, n).T for part in (offsets, right + half))
        block = torch.cat((left, right.sort(1).values), 1)
        starts = torch.arange(0, self.length, 2**level)
        return (starts[:, None, None] + block).flatten(0, 1)

    def sample(
        self, batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "B L D"]:
        """`batch` sequences, drawn on the device of `generator`."""
        device = generator.device
        x = torch.randn(batch, self.length * self.H, generator=generator, dtype=dtype, device=device)
        z = torch.randn(batch, len(self.levels), 1, generator=generator, dtype=dtype, device=device)
        where = self.members.to(device)
        x[:, where] = self.rho**0.5 * z + (1.0 - self.rho) ** 0.5 * x[:, where]
        return x.view(batch, self.length, self.H)

    def check_sequences(self, x: Tensor) -> None:
        """`Refused` unless `x` is (B, L, D) with this benchmark's length and D = H slots."""
        if x.ndim != 3 or tuple(x.shape[1:]) != (self.length, self.H):
            raise Refused(f"l-cube: sequences of shape {tuple(x.shape)}; expected (B, {self.length}, {self.H}), L = 2^H tokens "
                          "of D = H slots.")

    def check_cut(self, cut: int) -> int:
        """`Refused` unless `cut`, the length of the first part, leaves two parts."""
        if isinstance(cut, bool) or not isinstance(cut, int) or not 1 <= cut <= self.length - 1:
            raise Refused(f"l-cube: cut={cut!r}; expected 1 to {self.length - 1}, such as the middle, {self.length // 2}.")
        return cut


def _whole(name: str, value: Any, least: int, most: int | None) -> None:
    right = isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most)
    if not right:
        room = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise Refused(f"l-cube: {name}={value!r}; expected a whole number {room}.")
