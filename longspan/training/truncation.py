"""Backpropagation through a sequence read in pieces, with an explicit plan of where gradients stop.

The pieces are read in order, each from the state the one before left. Two plans:

* blocks: the graph is cut after every k pieces, and each block is backpropagated as a whole (k = 0: one block, which is
  full backpropagation). Gradients never cross a cut (truncated backpropagation, Williams & Peng 1990).
* sliding: the loss of piece i flows back through the K pieces before it, whose incoming state is detached: the exact
  gradient of sum_i loss_i(theta; C_{i-1}) with the state chain cut at max(0, i-1-K). The K pieces are read again for
  each i, so only K + 1 pieces are ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longspan.training.base import Batch, ObjectiveFunction, Outcome


@dataclass
class Tally:
    """Sums over pieces and micro-batches, from which means are made."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome, tokens: int) -> None:
        self.loss += outcome.loss.item() * outcome.weight
        self.weight += outcome.weight
        self.tokens += tokens
        for name, value in outcome.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * outcome.weight

    def means(self) -> dict[str, float]:
        """``loss`` and the metrics, averaged over everything counted."""
        count = max(self.weight, 1e-12)
        return {"loss": self.loss / count} | {name: value / count for name, value in self.metrics.items()}


def backward(
    model: nn.Module,
    objective: ObjectiveFunction,
    batch: Batch,
    tally: Tally,
    *,
    segments: int = 1,
    detach_every: int = 1,
    reach: int | None = None,
    check: Callable[[Tensor], None] = lambda loss: None,
) -> None:
    """Add the gradients of the *summed* loss (mean times weight) of `batch` to the model's, and its sums to `tally`.

    Dividing the gradients by ``tally.weight`` afterwards gives those of the mean, however the data was cut. `check` is
    called with every loss before it is backpropagated.
    """
    pieces = batch.pieces(segments)
    if reach is not None:
        _sliding(model, objective, pieces, tally, reach, check)
        return
    state: Any = None
    pending: list[Tensor] = []
    for number, piece in enumerate(pieces, 1):
        outcome = objective(model, piece, state)
        check(outcome.loss)
        tally.add(outcome, piece.tokens)
        pending.append(outcome.loss * outcome.weight)
        state = _carried(outcome, len(pieces) > 1)
        if number == len(pieces) or (detach_every and number % detach_every == 0):
            _backpropagate(pending)
            pending = []
            state = None if state is None else state.detach()


def _sliding(
    model: nn.Module,
    objective: ObjectiveFunction,
    pieces: list[Batch],
    tally: Tally,
    reach: int,
    check: Callable[[Tensor], None],
) -> None:
    incoming: list[Any] = [None]  # incoming[i]: the detached state before piece i
    for i, piece in enumerate(pieces):
        first = max(0, i - reach)
        state = incoming[first]
        for again in pieces[first:i]:
            state = _carried(objective(model, again, state), True)
        outcome = objective(model, piece, state)
        check(outcome.loss)
        tally.add(outcome, piece.tokens)
        incoming.append(_carried(outcome, True).detach())
        incoming[first] = incoming[first] if i + 1 <= reach else None
        _backpropagate([outcome.loss * outcome.weight])


def _carried(outcome: Outcome, needed: bool) -> Any:
    if needed and outcome.state is None:
        raise ValueError("segments > 1 needs an objective that returns the model's state; this one returned None")
    return outcome.state if needed else None


def _backpropagate(losses: list[Tensor]) -> None:
    total = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
    if total.requires_grad:
        total.backward()
