"""The First Drop of Ink (arXiv:2605.10828): who works as what, among documents of which a share p is misleading.

One question, one gold document and N distractors of one line each. At share p the first round(p N) of them, in an order drawn
once, are hard: they share the person's first or last name and name another job. Questions, slots and the number of distractors
are the same at every p, so runs at several shares are paired; `longspan.evaluation.ink.Curve.of` makes a damage curve of their
rows. Names and jobs are our own.
"""

from __future__ import annotations

from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task, fit, total_length
from longspan.evaluation.ink.answers import holds
from longspan.evaluation.ink.town import DRIFT, HARD_POOLS, RANDOM_TEXT, WEAK_POOLS, example, most_hard, town
from longspan.evaluation.texts import Text, load_text
from longspan.registry import knob, method


@method("first-drop-of-ink", kind="task", system="first-drop-of-ink", paper="arXiv:2605.10828",
        summary="A person's job among one-line documents, a share p of which are near duplicates of the right one.")
class FirstDropOfInk(Task):
    """Answer containment; the answer's likelihood is in every row as well, and needs fewer questions."""

    p: float = knob(0.1, "share of the distractors that are hard", low=0.0, high=1.0)
    hard: str = knob("shared-name", "hard distractors: shared-name, other-name (neither name), easy (a control)",
                     choices=HARD_POOLS)
    weak: str = knob("easy", "the other distractors: easy (filler sentences), random (sentences of a manual)", choices=WEAK_POOLS)

    own_text = True

    @property
    def text(self) -> Text | None:
        return load_text(RANDOM_TEXT) if self.weak == "random" else None

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        def at(units: int, p: float) -> Example:
            person, contexts = town(key, units, tokenizer, self.hard, self.weak)
            return example(person, contexts.at(p), key.index)

        most = most_hard(self.hard)
        exhausted = "" if most is None else (f"the hard pool {self.hard!r} holds {most} documents, which fill less; ask for a "
                                             "shorter one, or take hard=other-name.")
        room = key.length - 2 * DRIFT  # so that the same number of distractors fits at every share
        clean = Draft(lambda units: at(units, 0.0), most=most)
        if total_length(clean.build(clean.least), tokenizer) > room:
            return Draft(lambda units: at(units, self.p), most=most, exhausted=exhausted)
        units = fit(clean, room, tokenizer, self.card.name).meta["distractors"]
        return Draft(lambda n: at(n, self.p), most=units, exhausted=exhausted if units == most else "")

    def metric(self, prediction: str, example: Example) -> float:
        return float(holds(prediction, example.answers) is not None)
