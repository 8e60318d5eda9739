"""Keyed noise: random numbers that are a function of a key and a position, never of what was drawn before.

Whoever asks for the noise of token 17 of an answer gets the same numbers, in one step or in a round of eight, today or
after a restart. So writing with drafts and writing token by token can use the very same noise and give the same text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """The random numbers of one sequence. `key` names it: a seed, or a step, a prompt and a sample."""

    key: tuple[int | str, ...] = (0,)

    def gumbel(self, position: int, size: int, device: torch.device | str | None = None) -> Float[Tensor, " size"]:
        """Gumbel noise for the token at `position`, float64: argmax(log p + gumbel) is a draw from p."""
        u = torch.rand(size, dtype=torch.float64, generator=self._generator(position, "gumbel"))
        exponential = (-torch.log(u.clamp(min=torch.finfo(torch.float64).tiny))).clamp(min=torch.finfo(torch.float64).tiny)
        return (-exponential.log()).to(device)

    def uniform(self, position: int, what: str = "accept") -> float:
        """A number in [0, 1) for one use (`what`) at `position`; different uses are independent."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator(position, what)))

    def of(self, *more: int | str) -> Noise:
        """Independent noise for a part of what this key names."""
        return Noise((*self.key, *more))

    def _generator(self, position: int, what: str) -> torch.Generator:
        text = repr((self.key, position, what)).encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.Generator().manual_seed(seed)
