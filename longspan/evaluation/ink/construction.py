"""Contexts with a growing share of hard distractors: the same slots, the same order, only swapped passages.

Per question everything is drawn once: the gold passage's slot, a random order of the other N slots, and for each of them one
hard and one weak passage. At share p the first n_h = round(p N) slots of the order hold their hard passage, the others their weak
one. So contexts at two shares differ in exactly |n_h - n_h'| slots, and what a question loses between them is due to
these.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longspan.evaluation.ink.answers import holds
from longspan.registry import Refused

GRID = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The published shares."""
GOLD, HARD, WEAK = "gold", "hard", "weak"
TOLERANCE = 0.01
"""By how much of the largest the token totals at two shares may differ."""


@dataclass(frozen=True)
class Question:
    """A question, the passage that answers it, and its right answers (alternatives)."""

    text: str
    gold: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Mix:
    """One context: its passages in order, and what each is (`GOLD`, `HARD` or `WEAK`)."""

    documents: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def gold(self) -> int:
        """Index of the gold passage."""
        return self.kinds.index(GOLD)

    @property
    def hard(self) -> int:
        """How many distractors are hard."""
        return self.kinds.count(HARD)

    @property
    def distractors(self) -> int:
        """How many there are in all."""
        return len(self.kinds) - 1

    @property
    def share(self) -> float:
        """Hard ones among the distractors; 0 without any."""
        return self.hard / self.distractors if self.distractors else 0.0


@dataclass(frozen=True)
class Nested:
    """All contexts of one question.

    Attributes:
        gold_slot: where the gold passage stands among the N + 1 slots.
        order: the other slots, in the order in which they turn hard.
        hard, weak: a slot's two passages, in the order of `order`.

    Raises:
        Refused: N < 1, pools that don't hold N passages, gold missing or doubled, an answer in a distractor.
    """

    question: Question
    gold_slot: int
    order: tuple[int, ...]
    hard: tuple[str, ...]
    weak: tuple[str, ...]

    def __post_init__(self) -> None:
        check_size(self.n)
        if sorted((self.gold_slot, *self.order)) != list(range(self.n + 1)):
            raise ValueError(f"gold slot {self.gold_slot} and order {self.order} are not the slots 0 to {self.n}")
        for name, pool in ((HARD, self.hard), (WEAK, self.weak)):
            if len(pool) != self.n:
                raise Refused(f"{self.n} slots, but {len(pool)} {name} passages; expected one for each slot.")
        check_passages(self.question, (*self.hard, *self.weak))

    @property
    def n(self) -> int:
        """Distractors."""
        return len(self.order)

    def at(self, p: float) -> Mix:
        """The context at share `p`."""
        hard = hard_count(p, self.n)
        return self.kept(hard, hard, self.n - hard)

    def kept(self, start: int, hard: int, weak: int) -> Mix:
        """What is left of the context with `start` hard passages when only `hard` of them and `weak` weak ones stay.

        The first ones of the order stay, whatever their number, so that what is left is nested too.
        """
        if not (0 <= hard <= start and 0 <= weak <= self.n - start):
            raise Refused(f"{hard} hard and {weak} weak passages of a context with {start} and {self.n - start}; expected no "
                          "more than it has.")
        here = {self.gold_slot: (self.question.gold, GOLD)}
        here |= {self.order[i]: (self.hard[i], HARD) for i in range(hard)}
        here |= {self.order[i]: (self.weak[i], WEAK) for i in range(start, start + weak)}
        documents, kinds = zip(*(here[slot] for slot in sorted(here)))
        return Mix(documents, kinds)


def nested(question: Question, hard: Sequence[str], weak: Sequence[str], n: int, rng: random.Random, *,
           count: Callable[[str], int] | None = None, slot: int | None = None) -> Nested:
    """Draw the contexts of one question from its pools.

    Args:
        hard, weak: at least `n` passages each; which are taken, and in which order, is drawn.
        n: distractors.
        count: tokens of a passage. With it, token totals at any two shares must agree within `TOLERANCE`.
        slot: the most tokens a passage may have.

    Raises:
        Refused: as `Nested`; too small a pool; a passage longer than its slot; totals that differ.
    """
    check_size(n)
    for name, pool in ((HARD, hard), (WEAK, weak)):
        if len(pool) < n:
            raise Refused(f"the {name} pool holds {len(pool)} passages for {n} slots; expected at least {n}, or N={len(pool)}.")
    gold_slot, *order = rng.sample(range(n + 1), n + 1)
    made = Nested(question, gold_slot, tuple(order), tuple(rng.sample(list(hard), n)), tuple(rng.sample(list(weak), n)))
    if count is not None:
        check_lengths(made, count, slot)
    return made


def check_size(n: int) -> None:
    """Refuse fewer than one distractor."""
    if n < 1:
        raise Refused(f"N={n}: expected at least 1 distractor.")


def check_passages(question: Question, distractors: Sequence[str]) -> None:
    """Refuse a gold passage that isn't one, or comes again, and a distractor that holds an answer."""
    if not holds(question.gold, question.answers):
        given = ", ".join(question.answers) or "(none given)"
        raise Refused(f"the gold passage {question.gold!r} holds none of the answers {given}; expected one that does.")
    for passage in dict.fromkeys(distractors):
        if passage.strip() == question.gold.strip():
            raise Refused(f"the gold passage {question.gold!r} is also among the distractors; expected it once.")
        if (leaked := holds(passage, question.answers)) is not None:
            raise Refused(f"the distractor {passage!r} holds the answer {leaked!r}; expected pools without it.")


def check_lengths(made: Nested, count: Callable[[str], int], slot: int | None = None) -> None:
    """Refuse passages longer than `slot` tokens, and totals that differ by more than `TOLERANCE` between shares."""
    tokens = {passage: count(passage) for passage in (made.question.gold, *made.hard, *made.weak)}
    for passage, length in tokens.items():
        if slot is not None and length > slot:
            raise Refused(f"the passage {passage[:40]!r}… has {length} tokens, its slot {slot}; cut it, as `cut` does.")
    totals = token_totals(made, count)
    if max(totals) - min(totals) > TOLERANCE * max(totals):
        raise Refused(f"contexts have {min(totals)} to {max(totals)} tokens as the share grows; expected totals within "
                      f"{TOLERANCE:.0%}, as passages cut to one length have.")


def token_totals(made: Nested, count: Callable[[str], int]) -> list[int]:
    """Tokens of all passages with 0, 1, ..., N hard ones."""
    totals = [count(made.question.gold) + sum(map(count, made.weak))]
    for hard, weak in zip(made.hard, made.weak):
        totals.append(totals[-1] + count(hard) - count(weak))
    return totals


# ---------------------------------------------------------------------------------------------------------------- shares


def hard_count(p: float, n: int) -> int:
    """round(p N), halves up.

    Raises:
        Refused: p outside [0, 1], or N < 1.
    """
    check_size(n)
    if not 0 <= p <= 1:
        raise Refused(f"p={p}: expected a share of hard distractors from 0 to 1, such as {1.0 if p > 1 else 0.0}.")
    return int(p * n + 0.5)


def grid(n: int, shares: Sequence[float] = GRID) -> tuple[float, ...]:
    """The shares that give different contexts for N distractors, rising.

    Of shares that give the same number of hard passages, the one nearest to what is really held stays; a warning names the
    others.
    """
    found: dict[int, float] = {}
    for p in sorted(shares):
        hard = hard_count(p, n)
        if hard not in found or abs(p - hard / n) < abs(found[hard] - hard / n):
            found[hard] = p
    kept = tuple(found.values())
    dropped = sorted(set(shares) - set(kept))
    if dropped or len(kept) < len(shares):
        warnings.warn(f"with N={n} some shares ({', '.join(map(str, dropped)) or 'given twice'}) give no new number of hard "
                      f"distractors; {', '.join(map(str, kept))} stay.", stacklevel=2)
    return kept


def text_of(mix: Mix, label: str = "Document {number}: ", separator: str = "\n") -> tuple[str, list[list[int]]]:
    """The passages as one text, and each one's character range in it, without its label."""
    pieces: list[str] = []
    spans: list[list[int]] = []
    at = 0
    for number, document in enumerate(mix.documents, 1):
        named = label.format(number=number)
        spans.append([at + len(named), at + len(named) + len(document)])
        pieces.append(named + document)
        at += len(pieces[-1]) + len(separator)
    return separator.join(pieces), spans

