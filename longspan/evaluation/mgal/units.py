"""Units: runs of consecutive aligned paragraphs, the same ones in every language, and places in them.

A unit of T tokens is a run whose *English* tokens are within 2% of T. Each language's own count is kept beside it: tokenizers
differ, so results are compared over the same content, never over the same number of tokens.

Places are thirds: of the paragraph's index in the unit, and of the sentence's index in its paragraph. A paragraph of fewer than
three sentences has a place in the document only.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from longspan.evaluation.mgal.corpus import ENGLISH, Aligned
from longspan.registry import Refused

GAP = "\n\n"
"""Stands between paragraphs."""
TOLERANCE = 0.02
THIRDS = ("begin", "middle", "end")
T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """Paragraphs `first` to `end` - 1 of a corpus."""

    corpus: Aligned
    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end <= len(self.corpus):
            raise Refused(f"paragraphs {self.first} to {self.end} of a corpus of {len(self.corpus)}; expected a run inside it.")

    def __len__(self) -> int:
        return self.end - self.first

    def paragraphs(self, language: str) -> tuple[str, ...]:
        return self.corpus.of(language)[self.first : self.end]

    def text(self, language: str) -> str:
        return _text(self, language)

    def start(self, paragraph: int, language: str) -> int:
        """Where a paragraph (index in the corpus) begins in the unit's text, in characters."""
        return sum(len(text) + len(GAP) for text in self.corpus.of(language)[self.first : paragraph])

    def tokens(self, count: Callable[[str], int]) -> dict[str, int]:
        """Tokens in each language."""
        return {language: count(self.text(language)) for language in self.corpus.languages}


@functools.lru_cache(maxsize=128)
def _text(unit: Unit, language: str) -> str:
    return GAP.join(unit.paragraphs(language))


def units(corpus: Aligned, paragraphs: int) -> list[Unit]:
    """All whole units of so many paragraphs, side by side.

    Raises:
        Refused: fewer paragraphs in the corpus, or none asked for.
    """
    if not 1 <= paragraphs <= len(corpus):
        raise Refused(f"units of {paragraphs} paragraphs: {corpus.source} has {len(corpus)}; expected 1 to {len(corpus)}.")
    return [Unit(corpus, at, at + paragraphs) for at in range(0, len(corpus) - paragraphs + 1, paragraphs)]


def units_of_tokens(corpus: Aligned, tokens: int, count: Callable[[str], int]) -> list[Unit]:
    """All units of `tokens` English tokens within `TOLERANCE`, side by side; a start with no such run is passed over.

    Args:
        count: tokens of a text.

    Raises:
        Refused: T below 1, larger than the corpus, or no run of that length (paragraphs are too long for it).
    """
    each = [count(text + GAP) for text in corpus.of(ENGLISH)]
    whole = count(GAP.join(corpus.of(ENGLISH)))
    if tokens < 1 or tokens > whole * (1 + TOLERANCE):
        raise Refused(f"units of T={tokens} tokens: {corpus.source} has {whole} English tokens; expected 1 to {whole}.")
    found, first = [], 0
    while first < len(corpus):
        unit = _run(corpus, first, tokens, each, count)
        found += [] if unit is None else [unit]
        first = first + 1 if unit is None else unit.end
    if not found:
        raise Refused(f"units of T={tokens} tokens: no run of paragraphs of {corpus.source} comes within {TOLERANCE:.0%} of it; "
                      f"ask for more, such as {max(each) * 20}.")
    return found


def _run(corpus: Aligned, first: int, tokens: int, each: Sequence[int], count: Callable[[str], int]) -> Unit | None:
    for end, total in enumerate(accumulate(each[first:]), first + 1):
        if total > tokens * (1 + 2 * TOLERANCE):
            return None
        # A sum over paragraphs may differ by a token at each seam: count the text itself where it comes near.
        if total >= tokens * (1 - 2 * TOLERANCE):
            unit = Unit(corpus, first, end)
            if abs(count(unit.text(ENGLISH)) - tokens) <= TOLERANCE * tokens:
                return unit
    return None


# ---------------------------------------------------------------------------------------------------------------- places


def third(index: int, count: int) -> str:
    """Begin, middle or end."""
    return THIRDS[3 * index // count]


def paragraph_third(index: int, count: int) -> str | None:
    """Place of a sentence in its paragraph; None where the paragraph has fewer than three."""
    return third(index, count) if count >= 3 else None


def balanced(found: Iterable[T], n: int, cell: Callable[[T], Hashable], rng: random.Random, what: str = "items",
             cells: int = 9) -> list[T]:
    """`n` of the candidates, each cell as often as any other or once more; which ones is drawn.

    Args:
        cell: the cell of a candidate; candidates of cell None are passed over.
        cells: how many cells there are.

    Raises:
        Refused: some cells hold too few; the sentence says how many items there are and how many balance.
    """
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for candidate in found:
        if (where := cell(candidate)) is not None:
            groups[where].append(candidate)
    for group in groups.values():
        rng.shuffle(group)
    short = min(map(len, groups.values())) if len(groups) == cells else 0
    fitting = short * cells + sum(len(group) > short for group in groups.values())
    if n > fitting:
        total = sum(map(len, groups.values()))
        raise Refused(f"{n} {what}: only {total} legal ones exist, {fitting} of them balanced over {cells} places; expected at "
                      f"most {fitting}.")
    deal = sorted(groups, key=lambda where: (-len(groups[where]), str(where)))
    return [groups[deal[i % cells]][i // cells] for i in range(n)]
