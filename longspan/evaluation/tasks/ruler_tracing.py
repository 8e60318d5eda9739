"""RULER's variable tracking (arXiv:2404.06654): follow a chain of assignments scattered through noise.

`VAR ABCDE = 12345`, then `VAR FGHIJ = VAR ABCDE` and so on, four hops, at sorted random lines of noise; the question
asks for all variables that hold the value. One worked example, with three-letter names, comes before.
"""

from __future__ import annotations

import string
from itertools import pairwise
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import insert, noise
from longspan.evaluation.words import Draws
from longspan.registry import knob, method

HEADER = "Follow the chain of variable assignments hidden in the text below.\n\n"


def chain(draws: Draws, hops: int, letters: int) -> tuple[list[str], str, list[str]]:
    """Names, value and the assignments in order: a number first, then each name from the one before."""
    names = [draws.letters(letters, string.ascii_uppercase) for _ in range(hops + 1)]
    value = str(draws.rng.randint(10000, 99999))
    copies = [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    return names, value, [f"VAR {names[0]} = {value}", *copies]


def _question(value: str) -> str:
    return f"\nQuestion: Which variables hold the value {value} in the text above? Name all of them."


def _prefix(value: str, count: int) -> str:
    return f"Answer: Following the assignments in the text above, {count} variables hold the value {value}:"


@method("ruler-vt", kind="task", system="standard-suites", paper="arXiv:2404.06654",
        summary="Name all variables of a chain of assignments scattered through noise.")
class VariableTracking(Task):
    """RULER vt: one chain; all its names are the answer."""

    hops: int = knob(4, "assignments of one variable to the next", low=1, high=20)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("chain")
        draws = Draws(rng)
        shown, shown_value, shown_chain = chain(draws, self.hops, 3)
        names, value, assignments = chain(draws, self.hops, 5)
        least = self.hops + 1
        # The published worked example has five lines of noise for short prompts and fills 500 tokens otherwise.
        lines = max(least, 5 if key.length < 4096 else 10)
        places = sorted(rng.sample(range(lines), least))
        body, _ = insert(noise(lines), shown_chain, places, "\n")
        shot = f"{HEADER}{body}{_question(shown_value)}\n{_prefix(shown_value, len(shown))} {' '.join(shown)}\n\n"

        def build(units: int) -> Example:
            before = sorted(key.rng(f"lines/{units}").sample(range(units), least))
            text, spans = insert(noise(units), assignments, before, "\n", len(shot) + len(HEADER))
            depths = [line / units for line in before]
            return Example(
                context=shot + HEADER + text, question=_question(value), answer_prefix=_prefix(value, len(names)),
                answers=tuple(names), max_new_tokens=30,
                meta={"index": key.index, "depth": sum(depths) / len(depths), "depths": depths, "spans": spans,
                      "shots": [[0, len(shot)]], "value": value, "answer_text": " ".join(names)})

        return Draft(build, least)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.match_all(metrics.clean(prediction), example.answers)
