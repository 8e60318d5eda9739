"""What is asked about a paragraph, whatever else is shown around it.

A core is legal in the widest unit that could be shown, so it is in every unit that fits; its wrong options come from its own
surroundings, so they are the same in all of these.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
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
from longspan.evaluation.mgal.units import Unit

FARTHEST = 5
"""Paragraphs on each side within which wrong options are looked for."""


class Core(NamedTuple):
    """Paragraph `paragraph` is asked about; `pool` must be shown; `make(unit, language)` is the item; `third` its place."""

    pool: Unit
    paragraph: int
    third: str | None
    make: Callable[[Unit, str], Item]


class Asked(NamedTuple):
    """The task and its knobs."""

    task: str
    options: int
    crowding: int
    direction: str

    def cores(self, k: int, wide: Unit, rng: random.Random) -> Iterator[Core]:
        """All that can be asked about paragraph `k`, in drawn order."""
        if self.task in ("word-extract", "word-choice"):
            yield from self._words(k, wide, rng)
        elif self.task == "sentence-cloze":
            yield from self._gaps(k, wide, rng)
        else:
            yield Core(Unit(wide.corpus, k, k + 1), k, None, functools.partial(self._whole, k))

    def _words(self, k: int, wide: Unit, rng: random.Random) -> Iterator[Core]:
        found = [spot for spot in spots(wide.corpus, k) if word_is_legal(wide, spot)]
        for spot in rng.sample(found, len(found)):
            pools = around(wide, k) if self.task == "word-choice" else [Unit(wide.corpus, k, k + 1)]
            pool = next((p for p in pools if self.task == "word-extract" or len(same_kind(p, spot)) >= self.options - 1), None)
            if pool is not None:
                make = functools.partial(self._word, spot, pool)
                yield Core(pool, k, _third(make(pool, "en")), make)

    def _gaps(self, k: int, wide: Unit, rng: random.Random) -> Iterator[Core]:
        for gap in rng.sample(found := gaps(wide.corpus, k), len(found)):
            pool = next((p for p in around(wide, k)
                         if cloze_is_legal(p, gap, self.options, crowding=(self.crowding,), unique_in=wide)), None)
            if pool is not None:
                make = functools.partial(self._gap, gap, pool)
                yield Core(pool, k, _third(make(pool, "en")), make)

    def _word(self, spot: Spot, pool: Unit, unit: Unit, language: str) -> Item:
        return word_item(unit, spot, language, self.task, self.options, pool)

    def _gap(self, gap: Gap, pool: Unit, unit: Unit, language: str) -> Item:
        return cloze_item(unit, gap, language, self.crowding, self.options, pool=pool)

    def _whole(self, k: int, unit: Unit, language: str) -> Item:
        if self.task == "document-summary":
            return summary_item(unit, language)
        if self.task == "paragraph-fill":
            return fill_item(unit, k, language)
        return translate_item(unit, None if self.task == "document-translate" else k, language, self.direction)


def around(wide: Unit, k: int) -> list[Unit]:
    """Growing units around a paragraph, inside `wide`."""
    found = (Unit(wide.corpus, max(wide.first, k - r), min(wide.end, k + r + 1)) for r in range(1, FARTHEST + 1))
    return list(dict.fromkeys(found))


def placed(core: Core, wide: Unit, units: int, at: float) -> Unit:
    """A unit of so many paragraphs inside `wide` that holds the core, its paragraph at share `at` where that can be."""
    first = max(core.pool.end - units, min(core.pool.first, core.paragraph - int(at * units)))
    first = max(wide.first, min(first, wide.end - units))
    return Unit(wide.corpus, first, first + units)


def _third(item: Item) -> str | None:
    return None if item.place is None else item.place[1]
