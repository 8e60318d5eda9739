"""What needle tasks share: haystack units, where needles go, and where they ended up."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from longspan.evaluation.base import encode_continuation, tokenizer_memory
from longspan.evaluation.texts import Text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The noise of passkey tasks (Mohtashami and Jaggi, arXiv:2305.16300): one unit a line."""

RULER_DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))
"""RULER's forty depths, 0 to 1, rounded to whole per cent."""


@dataclass(frozen=True)
class Essay:
    """Sentences of a text from sentence `start` on, from the top again at the end."""

    text: Text
    start: int
    tokenizer: Any

    def take(self, count: int) -> list[str]:
        """The first `count` sentences."""
        sentences = self.text.sentences
        return [sentences[(self.start + i) % len(sentences)] for i in range(count)]

    def tokens(self, count: int) -> float:
        """About how many tokens they take: each sentence is counted once for a tokenizer and remembered."""
        known = tokenizer_memory(self.tokenizer).setdefault(("sentence tokens", self.text.sha256), {})
        sentences = self.text.sentences
        rounds, rest = divmod(count, len(sentences))
        found = sum(self._count(known, (self.start + i) % len(sentences)) for i in range(rest))
        if rounds:
            found += rounds * sum(self._count(known, i) for i in range(len(sentences)))
        return found

    def _count(self, known: dict[int, int], index: int) -> int:
        if index not in known:
            known[index] = len(encode_continuation(self.tokenizer, " " + self.text.sentences[index]))
        return known[index]


def noise(count: int) -> list[str]:
    """`count` units of noise."""
    return [NOISE] * count


def grid_depth(index: int, depths: int) -> float:
    """Depth number `index` of a grid of `depths` values from 0 to 1.

    The grid is walked with a stride near the golden section, so that the first few examples already spread over the
    whole context; after `depths` examples each value has come once.
    """
    if depths == 1:
        return 0.5
    strides = (s for s in range(round(depths * 0.618), depths + 1) if _coprime(s, depths))
    return (index * next(strides, 1)) % depths / (depths - 1)


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def spread_depth(seed: int, index: int) -> float:
    """Depth in [0, 1) of example `index`: steps of the golden section from a start given by the seed, evenly spread."""
    return (random.Random(f"depth/{seed}").random() + index * 0.6180339887498949) % 1.0


def at_characters(units: list[str], depth: float) -> int:
    """How many `units` come before a needle at `depth`: back from that share of the characters to a unit's end."""
    target, reached = depth * sum(len(unit) for unit in units), 0
    for count, unit in enumerate(units):
        reached += len(unit)
        if reached > target:
            return count
    return len(units)


def insert(units: list[str], needles: list[str], before: list[int], separator: str,
           shift: int = 0) -> tuple[str, list[list[int]]]:
    """Units joined by `separator`, needle i standing before unit `before[i]` (len(units): at the end).

    Needles at the same place keep their order. Returns the text and each needle's character range in it, moved by
    `shift` for a header that will be put in front.
    """
    places: dict[int, list[int]] = {}
    for needle, place in enumerate(before):
        places.setdefault(place, []).append(needle)
    pieces: list[str] = []
    spans = [[0, 0] for _ in needles]
    at = shift
    for place in range(len(units) + 1):
        here = [(needles[i], i) for i in places.get(place, [])]
        if place < len(units):
            here.append((units[place], -1))
        for piece, needle in here:
            if needle >= 0:
                spans[needle] = [at, at + len(piece)]
            pieces.append(piece)
            at += len(piece) + len(separator)
    return separator.join(pieces), spans
