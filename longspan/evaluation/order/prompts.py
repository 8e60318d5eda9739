"""What is asked: the text first, then two of its segments, in both orders, and which of them came first.

The text comes before the question, so one reading of it serves all pairs. Labels have to be single tokens behind the
answer's first words, since the next-token logits of the two are compared.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspan.context.units import token_starts
from longspan.evaluation.base import Example, encode_continuation, prompt_parts
from longspan.evaluation.order.segments import LEAST_SEGMENTS, Pair, locate
from longspan.registry import Refused

INSTRUCTION = "Read the following text. A question about the order of two segments of it comes at the end.\n\n"
QUESTION = ("\n\nSegment {a}: {first}\n\nSegment {b}: {second}\n\nWhich segment appeared first in the text? "
            "Answer {a} or {b}:")
PREFIX = "The segment that appeared first is Segment"
LABELS = ("A", "B")
OTHERS = (("1", "2"), ("X", "Y"), ("P", "Q"), ("C", "D"))
"""Labels to offer where A and B aren't single tokens."""


@dataclass(frozen=True)
class Suffix:
    """A question as token ids, and where the copies of segments A and B lie in it, as (first, end) tokens."""

    ids: list[int]
    spans: tuple[tuple[int, int], tuple[int, int]]
    first_is_a: bool
    """Whether the segment called A is the earlier one."""


def question(first: str, second: str, labels: Sequence[str] = LABELS) -> str:
    """The question about two segments, shown in this order."""
    return QUESTION.format(a=labels[0], b=labels[1], first=first, second=second)


def orders(pair: Pair) -> tuple[tuple[str, str, bool], tuple[str, str, bool]]:
    """Both ways to ask: what A is, what B is, and whether A is the earlier one. The second exchanges A and B."""
    a, b = pair.earlier.text, pair.later.text
    return (a, b, True), (b, a, False)


def exchange(order: tuple[str, str, bool]) -> tuple[str, str, bool]:
    """The same pair with A and B exchanged."""
    a, b, first_is_a = order
    return b, a, not first_is_a


def label_ids(tokenizer: Any, labels: Sequence[str] = LABELS) -> tuple[int, int]:
    """Token ids of the two labels as they continue the answer.

    Raises:
        Refused: a label takes several tokens, or both begin alike; names labels that would do.
    """
    found = _single(tokenizer, labels)
    if found is None:
        fits = next((pair for pair in OTHERS if _single(tokenizer, pair) is not None), None)
        offer = f"such as labels={fits}" if fits else "which this tokenizer has none of among letters and digits"
        raise Refused(f"labels={tuple(labels)}: not two different single tokens for this tokenizer; expected labels that are, "
                      f"{offer}.")
    return found


def _single(tokenizer: Any, labels: Sequence[str]) -> tuple[int, int] | None:
    ids = [encode_continuation(tokenizer, " " + label) for label in labels]
    if len(ids) != 2 or any(len(i) != 1 for i in ids) or ids[0] == ids[1]:
        return None
    return ids[0][0], ids[1][0]


def example(text: str, a: str, b: str, labels: Sequence[str] = LABELS) -> Example:
    """The prompt as an example without an answer."""
    return Example(INSTRUCTION + text if text else INSTRUCTION, question(a, b, labels), PREFIX, (labels[0],), 2)


def suffix(tokenizer: Any, order: tuple[str, str, bool], labels: Sequence[str] = LABELS) -> Suffix:
    """The question as token ids, with the places of both copies in it. `Refused` when a copy can't be found there once."""
    a, b, first_is_a = order
    ids = prompt_parts(example("", a, b, labels), tokenizer).question_ids
    shown, starts = token_starts(tokenizer, ids)
    where = []
    for label, copy in zip(labels, (a, b)):
        lead = f"Segment {label}: "
        found = locate(shown, lead + copy)
        at = found.first + len(lead)
        where.append((bisect.bisect_right(starts, at) - 1, bisect.bisect_left(starts, found.last)))
    return Suffix(ids, (where[0], where[1]), first_is_a)


@dataclass(frozen=True)
class Prepared:
    """A text as it will be read: its token ids, template and instruction included, and where its own tokens lie.

    `starts` gives the character of the text at which each of its n tokens starts; `offset` tokens come before them.
    """

    text: str
    ids: list[int]
    starts: list[int]
    offset: int

    @property
    def n(self) -> int:
        return len(self.starts)


def prepare(tokenizer: Any, text: str) -> Prepared:
    """The text behind the instruction, as token ids. An empty text gives the prompt of the control without a text.

    Raises:
        Refused: a text of a single token, or one that the tokenizer doesn't give back.
    """
    ids = prompt_parts(example(text, "a", "b"), tokenizer).context_ids
    if not text:
        return Prepared("", ids, [], len(ids))
    shown, starts = token_starts(tokenizer, ids)
    if not shown.endswith(text):
        raise Refused(f"the tokenizer doesn't give the text {text[:40]!r} back as it was; expected one that does.")
    first = len(shown) - len(text)
    offset = bisect.bisect_right(starts, first) - 1
    own = [max(0, at - first) for at in starts[offset:]]
    if len(own) < 2:
        raise Refused(f"a text of {len(own)} token: expected one with at least {LEAST_SEGMENTS} segments.")
    return Prepared(text, ids, own, offset)
