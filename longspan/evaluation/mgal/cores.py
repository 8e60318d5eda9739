"""What is asked about a paragraph, whatever else is shown around it.

A core is legal in the widest unit that could be shown, so it is in every unit that fits; its wrong options come from its own
surroundings, so they are the same in all of these. The surroundings hold the paragraph in the third of the document that is
asked for, so that every unit with them can do so too.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from longspan.evaluation.mgal.items import (
    Gap,
    Item,
    Spot,
    cloze_is_legal,
    cloze_item,
    fill_item,
    gaps,
    same_kind,
    spots,
    summary_item,
    translate_item,
    word_is_legal,
    word_item,
)
from longspan.evaluation.mgal.units import THIRDS, Unit

FARTHEST = 5
"""Twice as many paragraphs beside the one asked about are the most among which wrong options are looked for."""


class Core(NamedTuple):
    """Paragraph `paragraph` is asked about; `pool` must be shown; `make(unit, language)` is the item.

    `third` is its place in the paragraph, None where it has none or another one in some language; `name` names what is asked.
    """

    pool: Unit
    paragraph: int
    third: str | None
    make: Callable[[Unit, str], Item]
    name: Hashable


class Asked(NamedTuple):
    """The task and its knobs."""

    task: str
    options: int
    crowding: int
    direction: str

    def cores(self, k: int, wide: Unit, rng: random.Random, turn: str | None) -> Iterator[Core]:
        """All that can be asked about paragraph `k` in third `turn` of the document, in drawn order."""
        pools = around(wide, k, turn)
        if not pools:
            return
        if self.task in ("word-extract", "word-choice"):
            yield from self._words(k, wide, rng, pools)
        elif self.task == "sentence-cloze":
            yield from self._gaps(k, wide, rng, pools)
        else:
            yield Core(pools[0], k, None, functools.partial(self._whole, k), k)

    def _words(self, k: int, wide: Unit, rng: random.Random, pools: list[Unit]) -> Iterator[Core]:
        least = self.options - 1 if self.task == "word-choice" else 0
        found = [spot for spot in spots(wide.corpus, k) if word_is_legal(wide, spot)]
        for spot in rng.sample(found, len(found)):
            pool = next((p for p in pools if not least or len(same_kind(p, spot, same_form=True)) >= least), None)
            if pool is not None:
                make = functools.partial(self._word, spot, pool)
                yield Core(pool, k, _third(make, pool), make, spot)

    def _gaps(self, k: int, wide: Unit, rng: random.Random, pools: list[Unit]) -> Iterator[Core]:
        for gap in rng.sample(found := gaps(wide.corpus, k), len(found)):
            pool = next((p for p in pools
                         if cloze_is_legal(p, gap, self.options, crowding=(self.crowding,), unique_in=wide)), None)
            if pool is not None:
                make = functools.partial(self._gap, gap, pool)
                yield Core(pool, k, _third(make, pool), make, gap)

    def _word(self, spot: Spot, pool: Unit, unit: Unit, language: str) -> Item:
        return word_item(unit, spot, language, self.task, self.options, pool, same_form=True)

    def _gap(self, gap: Gap, pool: Unit, unit: Unit, language: str) -> Item:
        return cloze_item(unit, gap, language, self.crowding, self.options, pool=pool)

    def _whole(self, k: int, unit: Unit, language: str) -> Item:
        if self.task == "document-summary":
            return summary_item(unit, language)
        if self.task == "paragraph-fill":
            return fill_item(unit, k, language)
        return translate_item(unit, None if self.task == "document-translate" else k, language, self.direction)


def indices(turn: str | None, count: int) -> range:
    """Which of `count` paragraphs are in a third of the document; without one, all."""
    if turn is None:
        return range(count)
    at = THIRDS.index(turn)
    return range(-(-at * count // 3), -(-(at + 1) * count // 3))


def reachable(corpus_length: int, k: int, units: int, turn: str | None) -> tuple[int, int] | None:
    """First and end of all runs of `units` paragraphs that hold paragraph `k` in third `turn`; None if there are none.

    Without a turn the run begins with the paragraph: a whole document has no place, and differs from all others then.
    """
    if turn is None:
        return (k, k + units) if k + units <= corpus_length else None
    own = indices(turn, units)
    if not own or max(0, k - own[-1]) > min(k - own[0], corpus_length - units):
        return None
    return max(0, k - own[-1]), min(corpus_length, k - own[0] + units)


def around(wide: Unit, k: int, turn: str | None) -> list[Unit]:
    """Growing units with paragraph `k` in third `turn`, inside `wide`; the paragraph alone without a turn."""
    if turn is None:
        return [Unit(wide.corpus, k, k + 1)]
    found = []
    for count in range(3, 2 * FARTHEST + 2, 2):
        first = k - {"begin": indices(turn, count)[-1], "middle": count // 2, "end": indices(turn, count)[0]}[turn]
        if wide.first <= first and first + count <= wide.end:
            found.append(Unit(wide.corpus, first, first + count))
    return found


def placed(core: Core, wide: Unit, units: int, turn: str | None, share: float) -> Unit | None:
    """The run of so many paragraphs inside `wide` at `share` (0 to 1) of all that hold the core in its third; None without."""
    own = indices(turn, units)
    if not own:
        return None
    low = max(wide.first, core.pool.end - units, core.paragraph - own[-1])
    high = min(wide.end - units, core.pool.first, core.paragraph - own[0])
    if low > high:
        return None
    first = low + int(share * (high - low + 1))
    return Unit(wide.corpus, first, first + units)


def _third(make: Callable[[Unit, str], Item], pool: Unit) -> str | None:
    found = {item.place and item.place[1] for item in (make(pool, language) for language in pool.corpus.languages)}
    return found.pop() if len(found) == 1 else None
