"""Policies: what turns one layer's keys, values and recent queries into a `KeepPlan`.

The usual one is a score times a budget (`CachePolicy`). What that can't say is a method of kind ``policy``, which
`OwnPolicy` joins with a store and a schedule. The cache asks both the same four things: ``can``, ``window_rows``,
``observe`` and ``plan``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.cache.base import Budget, KeepPlan, LayerContext, Policy, Schedule, Score, Store
from longspan.registry import Method, Refused


@dataclass(frozen=True)
class CachePolicy:
    """A score, a budget, a store and a schedule, checked against each other."""

    score: Score
    budget: Budget
    store: Store | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if self.store is not None and self.budget.card.can("ragged") and self.store.card.can("equal-lengths"):
            raise Refused(f"{self.budget.card.name} keeps a different number of tokens per head, which "
                          f"store={self.store} would pad with dead entries; leave store= out, or use store=ragged.")

    def expected(self, context: int, bytes_per_token: float) -> float:
        """Entries that a head keeps on average of a prompt of `context` tokens."""
        return self.budget.amount.tokens(context, bytes_per_token)

    @property
    def methods(self) -> list[Method]:
        """Everything the policy is made of."""
        return [m for m in (self.score, self.budget, self.store, self.schedule) if m is not None]

    def can(self, capability: str) -> bool:
        """Whether what chooses declares `capability`."""
        return self.score.can(capability)

    def window_rows(self) -> int:
        """Newest query rows that choosing reads."""
        return self.score.window_rows()

    def observe(self, x: LayerContext) -> None:
        """See new query rows as they pass."""
        self.score.observe(x)

    def plan(self, x: LayerContext) -> KeepPlan:
        """Which entries of this layer stay.

        Raises:
            Refused: the budget is smaller than what the score always keeps, or a score is NaN.
        """
        rows, protected = self.score.window_rows(), self.score.protected(x)
        budget = self.budget.tokens(x)
        # Nothing to choose from: the window or what is protected covers the row, or the budget does.
        keep_all = (x.seen <= max(rows, protected, 1)) | (budget >= x.seen)
        if x.early:
            keep_all |= budget < max(protected, 1)
        if bool(keep_all.all()):
            return KeepPlan(x.valid.clone())
        self._check_budget(budget, keep_all, x)
        x = newest_rows(x, rows)
        x.budget, x.protected, x.score = budget, protected, str(self.score)
        scores = self.score.score(x).float()
        if scores.shape != x.valid.shape:
            raise ValueError(f"{self.score.card.name} gave scores {tuple(scores.shape)} for entries {tuple(x.valid.shape)}")
        if bool(torch.isnan(scores[x.valid]).any()):
            raise Refused(f"{self.score.card.name} gave NaN in layer {x.layer}; the model's keys or queries hold NaN.")
        mask = self.budget.keep(scores.masked_fill(~x.valid, -torch.inf), x)
        mask = torch.where(keep_all[:, None, None], x.valid, mask & x.valid)
        return KeepPlan(mask, self.score.moves(x, mask))

    def _check_budget(self, budget: Tensor, keep_all: Tensor, x: LayerContext) -> None:
        need = self.score.protected(x)
        least = int(budget[~keep_all].min())
        if least < max(need, 1):
            raise Refused(f"the budget of {least} tokens ({self.budget}) is smaller than the {max(need, 1)} tokens that "
                          f"{self.score} always keeps; raise the budget or lower the score's window.")

    def __str__(self) -> str:
        short = self.budget.shorthand
        budget = {"budget": self.budget.budget} if short else {}
        head = _with(str(self.score), budget | {"store": self.store, "schedule": self.schedule})
        return head if short else f"{head} @ {self.budget}"


@dataclass(frozen=True)
class OwnPolicy:
    """A method that makes its keep plan itself, a store and a schedule."""

    chooser: Policy
    store: Store | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if self.store is not None and self.chooser.card.can("ragged") and self.store.card.can("equal-lengths"):
            raise Refused(f"{self.chooser.card.name} keeps a different number of tokens per head, which "
                          f"store={self.store} would pad with dead entries; leave store= out, or use store=ragged.")

    def expected(self, context: int, bytes_per_token: float) -> float:
        """Entries that a head keeps on average of a prompt of `context` tokens."""
        return self.chooser.expected(context)

    @property
    def methods(self) -> list[Method]:
        """Everything the policy is made of."""
        return [m for m in (self.chooser, self.store, self.schedule) if m is not None]

    def can(self, capability: str) -> bool:
        """Whether what chooses declares `capability`."""
        return self.chooser.card.can(capability)

    def window_rows(self) -> int:
        """Newest query rows that choosing reads."""
        return self.chooser.window_rows()

    def observe(self, x: LayerContext) -> None:
        """See new query rows as they pass."""
        self.chooser.observe(x)

    def plan(self, x: LayerContext) -> KeepPlan:
        """Which entries of this layer stay."""
        plan = self.chooser.plan(newest_rows(x, self.window_rows()))
        if plan.mask.shape != x.valid.shape:
            raise ValueError(f"{self.chooser.card.name} planned {tuple(plan.mask.shape)} for entries {tuple(x.valid.shape)}")
        return KeepPlan(plan.mask & x.valid, plan.shift)

    def __str__(self) -> str:
        return _with(str(self.chooser), {"store": self.store, "schedule": self.schedule})


AnyPolicy = CachePolicy | OwnPolicy


def newest_rows(x: LayerContext, rows: int) -> LayerContext:
    """The context with its newest `rows` query rows: several policies may look on, and the widest window was kept."""
    first = x.q.shape[2] - rows
    if first <= 0:
        return x
    return replace(x, q=x.q[:, :, first:], q_valid=x.q_valid[:, first:], q_positions=x.q_positions[:, first:],
                   hidden=None if x.hidden is None else x.hidden[:, first:])


def _with(head: str, extra: dict[str, Any]) -> str:
    """A method as it is written, with more settings in its parentheses."""
    settings = ", ".join(f"{k}={_written(v)}" for k, v in extra.items() if v is not None)
    if not settings:
        return head
    return f"{head[:-1]}, {settings})" if head.endswith(")") else f"{head}({settings})"


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
