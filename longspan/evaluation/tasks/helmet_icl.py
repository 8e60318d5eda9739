"""HELMET's many-shot learning (arXiv:2410.02694): what class is this of, with integers for names?

Labelled sentences fill the context, each class as often as any other; the labels are integers that are drawn anew for every
example, so nothing but the context tells what they mean. The answer must be the right integer. Without a file the sentences are
ours, requests to an assistant of twelve kinds; with a file (``file=``) they are those of TREC, Banking77, CLINC150 or NLU.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.json_lines import rows
from longspan.evaluation.tasks.file_context import row_of
from longspan.evaluation.texts import Text, load_file
from longspan.evaluation.words import ADJECTIVES, NOUNS
from longspan.registry import Refused, knob, method

PERSONS = ("Anna", "Bruno", "Clara", "Dario", "Emil", "Frida", "Gustav", "Helga", "Ivo", "Jana", "Kurt", "Lotte")
TOWNS = ("Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Riga", "Hobart", "Tunis", "Galway", "Turin", "Bergen", "Porto")
HOURS = tuple(f"{hour}:{minute:02}" for hour in range(6, 23) for minute in (0, 15, 30, 45))

KINDS: dict[str, tuple[str, ...]] = {
    "weather": ("Will it rain in {town} at {hour}?", "How cold does it get in {town} tonight?", "Do I need a coat in {town}?"),
    "alarm": ("Wake me at {hour}.", "I have to get up at {hour} to see {person}.", "Ring at {hour} because of the {thing}."),
    "music": ("Put on the song about the {thing}.", "I feel like hearing the {thing} tune.", "Turn up what {person} sings."),
    "call": ("Get {person} on the line.", "Phone {person} about the {thing}.", "I want to talk to {person} in {town} now."),
    "travel": ("Find me a train to {town}.", "Which flights leave for {town} after {hour}?", "Book {person} a seat to {town}."),
    "shopping": ("Order a new {thing}.", "We are out of that {thing}, buy one.", "What does a {thing} cost in {town}?"),
    "recipe": ("How do I cook {thing} soup?", "What can I bake for {person}?", "Which dish comes with {thing} sauce?"),
    "lights": ("Dim the lamp next to the {thing}.", "Make it brighter for {person}.", "Switch off the lamps at {hour}."),
    "translate": ("How do they say {thing} in {town}?", "What is the local word for {thing}?", "Greet {person} in French."),
    "bank": ("Send forty euros to {person}.", "Can I afford the {thing}, after all I spent?", "Block the card I lost in {town}."),
    "health": ("My knee hurts since the walk in {town}.", "Find a dentist near {town}.", "How much sleep does {person} need?"),
    "note": ("Write down that {person} has the {thing}.", "Keep in mind: {thing}, {hour}.", "Add the {thing} to my list."),
}
"""Kinds of requests and how they are worded."""

FIELDS = ("label", "coarse_label", "fine_label", "intent")
"""Where the published data sets keep a row's class."""


@method("helmet-icl", kind="task", system="standard-suites", paper="arXiv:2410.02694",
        summary="Say which class a sentence is of, from many labelled ones whose labels are integers drawn anew.")
class ManyShot(Task):
    """Many-shot classification, exact match; shots are balanced over the classes, as far as their number divides."""

    classes: int = knob(6, "classes of our own", low=2, high=len(KINDS))
    file: str = knob("", "your copy of TREC, Banking77, CLINC150 or NLU as JSON lines with text and a label; ours if left out")
    label: str = knob("label", "the file's field that holds the class", choices=FIELDS)

    @property
    def text(self) -> Text | None:
        return load_file(self.file) if self.file else None

    @property
    def score_name(self) -> str:
        return self.card.name if self.file else f"{self.card.name}-open"

    def available(self, length: int, tokenizer: Any) -> int | None:
        text = self.text
        return None if text is None else sum(map(len, read_classes(text, self.label).values()))

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        asked, right, shot, classes, most = self._of_file(key) if self.file else self._of_our_own(key)
        numbers = list(range(len(classes)))
        key.rng("labels").shuffle(numbers)
        label = dict(zip(classes, numbers))
        rng, order = key.rng("order"), list(classes)
        turns: list[str] = []

        def build(units: int) -> Example:
            while len(turns) < units:  # one of each class, in an order of its own, before any comes again
                rng.shuffle(order)
                turns.extend(order)
            context, spans = HEADER, []
            seen: dict[str, int] = defaultdict(int)
            for kind in turns[:units]:
                start = len(context)
                context += f"{shot(kind, seen[kind])}\nlabel: {label[kind]}\n\n"
                seen[kind] += 1
                spans.append([start, len(context)])
            return Example(
                context=context, question=asked, answer_prefix="label:", answers=(str(label[right]),), max_new_tokens=20,
                meta={"index": key.index, "shots": spans, "stop": ["\n"], "classes": len(classes)})

        return Draft(build, least=min(len(classes), most or len(classes)), most=most)

    def _of_our_own(self, key: Key) -> tuple[str, str, Callable[[str, int], str], list[str], None]:
        classes = sorted(key.rng("classes").sample(sorted(KINDS), self.classes))
        right = key.rng("right").choice(classes)
        asked = request(right, key.rng("asked"))

        def shot(kind: str, number: int) -> str:
            return next(said for again in range(99)
                        if (said := request(kind, key.rng(f"shot/{kind}/{number}/{again}"))) != asked)

        return asked, right, shot, classes, None

    def _of_file(self, key: Key) -> tuple[str, str, Callable[[str, int], str], list[str], int]:
        text = self.text
        assert text is not None
        known = read_classes(text, self.label)
        every = [(kind, said) for kind, texts in sorted(known.items()) for said in texts]
        random.Random(f"{key.task}/{key.seed}").shuffle(every)
        right, asked = row_of(every, key, lambda one: len(one[1]))
        left = {kind: [said for said in texts if said != asked] for kind, texts in sorted(known.items())}
        for kind, texts in left.items():
            key.rng(f"shots/{kind}").shuffle(texts)
            if not texts:
                raise Refused(f"{self.card.name}: {self.file!r} has one text only of class {kind!r}; expected two or more.")
        fewest = min(map(len, left.values()))
        return asked, right, lambda kind, number: left[kind][number], list(left), fewest * len(left)

    def metric(self, prediction: str, example: Example) -> float:
        first = prediction.strip().split("\n")[0].lower().removeprefix("label:")
        return metrics.exact_match(first, example.answers)


HEADER = "Tell the label of the last text, as a number only, from the texts and labels before it.\n\n"


def request(kind: str, rng: random.Random) -> str:
    """A request of a kind."""
    return rng.choice(KINDS[kind]).format(person=rng.choice(PERSONS), town=rng.choice(TOWNS), hour=rng.choice(HOURS),
                                          thing=f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}")


@functools.lru_cache(maxsize=2)
def read_classes(text: Text, label: str) -> dict[str, list[str]]:
    """Texts of each class, in the order of the file."""
    found: dict[str, list[str]] = {}
    for kind, said in rows(text, "a classification set", lambda row: (str(row[label]), " ".join(row["text"].split()))):
        found.setdefault(kind, []).append(said)
    if len(found) < 2:
        raise Refused(f"{text.source!r}: all rows are of class {next(iter(found))!r}; expected two classes or more.")
    return found
