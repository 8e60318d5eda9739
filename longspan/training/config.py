"""The settings of a training run, refused early when they make no sense, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longspan.registry import Refused, nearest

SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("float32", "bfloat16")
HARMLESS = ("log_every", "checkpoint_every", "keep_last")
"""Settings that a resumed run may change, since they don't touch the weights."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train: AdamW with warm-up and decay, clipped gradients, optional truncation of backpropagation.

    Weights, gradients and optimiser state are float32 (or the model's own dtype); ``precision="bfloat16"`` runs the
    forward pass under autocast. `accumulate` batches make one step, weighted by what their losses count.

    `segments` cuts every sequence into that many pieces; the model's state is carried from one to the next. The plan of
    where gradients stop is explicit: ``detach_every=k`` cuts the graph after every k pieces (0: never, full
    backpropagation); ``reach=K`` instead lets the loss of each piece reach back through the K pieces before it
    (computed again for each piece), which slides rather than jumps.
    """

    steps: int = 300
    lr: float = 1e-3
    warmup: int = 0
    schedule: str = "cosine"
    final_lr: float = 0.1
    """Learning rate at the end, as a share of `lr`."""
    weight_decay: float = 0.1
    """Applied to matrices only, not to vectors, scalars and embeddings."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0
    accumulate: int = 1
    precision: str = "float32"
    segments: int = 1
    detach_every: int = 1
    reach: int | None = None
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_last: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("steps", "accumulate", "segments", "log_every", "keep_last"):
            self._whole(name, 1)
        for name in ("warmup", "detach_every", "checkpoint_every", "seed"):
            self._whole(name, 0)
        if self.reach is not None:
            self._whole("reach", 0)
            if self.detach_every != 1:
                raise Refused(f"reach={self.reach} with detach_every={self.detach_every}: expected one plan, not two.")
            if self.segments == 1:
                raise Refused(f"reach={self.reach}: expected segments=2 or more, since it counts segments.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise Refused(f"lr={self.lr}: expected a number above 0, such as 0.001.")
        if self.warmup > self.steps:
            raise Refused(f"warmup={self.warmup}: expected at most the {self.steps} steps of the run.")
        for name, options in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in options:
                raise Refused(nearest(str(getattr(self, name)), options, name))
        for name in ("final_lr", "weight_decay", "eps"):
            self._not_negative(name)
        if self.clip is not None and not self.clip > 0:
            raise Refused(f"clip={self.clip}: expected a number above 0, or None for no clipping.")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise Refused(f"betas={self.betas}: expected two numbers from 0 up to, not including, 1.")

    def _whole(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise Refused(f"{name}={value!r}: expected a whole number of at least {low}.")

    def _not_negative(self, name: str) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and value >= 0):
            raise Refused(f"{name}={value}: expected a number of at least 0.")


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of step `step` (from 0): linear warm-up to ``lr``, then down to ``final_lr * lr``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    fall = {"cosine": 0.5 - 0.5 * math.cos(math.pi * done), "linear": done, "constant": 0.0}[config.schedule]
    return config.lr * (1.0 - fall * (1.0 - config.final_lr))
