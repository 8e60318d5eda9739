"""Calibration texts: running prose with a few facts hidden in it, and questions about both.

What offline statistics are made from. Texts follow one another in one long text, so no two share a sentence; each
hides three magic numbers. Questions about the numbers have known answers, others (what is this about?) are left to
the model, and alternate with them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longspan.context.document import frame
from longspan.evaluation.base import encode_continuation
from longspan.evaluation.texts import load_text
from longspan.evaluation.words import ADJECTIVES, NOUNS
from longspan.registry import Refused

FACTS = 3
OPEN_QUESTIONS = ("Summarise the text above in a few sentences.",
                  "Which terms does the text above explain, and what do they mean?",
                  "Explain the most important rule in the text above, with an example.")


@dataclass(frozen=True)
class Question:
    """What is read after a text, and the answer's tokens; without any, the model writes its own answer."""

    ids: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A text as tokens, chat template and all, and the questions about it."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]


def calibration(tokenizer: Any, *, contexts: int = 8, questions: int = 2, length: int = 1024, known: bool = False,
                text: str = "pydoc", seed: int = 0) -> list[Reading]:
    """Texts of at most `length` tokens each, nearly that long, with questions.

    Args:
        known: only questions about hidden facts, with their answers; else the model answers all, and every other one
            is about the text as a whole.
        text: a name in `texts.TEXTS`.

    Raises:
        Refused: nothing to calibrate on, more questions than facts, or a length too short for the facts.
    """
    if contexts < 1 or questions < 1:
        raise Refused(f"{contexts} texts with {questions} questions are nothing to calibrate on; expected at least 1 of each.")
    if known and questions > FACTS:
        raise Refused(f"{questions} questions with known answers; a calibration text hides {FACTS} facts; ask at most {FACTS}.")
    rng = random.Random(f"calibration-{seed}")
    sentences = _running(load_text(text).sentences, rng)
    return [_reading(tokenizer, sentences, rng, questions, length, known) for _ in range(contexts)]


def _running(sentences: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    """The text from a random sentence on, over and over."""
    at = rng.randrange(len(sentences))
    while True:
        yield sentences[at % len(sentences)]
        at += 1


def _reading(tokenizer: Any, sentences: Iterator[str], rng: random.Random, questions: int, length: int, known: bool) -> Reading:
    head, foot = frame(tokenizer)
    facts = {f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}": str(rng.randrange(10**6, 10**7)) for _ in range(FACTS)}
    lines = [f"The magic number of the {name} is {number}." for name, number in facts.items()]
    encode = lambda body: tokenizer(head + " ".join(body), add_special_tokens=not head)["input_ids"]  # noqa: E731
    if len(encode(lines)) > length:
        raise Refused(f"calibration texts of {length} tokens: their facts alone take {len(encode(lines))}; ask for more.")
    prose: list[str] = []
    room = length - len(encode(lines))
    while room > 0:  # sentence by sentence: joined they take about as many tokens as apart
        prose.append(next(sentences))
        room -= len(encode_continuation(tokenizer, " " + prose[-1]))
    places = [rng.random() for _ in lines]
    ids = encode(_mixed(prose, lines, places))
    while len(ids) > length:
        prose.pop()
        ids = encode(_mixed(prose, lines, places))
    asked = [_about(tokenizer, *fact, foot, known) for fact in facts.items()]
    if not known:
        general = rng.sample(OPEN_QUESTIONS, len(OPEN_QUESTIONS))
        others = [Question(tuple(encode_continuation(tokenizer, "\n\n" + what + foot))) for what in general]
        asked = [question for pair in zip(asked, others) for question in pair]
    return Reading(tuple(ids), tuple(asked[i % len(asked)] for i in range(questions)))


def _mixed(prose: list[str], lines: list[str], places: list[float]) -> list[str]:
    """The lines between the sentences of the prose, each at its place from 0 to 1."""
    at = sorted((int(place * (len(prose) + 1)), line) for place, line in zip(places, lines))
    body = list(prose)
    for index, line in reversed(at):
        body.insert(index, line)
    return body


def _about(tokenizer: Any, name: str, number: str, foot: str, known: bool) -> Question:
    """A question about a fact, with the first words of its answer."""
    stem = f"The magic number of the {name} is"
    ids = encode_continuation(tokenizer, f"\n\nWhat is the magic number of the {name}?{foot}{stem}")
    return Question(tuple(ids), tuple(encode_continuation(tokenizer, f" {number}")) if known else ())
