"""Is the answer there? In a passage, where it mustn't be, and in what was written."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.evaluation.metrics import best, f1, normalise


def holds(passage: str, answers: Sequence[str]) -> str | None:
    """The first of the answers that a passage holds word for word in SQuAD's normal form; None if it holds none."""
    words = f" {normalise(passage)} "
    return next((answer for answer in answers if normalise(answer) and f" {normalise(answer)} " in words), None)


def scored(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """`accuracy` (1 if an answer is contained) and token `f1` (the best over the answers)."""
    return {"accuracy": float(holds(prediction, answers) is not None), "f1": best(f1, prediction, answers)}
