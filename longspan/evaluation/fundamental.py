"""KVFundaBench's figures (arXiv:2502.01941): how much of an ability is lost as less of the cache is kept.

    dP = (P_C - P_base) / P_base

P is a task's accuracy, with compression and without, on the same prompts. Over a range of kept shares that gives a curve per
task; its mean loss is the task's *sensitivity*. The *prompt gain* is what the shots bring without compression (k-shot minus
0-shot accuracy); the paper finds that tasks with a large gain are the sensitive ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from longspan.evaluation.base import Task
from longspan.evaluation.measure import AFTER
from longspan.evaluation.runner import Request, Row, parse_task, run
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused, nearest

RATIOS = tuple(round(1 - i / 10, 1) for i in range(10))
"""Shares kept: 1.0, 0.9, ..., 0.1."""
RATIO = "{ratio}"
METHODS = {
    "shotkv": "shotkv(r_p={ratio}, r_d={ratio})",
    "snapkv": "snapkv(budget={ratio})",
    "pyramidkv": "snapkv @ pyramid(budget={ratio})",
    "h2o": "h2o(budget={ratio}, schedule=every(steps=1))",
    "streaming-llm": "streaming-llm(budget={ratio}, schedule=every(steps=1))",
}
"""Methods by the names of the paper, as recipes; any other recipe may be given with ``{ratio}`` where its share stands."""


def relative_change(compressed: float, base: float) -> float:
    """dP; NaN where there was nothing to lose (``base`` is 0) or a figure is missing."""
    return (compressed - base) / base if base else math.nan


@dataclass(frozen=True)
class Curve:
    """A method's accuracy on a task over kept shares, and that without compression on the same prompts."""

    method: str
    task: str
    ratios: tuple[float, ...]
    accuracies: tuple[float, ...]
    base: float

    @property
    def changes(self) -> tuple[float, ...]:
        """dP at every share."""
        return tuple(relative_change(found, self.base) for found in self.accuracies)

    @property
    def undefined(self) -> bool:
        """Whether dP is not defined: without compression no answer was right."""
        return not self.base > 0

    @property
    def sensitivity(self) -> float:
        """Mean loss, -dP, over the shares below 1; NaN where undefined."""
        losses = [-change for ratio, change in zip(self.ratios, self.changes) if ratio < 1]
        return float(np.mean(losses)) if losses else math.nan

    def as_json(self) -> dict[str, Any]:
        """NaN becomes None, so that this is JSON."""
        known = lambda values: [None if math.isnan(v) else v for v in values]  # noqa: E731
        return {"method": self.method, "task": self.task, "ratios": list(self.ratios), "accuracies": known(self.accuracies),
                "base": known([self.base])[0], "changes": known(self.changes), "undefined": self.undefined,
                "sensitivity": known([self.sensitivity])[0]}


def prompt_gain(few_shot: float, zero_shot: float) -> float:
    """Accuracy that the shots bring."""
    return few_shot - zero_shot


def correlation(gains: Sequence[float], sensitivities: Sequence[float]) -> float:
    """Pearson's correlation over tasks; pairs with a NaN are left out. NaN for fewer than three pairs, or without spread.

    Raises:
        ValueError: the two have different lengths.
    """
    if len(gains) != len(sensitivities):
        raise ValueError(f"correlation of {len(gains)} gains with {len(sensitivities)} sensitivities")
    both = np.array([gains, sensitivities], dtype=float)
    both = both[:, ~np.isnan(both).any(0)]
    if both.shape[1] < 3 or (np.ptp(both, axis=1) == 0).any():
        return math.nan
    return float(np.corrcoef(both)[0, 1])


def recipe_of(method: str, ratio: float) -> Recipe:
    """The recipe of a method that keeps a share; at 1 nothing is compressed.

    Raises:
        Refused: a share outside (0, 1], an unknown method, or a recipe that doesn't say where the share stands.
    """
    if not 0 < ratio <= 1:
        raise Refused(f"ratio {ratio}: expected a share of the cache to keep in (0, 1], such as 0.3.")
    if ratio == 1 or method == "full":
        return Recipe.parse("full")
    text = METHODS.get(method, method)
    if RATIO not in text:
        raise Refused(f"{nearest(method, METHODS, 'method')}; or write a recipe with {RATIO} in it, such as "
                      '"knorm(budget={ratio})".')
    return Recipe.parse(text.replace(RATIO, repr(float(ratio))))


@dataclass
class Harness:
    """Measures methods on tasks; every method and share is given the same prompts.

    Args:
        loaded: model and tokenizer.
        length: tokens of a prompt with its answer, at most.
        examples: prompts a task.
        seed: of the prompts.
        compress: when the cache is compressed; the published benchmark does it when the whole prompt has been read.
        out: a folder for the result rows: a run that was broken off goes on there.
        max_new_tokens: a cap on what is generated.
    """

    loaded: Loaded
    length: int
    examples: int = 10
    seed: int = 0
    compress: str = AFTER
    out: Path | None = None
    max_new_tokens: int | None = None
    _rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict, repr=False)

    def rows(self, method: str, task: Task | str, ratio: float) -> list[Row]:
        """One result row per prompt."""
        recipe, made = recipe_of(method, ratio), _task(task)
        key = str(recipe), str(made)
        if key not in self._rows:
            request = Request([recipe], [made], [self.length], self.examples, self.seed, self.compress, self.out,
                              self.max_new_tokens)
            self._rows[key] = run(self.loaded, request)
        return self._rows[key]

    def run(self, method: str, task: Task | str, ratio: float) -> float:
        """Accuracy of a method that keeps a share of the cache.

        Raises:
            Refused: the method can't serve these prompts at this share, or the task has no score.
        """
        scores = [row["score"] for row in self.rows(method, task, ratio)]
        if any(score is None for score in scores):
            raise Refused(f"task {task} generates nothing, so it has no accuracy; expected one that does, such as "
                          "kvfunda-arithmetic.")
        return float(np.mean(scores))

    def curve(self, method: str, task: Task | str, ratios: Sequence[float] = RATIOS) -> Curve:
        """Accuracy over kept shares, beside that of the full cache."""
        accuracies = tuple(self.run(method, task, ratio) for ratio in ratios)
        return Curve(method, str(_task(task)), tuple(ratios), accuracies, self.run("full", task, 1.0))

    def gain(self, task: Task | str) -> float:
        """Prompt gain of a task's shots on the same questions, without compression.

        Raises:
            Refused: the task has no knob `shots`, or no shots.
        """
        made = _task(task)
        if getattr(made, "shots", 0) == 0:
            raise Refused(f"task {made} has no shots to gain from; expected one with some, such as kvfunda-arithmetic.")
        return prompt_gain(self.run("full", made, 1.0), self.run("full", replace(made, shots=0), 1.0))  # type: ignore[type-var, call-arg]

    def report(self, methods: Sequence[str], tasks: Sequence[Task | str], ratios: Sequence[float] = RATIOS) -> dict[str, Any]:
        """Per-task curves of every method, prompt gains, and each method's correlation between gain and sensitivity."""
        curves = {method: [self.curve(method, task, ratios) for task in tasks] for method in methods}
        gains = [self.gain(task) for task in tasks]
        related = {method: correlation(gains, [curve.sensitivity for curve in found]) for method, found in curves.items()}
        return {"curves": [curve.as_json() for found in curves.values() for curve in found],
                "gains": {str(_task(task)): gain for task, gain in zip(tasks, gains)},
                "correlation": {method: None if math.isnan(r) else r for method, r in related.items()}}


def _task(task: Task | str) -> Task:
    return parse_task(task) if isinstance(task, str) else task
