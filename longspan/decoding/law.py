"""The law of the next token: what temperature and truncation make of a model's logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.decoding.noise import Noise
from longspan.registry import Refused


@dataclass(frozen=True)
class Law:
    """Temperature, then top-k, then top-p (nucleus), as `generate` of transformers has them; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    process: Callable[[Sequence[int], Float[Tensor, " V"]], Float[Tensor, " V"]] | None = None
    """A change of one position's logits that depends on the tokens before it, such as a repetition penalty."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise Refused(f"temperature={self.temperature}: expected a number of at least 0; 0 takes the likeliest token.")
        if not 0 < self.top_p <= 1:
            raise Refused(f"top_p={self.top_p}: expected a share above 0 and up to 1.")
        if self.top_k < 0:
            raise Refused(f"top_k={self.top_k}: expected at least 0; 0 keeps all tokens.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, ids: Sequence[int], logits: Float[Tensor, "n V"], drafted: Sequence[int] = ()
                      ) -> Float[Tensor, "n V"]:
        """The law after `ids`, after `ids` and the first drafted token, and so on; float64 rows that sum to 1."""
        if self.process is not None:
            logits = torch.stack([self.process([*ids, *drafted[:i]], row) for i, row in enumerate(logits)])
        if self.greedy:
            return torch.zeros(logits.shape, dtype=torch.float64, device=logits.device).scatter(
                -1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits.double() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = logits.softmax(-1)
        if self.top_p < 1:
            ranked, order = p.sort(descending=True, stable=True)
            kept = ranked.cumsum(-1) - ranked < self.top_p
            p = torch.zeros_like(p).scatter(-1, order, ranked * kept)
            p = p / p.sum(-1, keepdim=True)
        return p


def pick(p: Float[Tensor, " V"], noise: Noise, position: int) -> int:
    """A draw from `p` that is a function of the noise at `position`: argmax(log p + gumbel)."""
    top = int(p.argmax())
    if float(p[top]) == 1.0:
        return top
    return int((p.log() + noise.gumbel(position, p.shape[-1], p.device)).argmax())
