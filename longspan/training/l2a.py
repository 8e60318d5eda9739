"""What L2A minimises: next-token prediction plus a price on looking back.

    loss = CE + lambda(step) * R,   R = mean over layers of the mean over sequences of sum_t p_t^2

with p the soft gates that the layers report (arXiv:2603.17484, Eq. 5). The sum over tokens makes the weight depend on
the length (1e-8 at 131,072 tokens); `lambda_mean` weighs the mean over tokens instead. Padding counts nowhere. lambda
is 0 while the model warms up, so that it learns to use both attentions before it learns to skip one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longspan.layers.attention.l2a import FIRES, OPEN
from longspan.registry import Refused, knob, method
from longspan.training.base import Batch, Objective, ObjectiveFunction, Outcome
from longspan.training.next_token import NextToken

SCHEDULES = ("linear", "cosine", "constant")


@method("l2a-next-token", kind="objective", system="l2a", paper="arXiv:2603.17484",
        summary="Next-token cross-entropy plus a price on tokens that use global attention.")
class L2ANextToken(Objective):
    """For models with the mixer ``l2a``; reports the share of skipped tokens and every layer's firing rate."""

    lambda_mean: float = knob(0.05, "weight of the mean of p^2 over tokens at the end of training", low=0.0)
    lambda_reg: float = knob(0.0, "weight of the paper's sum over tokens, instead of lambda_mean", low=0.0)
    warmup: float = knob(0.4, "share of the steps in which the weight is 0", low=0.0, high=1.0)
    schedule: str = knob("linear", "how the weight rises after the warm-up", choices=SCHEDULES)

    def check(self) -> None:
        if self.lambda_mean and self.lambda_reg:
            raise Refused(f"lambda_mean={self.lambda_mean} with lambda_reg={self.lambda_reg}: expected one of the two; set "
                          "lambda_mean=0.0 to weigh the sum.")

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        return self.around(NextToken(), model, batch, state)  # type: ignore[call-arg]

    def around(self, objective: ObjectiveFunction, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        """The loss of another objective, which calls the model once, plus the price."""
        called: list[Any] = []

        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(model(*args, **kwargs))
            return called[-1]

        outcome = objective(noted, batch, state)  # type: ignore[arg-type]
        ctx = called[-1].ctx
        if OPEN not in ctx.auxiliary:
            raise Refused("l2a-next-token: no layer of the model has a gate; expected the mixer l2a, or next-token instead.")
        weight = self.weight(batch.progress)
        opened = ctx.auxiliary[OPEN]
        price = penalty(opened, ctx.valid, per_token=not self.lambda_reg)
        fired = firing_rates(ctx.auxiliary[FIRES], ctx.valid).tolist()
        metrics = {"skip": 1.0 - sum(fired) / len(fired), "penalty": price.item(), "lambda": weight}
        metrics |= {f"fires_{layer}": rate for layer, rate in enumerate(fired)}
        loss = outcome.loss + weight * price.to(outcome.loss.dtype)
        return Outcome(loss, outcome.weight, outcome.metrics | metrics, outcome.state)

    def weight(self, progress: float) -> float:
        """lambda when `progress` of the run (0 to 1) is done."""
        full = self.lambda_reg or self.lambda_mean
        if progress < self.warmup:
            return 0.0
        done = 1.0 if self.warmup >= 1.0 else (progress - self.warmup) / (1.0 - self.warmup)
        rise = {"linear": done, "cosine": 0.5 - 0.5 * math.cos(math.pi * done), "constant": 1.0}[self.schedule]
        return full * rise


def penalty(
    opened: list[Float[Tensor, "B T"]], valid: Bool[Tensor, "B T"] | None = None, *, per_token: bool = True
) -> Float[Tensor, ""]:
    """R: p^2 averaged over layers and over real tokens, or summed over the tokens of a sequence (`per_token` off)."""
    squares = torch.stack(opened).square()
    if valid is not None:
        squares = squares * valid
    rows, time = squares.shape[1:]
    count = (rows * time if valid is None else valid.sum().clamp(min=1)) if per_token else rows
    return squares.sum((1, 2)).mean() / count


def firing_rates(
    fires: list[Bool[Tensor, "B T"]], valid: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, " layers"]:
    """The share of real tokens with an open gate, layer by layer. The sparsity of a layer is 1 minus that."""
    fired = torch.stack(fires).float()
    if valid is None:
        return fired.mean((1, 2))
    return (fired * valid).sum((1, 2)) / valid.sum().clamp(min=1)
