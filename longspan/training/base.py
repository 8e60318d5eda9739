"""What the training loop works with: batches, objectives, and what an objective reports.

A batch is aligned: ``labels[b, t]`` is the token that should follow ``ids[b, t]``, or -100 where nothing is asked. So a
batch can be cut anywhere along the time axis, and the last token of one piece predicts the first of the next.

A batch source is a function of the batch's number. The loop keeps no other place in the data, which is what makes a
resumed run see exactly the batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.layers import MixerState
from longspan.registry import Method

IGNORE = -100
"""Label of a position where nothing is asked."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Token ids with aligned labels. `extra` holds further tensors (B, T, ...) that an objective reads."""

    ids: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    valid: Bool[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    index: int = 0
    """The batch's number; an objective that draws at random seeds its own generator with it."""
    progress: float = 1.0
    """How far the run is at this step: 0 at the first, 1 at the last and in evaluation; for weights with a schedule."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Every tensor changed alike (moved to a device, cut, …)."""
        fields = {n: getattr(self, n) for n in ("ids", "labels", "valid", "segments")}
        changed: dict[str, Any] = {n: None if t is None else change(t) for n, t in fields.items()}
        return dataclasses.replace(self, **changed, extra={n: change(t) for n, t in self.extra.items()})

    def to(self, device: torch.device) -> Batch:
        return self.map(lambda t: t.to(device))

    def pieces(self, n: int) -> list[Batch]:
        """Cut along time into `n` pieces of equal length, the last ones one token shorter if it doesn't divide.

        Raises ValueError when there are fewer tokens than pieces.
        """
        time = self.ids.shape[1]
        if not 1 <= n <= time:
            raise ValueError(f"a batch of {time} tokens can't be cut into {n} pieces")
        edges = list(accumulate(time // n + (i < time % n) for i in range(n)))
        return [self.map(lambda t, a=a, b=b: t[:, a:b]) for a, b in pairwise([0, *edges])]  # type: ignore[misc]

    @property
    def tokens(self) -> int:
        """Tokens in the batch, padding included."""
        return self.ids.numel()


Batches = Callable[[int], Batch]
"""The batch with a given number; the same number always gives the same batch."""

SPLITS = ("train", "held-out")


def dice(seed: int, split: str, index: int) -> np.random.Generator:
    """The random numbers of one batch: a function of these three alone."""
    return np.random.default_rng([seed, SPLITS.index(split), index])


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an objective says about one batch (or one piece of it)."""

    loss: Float[Tensor, ""]
    """Mean loss over what it counted; 0 where it counted nothing."""
    weight: float
    """How much it counted (labelled tokens, say); pieces and micro-batches are averaged with these weights."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the same things, for the log."""
    state: MixerState | None = None
    """The model's state after the batch, for the next piece of the same sequences."""


class Objective(Method):
    """A method of kind ``objective``: what training minimises. Any callable of the same signature will do as well."""

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        """Run `model` on `batch`, continuing at `state`, and say what the loss is."""
        raise NotImplementedError


ObjectiveFunction = Callable[[nn.Module, Batch, Any], Outcome]
