"""RULER's eight needle tasks (arXiv:2404.06654): keys with values hidden in noise, in essays, or among other needles.

Each needle reads `One of the special magic {type} for {key} is: {value}.` The tasks differ in what surrounds the
needles and in how many keys, values a key, and keys asked for there are:

- single 1, 2, 3: one needle in noise, in an essay, and in an essay with a UUID as value;
- multikey 1, 2, 3: the needle among three others, among nothing but others, and the same with UUIDs for both;
- multivalue: one key with four values, all asked for; multiquery: four keys, all asked for.

The score is the share of the values found in the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import RULER_DEPTHS, Essay, insert, noise
from longspan.evaluation.texts import Text, load_text
from longspan.evaluation.words import Draws
from longspan.registry import knob, method

PAPER = "arXiv:2404.06654"

Placed = tuple[str, list[list[int]], list[float]]
"""Haystack with needles, character range of each needle, depth of each needle."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """A haystack: `place(units)` puts the needles among so many units; `tokens(units)` guesses their size."""

    place: Callable[[int], Placed]
    tokens: Callable[[int], float] | None = None


def needle_sentence(kind: str, key: str, value: str) -> str:
    """RULER's needle; `kind` is "numbers" or "uuids"."""
    return f"One of the special magic {kind} for {key} is: {value}."


@dataclasses.dataclass(frozen=True)
class RulerNeedle(Task):
    """What the eight tasks share: drawing the needles, asking, scoring. Subclasses say what surrounds the needles."""

    words: str = knob("own", "where key words come from", choices=("own", "wonderwords"))

    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1
    key_kind: ClassVar[str] = "words"
    value_kind: ClassVar[str] = "numbers"
    least_units: ClassVar[int] = 4

    def surround(self, needles: list[str], key: Key, draws: Draws, tokenizer: Any, shift: int) -> Surroundings:
        """How the needles are placed among a number of haystack units; `shift` is the length of the header."""
        raise NotImplementedError

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("needles")
        draws = Draws(rng, self.words)
        hidden = {draws.draw(self.key_kind): [draws.draw(self.value_kind) for _ in range(self.values)]
                  for _ in range(self.keys)}
        needles = [needle_sentence(self.value_kind, k, value) for k, values in hidden.items() for value in values]
        rng.shuffle(needles)
        asked = rng.sample(list(hidden), self.queries)
        header, question, prefix = _wording(self.value_kind, asked, several=self.queries * self.values > 1)
        haystack = self.surround(needles, key, draws, tokenizer, len(header))

        def build(units: int) -> Example:
            body, spans, depths = haystack.place(units)
            wanted = {needle_sentence(self.value_kind, k, value) for k in asked for value in hidden[k]}
            found = [(span, depth) for needle, span, depth in zip(needles, spans, depths) if needle in wanted]
            return Example(
                context=header + body, question=question, answer_prefix=prefix,
                answers=tuple(value for k in asked for value in hidden[k]), max_new_tokens=128,
                meta={"index": key.index, "depth": sum(d for _, d in found) / len(found), "query": asked,
                      "depths": [d for _, d in found], "spans": [span for span, _ in found]})

        return Draft(build, least=self.least_units, estimate=haystack.tokens)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.match_all(metrics.clean(prediction), example.answers)


@dataclasses.dataclass(frozen=True)
class InEssay(RulerNeedle):
    """Needles at some of forty depths of running text."""

    haystack: str = knob("pydoc", "text used as essay: pydoc, docstrings, jargon, bible, debian-handbook")
    rotate: bool = knob(True, "begin each example's text at another sentence (False: all at the first, as published)")

    own_text: ClassVar[bool] = True

    @property
    def text(self) -> Text:
        return load_text(self.haystack)

    def surround(self, needles: list[str], key: Key, draws: Draws, tokenizer: Any, shift: int) -> Surroundings:
        rng = key.rng("essay")
        depths = sorted(rng.sample(RULER_DEPTHS, len(needles)))
        essay = Essay(self.text, rng.randrange(len(self.text.sentences)) if self.rotate else 0, tokenizer)

        def place(units: int) -> Placed:
            body, spans = insert(essay.take(units), needles, [int(units * depth) for depth in depths], " ", shift)
            return body, spans, depths

        return Surroundings(place, essay.tokens)


@dataclasses.dataclass(frozen=True)
class InNoise(RulerNeedle):
    """Needles between lines of noise, at random lines."""

    def surround(self, needles: list[str], key: Key, draws: Draws, tokenizer: Any, shift: int) -> Surroundings:
        return _between_lines(needles, key, noise, shift)


@dataclasses.dataclass(frozen=True)
class AmongNeedles(RulerNeedle):
    """Needles between other needles, one a line."""

    def surround(self, needles: list[str], key: Key, draws: Draws, tokenizer: Any, shift: int) -> Surroundings:
        others: list[str] = []

        def lines(units: int) -> list[str]:
            while len(others) < units:
                others.append(needle_sentence(self.value_kind, draws.draw(self.key_kind), draws.draw(self.value_kind)))
            return others[:units]

        return _between_lines(needles, key, lines, shift)


def _between_lines(needles: list[str], key: Key, lines: Callable[[int], list[str]], shift: int) -> Surroundings:
    def place(units: int) -> Placed:
        before = key.rng(f"lines/{units}").sample(range(units), len(needles))
        body, spans = insert(lines(units), needles, before, "\n", shift)
        return body, spans, [line / units for line in before]

    return Surroundings(place)


def _wording(kind: str, asked: list[str], several: bool) -> tuple[str, str, str]:
    """Header, question and answer prefix; singular when a single value is asked for."""
    what = f"special magic {kind if several else kind[:-1]}"
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    if several:
        header = f"Some {what} are hidden in the text below. Remember them: I will ask you for the {kind} later.\n"
        question = f"\nWhat are all the {what} for {query} that the text above mentions?"
    else:
        header = f"A {what} is hidden in the text below. Remember it: I will ask you for the {kind[:-1]} later.\n"
        question = f"\nWhat is the {what} for {query} that the text above mentions?"
    return header, question, f"The {what} for {query} mentioned in the text {'are' if several else 'is'}"


@method("ruler-niah-single-1", kind="task", system="standard-suites", paper=PAPER,
        summary="One number in repeated noise.")
class Single1(InNoise):
    """RULER niah_single_1: noise, one key, one value, a seven-digit number."""


@method("ruler-niah-single-2", kind="task", system="standard-suites", paper=PAPER,
        summary="One number in running text.")
class Single2(InEssay):
    """RULER niah_single_2: essay, one key, one value, a seven-digit number."""


@method("ruler-niah-single-3", kind="task", system="standard-suites", paper=PAPER,
        summary="One UUID in running text.")
class Single3(InEssay):
    """RULER niah_single_3: essay, one key, one value, a UUID."""

    value_kind: ClassVar[str] = "uuids"


@method("ruler-niah-multikey-1", kind="task", system="standard-suites", paper=PAPER,
        summary="One number in running text that hides three others.")
class Multikey1(InEssay):
    """RULER niah_multikey_1: essay, four keys with a number each, one asked for."""

    keys: ClassVar[int] = 4


@method("ruler-niah-multikey-2", kind="task", system="standard-suites", paper=PAPER,
        summary="One number among nothing but other keys with numbers.")
class Multikey2(AmongNeedles):
    """RULER niah_multikey_2: every line is a needle; one is asked for."""


@method("ruler-niah-multikey-3", kind="task", system="standard-suites", paper=PAPER,
        summary="One UUID among nothing but other UUIDs with UUIDs.")
class Multikey3(AmongNeedles):
    """RULER niah_multikey_3: every line is a needle with UUIDs for key and value; one is asked for."""

    key_kind: ClassVar[str] = "uuids"
    value_kind: ClassVar[str] = "uuids"


@method("ruler-niah-multivalue", kind="task", system="standard-suites", paper=PAPER,
        summary="All four numbers of one key in running text.")
class Multivalue(InEssay):
    """RULER niah_multivalue: essay, one key with four numbers, all asked for."""

    values: ClassVar[int] = 4


@method("ruler-niah-multiquery", kind="task", system="standard-suites", paper=PAPER,
        summary="The numbers of four keys in running text.")
class Multiquery(InEssay):
    """RULER niah_multiquery: essay, four keys with a number each, all asked for."""

    keys: ClassVar[int] = 4
    queries: ClassVar[int] = 4
