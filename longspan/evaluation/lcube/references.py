"""Predictors that need no training: what perfect, blind, short-sighted and forgetful models score.

A predictor is called ``predict(x, start)`` and gives the distribution of each token of ``x[:, start:]`` from those tokens
alone, so ``start`` says where its history begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.evaluation.lcube.plan import LCube
from longspan.evaluation.lcube.truth import Prediction, Seen, conditional, past, remembering, within
from longspan.registry import Refused

Predict = Callable[[Float[Tensor, "B L D"], int], Prediction]


@dataclass(frozen=True)
class Reference:
    """The exact rule on a part of the past, the table `seen`."""

    plan: LCube
    seen: Seen

    def __call__(self, x: Float[Tensor, "B L D"], start: int = 0) -> Prediction:
        mu, var = conditional(self.plan, x, self.seen & past(self.plan, start))
        return Prediction(mu[:, start:], var[:, start:])


def oracle(plan: LCube) -> Reference:
    """Knows all of the past: utilisation 1."""
    return Reference(plan, past(plan))


def marginal(plan: LCube) -> Reference:
    """Knows nothing, N(0, 1) for every slot: utilisation 0."""
    return Reference(plan, torch.zeros_like(past(plan)))


def window(plan: LCube, tokens: int) -> Reference:
    """Knows what lies at most `tokens` before."""
    return Reference(plan, within(plan, _at_least_none("window", tokens)))


def budget(plan: LCube, latents: int, cut: int | None = None) -> Reference:
    """Carries `latents` latents across `cut` (None: the middle) and forgets the others there: a state of limited size."""
    cut = plan.length // 2 if cut is None else cut
    return Reference(plan, remembering(plan, _at_least_none("budget", latents), cut))


def _at_least_none(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused(f"l-cube: {name}={value!r}; expected a whole number of at least 0.")
    return value
