"""The probe on a small machine: who works as what in a town, in documents of one line.

Gold: "{first} {last} works as a {job} in the town." Hard distractors share the first or the last name and have another job;
people with neither name are less alike; easy ones are neutral sentences, random ones sentences of a manual. Each slot's weak
passage is chosen so that the text keeps its length in tokens, whatever the share.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.evaluation.base import Example, Key, encode_continuation, tokenizer_memory
from longspan.evaluation.ink.answers import holds
from longspan.evaluation.ink.construction import HARD, Mix, Nested, Question, check_size, text_of
from longspan.evaluation.ink.pools import EASY, easy_pool
from longspan.evaluation.texts import load_text
from longspan.registry import Refused, nearest

FIRST = ("Anna", "Peter", "Laura", "Simon", "Clara", "Martin", "Helen", "David", "Julia", "Oscar", "Felix", "Rosa", "Hugo",
         "Emma", "Victor", "Alice", "Bruno", "Diana", "Leon", "Maria", "Robert", "Sarah", "Thomas", "Henry", "Lucy", "James")
LAST = ("Moore", "Harris", "Webb", "Jensen", "Grant", "Quinn", "Hughes", "Barnes", "Walsh", "Bennett", "Murray", "Lopez",
        "Hansen", "Gibson", "Adams", "Dunn")
JOBS = ("nurse", "teacher", "doctor", "lawyer", "farmer", "painter", "driver", "pilot", "singer", "writer", "dentist", "soldier",
        "sailor", "tailor", "librarian", "gardener")
SENTENCE = "{name} works as a {job} in the town."
HEADER = "Here are documents about a town.\n\n"
QUESTION = "\n\nWhat does {name} work as?"
PREFIX = "{name} works as a"
HARD_POOLS = ("shared-name", "other-name", "easy")
WEAK_POOLS = ("easy", "random")
RANDOM_TEXT, MANUAL = "pydoc", 300
"""The manual, and about how many of its sentences are drawn from."""
DRIFT = 2
"""Tokens by which weak passages may run ahead of hard ones, or behind."""


@dataclass(frozen=True)
class Person:
    """Somebody in the town."""

    first: str
    last: str
    job: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def question(self) -> Question:
        """What this person works as."""
        return Question(QUESTION.format(name=self.name).strip(), SENTENCE.format(name=self.name, job=self.job), (self.job,))


def drawn(key: Key) -> Person:
    """The person a question asks about."""
    rng = key.rng("gold")
    return Person(rng.choice(FIRST), rng.choice(LAST), rng.choice(JOBS))


def hard_passages(person: Person, pool: str, n: int, rng: random.Random) -> list[str]:
    """The first `n` passages of a hard pool. Nobody comes twice before everybody has come once, then with another job.

    Raises:
        Refused: an unknown pool, or one that holds fewer.
    """
    if pool == "easy":
        return easy_pool(n, rng)
    if pool == "shared-name":
        names = [(first, person.last) for first in FIRST if first != person.first]
        names += [(person.first, last) for last in LAST if last != person.last]
    elif pool == "other-name":
        names = [(first, last) for first in FIRST for last in LAST if first != person.first and last != person.last]
    else:
        raise Refused(f"hard={pool!r}: {nearest(pool, HARD_POOLS, 'pool')}")
    jobs = [job for job in JOBS if job != person.job]
    if n > len(names) * len(jobs):
        raise Refused(f"the hard pool {pool!r} holds {len(names) * len(jobs)} passages for {n} slots; expected no more slots.")
    rng.shuffle(names)
    starts = [rng.randrange(len(jobs)) for _ in names]
    order = ((i, jobs[(starts[i] + turn) % len(jobs)]) for turn in range(len(jobs)) for i in range(len(names)))
    return [SENTENCE.format(name=" ".join(names[i]), job=job) for (i, job), _ in zip(order, range(n))]


def most_hard(pool: str) -> int | None:
    """How many passages a hard pool holds; None without an end."""
    people = {"shared-name": len(FIRST) + len(LAST) - 2, "other-name": (len(FIRST) - 1) * (len(LAST) - 1)}
    return people[pool] * (len(JOBS) - 1) if pool in people else None


def matched(hard: Sequence[str], weak: Sequence[str], count: Callable[[str], int], rng: random.Random) -> list[str]:
    """A weak passage for each hard one, again and again from the same few, so that the tokens of any first ones agree within
    `DRIFT` where lengths allow it."""
    lengths = {passage: count(passage) for passage in weak}
    ahead, found = 0, []
    for passage in hard:
        wanted = ahead + count(passage)
        fitting = [w for w, length in lengths.items() if abs(wanted - length) <= DRIFT]
        if not fitting:
            nearest_length = min(abs(wanted - length) for length in lengths.values())
            fitting = [w for w, length in lengths.items() if abs(wanted - length) == nearest_length]
        found.append(rng.choice(fitting))
        ahead = wanted - lengths[found[-1]]
    return found


def town(key: Key, n: int, tokenizer: Any, hard: str = "shared-name", weak: str = "easy") -> tuple[Person, Nested]:
    """The person of a key, and all contexts with `n` distractors. More distractors keep the passages of fewer."""
    check_size(n)
    person, count = drawn(key), counter(tokenizer)
    passages = hard_passages(person, hard, n, key.rng("hard"))
    easy = list(EASY) if weak == "easy" else random_sentences(person, count)
    gold_slot, *order = key.rng(f"slots/{n}").sample(range(n + 1), n + 1)
    other = matched(passages, easy, count, key.rng("weak"))
    return person, Nested(person.question, gold_slot, tuple(order), tuple(passages), tuple(other))


def random_sentences(person: Person, count: Callable[[str], int]) -> list[str]:
    """Sentences of a manual that are about as long as the gold passage."""
    usual = count(person.question.gold)
    return [sentence for sentence in _manual() if 0.7 * usual <= count(sentence) <= 1.5 * usual]


@functools.lru_cache(maxsize=1)
def _manual() -> tuple[str, ...]:
    """Some sentences from all over the manual, of a line's length and without any job."""
    every = dict.fromkeys(load_text(RANDOM_TEXT).sentences)
    found = [s for s in every if 20 <= len(s) <= 80 and "\n" not in s and s.endswith(".")]
    return tuple(s for s in found[:: max(1, len(found) // MANUAL)] if holds(s, JOBS) is None)


def counter(tokenizer: Any) -> Callable[[str], int]:
    """Counts a passage's tokens, each passage once."""
    known = tokenizer_memory(tokenizer).setdefault("passage tokens", {})

    def count(passage: str) -> int:
        if passage not in known:
            known[passage] = len(encode_continuation(tokenizer, " " + passage))
        return known[passage]

    return count


def example(person: Person, mix: Mix, index: int) -> Example:
    """A context with its question; `meta` says where each passage stands and what it is."""
    body, spans = text_of(mix)
    spans = [[start + len(HEADER), end + len(HEADER)] for start, end in spans]
    return Example(
        context=HEADER + body, question=QUESTION.format(name=person.name), answer_prefix=PREFIX.format(name=person.name),
        answers=(person.job,), max_new_tokens=8,
        meta={"index": index, "depth": mix.gold / max(1, mix.distractors), "spans": [spans[mix.gold]], "documents": spans,
              "kinds": list(mix.kinds), "share": mix.share, "hard": mix.kinds.count(HARD), "distractors": mix.distractors})
