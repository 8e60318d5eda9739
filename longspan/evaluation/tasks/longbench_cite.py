"""LongBench-Cite (arXiv:2409.02897) over generated documents: answer, and cite the sentences the answer rests on.

A document's sentences are numbered, ``<C0>… <C1>…``. Some of them tell of a building: when it was opened, how high it is, who
looks after it; others tell the same of other buildings. The question asks for all that is told of one, each statement with its
citation. Which sentences hold the evidence is known, so recall and precision need no judge; `longspan.evaluation.citations` has
the published scores for a judge of yours.
"""

from __future__ import annotations

import random
from typing import Any

from longspan.evaluation import citations, metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import Essay
from longspan.evaluation.texts import Text, load_text
from longspan.evaluation.words import ADJECTIVES
from longspan.registry import knob, method

KINDS = ("Bridge", "Tower", "Mill", "Theatre", "Lighthouse", "Library")
FIRST = ("Greta", "Tomas", "Ines", "Karl", "Lucia", "Pavel", "Anouk", "Edda")
LAST = ("Holm", "Vidal", "Moreau", "Brandt", "Serra", "Novak", "Visser", "Lind")
ASKED = "When was {name} opened, how high is it, and who looks after it?"
ATTRIBUTES = ("opened", "high", "keeper")

HEADER = (
    "Below is a document whose sentences are numbered. Answer the question from it in statements, and after each name the "
    "sentences it rests on, from first to last. For example:\n"
    "<statement>The shop sells maps.<cite>[3-3]</cite></statement><statement>It closes at noon.<cite>[7-8]</cite></statement>\n\n"
    "The document:\n\n")


@method("longbench-cite", kind="task", system="standard-suites", paper="arXiv:2409.02897",
        summary="Answer in statements, each with the numbers of the sentences it rests on.")
class LongBenchCite(Task):
    """Citations over generated documents, scored against the sentences known to hold the evidence."""

    score: str = knob("citations", "F1 of the sentences cited, or share of the facts that the statements name",
                      choices=("citations", "correctness"))
    others: int = knob(3, "other buildings of which the same is told", low=0, high=40)
    haystack: str = knob("pydoc", "text around the facts: pydoc, docstrings, jargon, bible, debian-handbook")

    own_text = True

    @property
    def text(self) -> Text:
        return load_text(self.haystack)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("facts")
        buildings = _buildings(rng, 1 + self.others)
        told = [fact for building in buildings for fact in building[1]]
        values = buildings[0][2]
        essay = Essay(self.text, rng.randrange(len(self.text.sentences)), tokenizer)

        def build(units: int) -> Example:
            around = essay.take(units)
            places = key.rng(f"places/{units}").choices(range(units + 1), k=len(told))
            sentences, numbers = _mixed(around, told, places)
            body, spans = _numbered(sentences, len(HEADER))
            evidence = sorted(numbers[:len(ATTRIBUTES)])
            depths = [number / len(sentences) for number in evidence]
            gold = "".join(f"<statement>{told[i]}<cite>[{numbers[i]}-{numbers[i]}]</cite></statement>"
                           for i in range(len(ATTRIBUTES)))
            return Example(
                context=HEADER + body, question=f"\n\nQuestion: {ASKED.format(name=buildings[0][0])}", answer_prefix="Answer:",
                answers=values, max_new_tokens=192, meta={
                    "index": key.index, "answer_text": gold, "evidence": evidence, "sentences": len(sentences),
                    "spans": [spans[i] for i in evidence], "depth": sum(depths) / len(depths), "depths": depths,
                    "query": [ASKED.format(name=buildings[0][0])]})

        return Draft(build, least=4, estimate=lambda units: essay.tokens(units) + 4 * units)

    def metric(self, prediction: str, example: Example) -> float:
        if self.score == "correctness":
            return metrics.match_all(citations.without_citations(prediction), example.answers)
        return citations.against_evidence(prediction, example.meta["evidence"], [1] * example.meta["sentences"]).f1


def _buildings(rng: random.Random, count: int) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Name, one sentence an attribute, and their values, for each building; no two share a name or a value."""
    adjectives = rng.sample(ADJECTIVES, count)
    years, heights = rng.sample(range(1781, 1969), count), rng.sample(range(11, 98), count)
    keepers = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], count)
    found: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    for i, (adjective, keeper) in enumerate(zip(adjectives, keepers)):
        name = f"the {adjective.capitalize()} {rng.choice(KINDS)}"
        values = (str(years[i]), f"{heights[i]} metres", keeper)
        found.append((name, (f"{_sentence(name)} was opened in {years[i]}.", f"{_sentence(name)} is {heights[i]} metres high.",
                             f"{keeper} looks after {name}."), values))
    return found


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _mixed(around: list[str], facts: list[str], places: list[int]) -> tuple[list[str], list[int]]:
    """Sentences with fact i standing before sentence `places[i]`, and the number of each fact among all."""
    sentences: list[str] = []
    numbers = [0] * len(facts)
    for place in range(len(around) + 1):
        for i, wanted in enumerate(places):
            if wanted == place:
                numbers[i] = len(sentences)
                sentences.append(facts[i])
        sentences += around[place:place + 1]
    return sentences, numbers


def _numbered(sentences: list[str], shift: int) -> tuple[str, list[list[int]]]:
    """The numbered document, and where each sentence stands."""
    pieces, spans, at = [], [], shift
    for number, sentence in enumerate(sentences):
        mark = f"<C{number}>"
        pieces.append(mark + sentence)
        spans.append([at + len(mark), at + len(mark) + len(sentence)])
        at += len(pieces[-1]) + 1
    return " ".join(pieces), spans
