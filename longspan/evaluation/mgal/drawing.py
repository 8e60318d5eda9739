"""Which items of many units are asked: legal ones, balanced over the 3 x 3 places."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence

from longspan.evaluation.mgal.items import (
    FOLLOWING,
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
from longspan.evaluation.mgal.units import Unit, balanced
from longspan.registry import Refused

CELLS = 9
KINDS = ("name", "date", "number")
WORDS, PARAGRAPHS = ("word-extract", "word-choice"), ("paragraph-fill", "paragraph-translate")


def legal_words(unit: Unit, options: int = 0, kinds: Sequence[str] = KINDS) -> Iterator[Spot]:
    """Spots of a unit that can be asked; with `options`, those with enough strings of their kind."""
    for k in range(unit.first, unit.end):
        for spot in spots(unit.corpus, k):
            if spot.kind in kinds and word_is_legal(unit, spot) and (not options or len(same_kind(unit, spot)) >= options - 1):
                yield spot


def legal_gaps(unit: Unit, options: int = 10, following: int = FOLLOWING, crowding: Sequence[int] = (0, 9)) -> Iterator[Gap]:
    """Sentences of a unit that can be taken out, with wrong options for every crowding asked."""
    for k in range(unit.first, unit.end):
        yield from (gap for gap in gaps(unit.corpus, k) if cloze_is_legal(unit, gap, options, following, crowding))


def word_items(found: Sequence[Unit], n: int, language: str, *, task: str = "word-choice", options: int = 10,
               kinds: Sequence[str] = KINDS, seed: int = 0, balance: bool = True) -> list[Item]:
    """`n` items of the units, balanced over places unless told not to; the same ids in every language.

    Raises:
        Refused: fewer legal items; the sentence says how many there are.
    """
    wanted = options if task == "word-choice" else 0
    made = [word_item(unit, spot, "en", task, options, seed=seed) for unit in found for spot in legal_words(unit, wanted, kinds)]
    chosen = _drawn(made, n, seed, balance)
    return [word_item(item.unit, _spot(item), language, task, options, seed=seed) for item in chosen]


def cloze_items(found: Sequence[Unit], n: int, language: str, crowding: Sequence[int] = (0, 3, 6, 9), *, options: int = 10,
                following: int = FOLLOWING, seed: int = 0, balance: bool = True) -> dict[int, list[Item]]:
    """The same `n` gaps at each crowding."""
    pairs = {}
    for unit in found:
        for gap in legal_gaps(unit, options, following, crowding):
            item = cloze_item(unit, gap, "en", crowding[0], options, following, seed)
            pairs[item.id] = (item, gap)
    chosen = _drawn([item for item, _ in pairs.values()], n, seed, balance)
    return {c: [cloze_item(item.unit, pairs[item.id][1], language, c, options, following, seed) for item in chosen]
            for c in crowding}


def paragraph_items(found: Sequence[Unit], n: int, language: str, task: str = "paragraph-fill", direction: str = "into",
                    seed: int = 0) -> list[Item]:
    """`n` paragraphs of the units, balanced over the thirds of the document."""
    if task not in PARAGRAPHS:
        raise Refused(f"task {task!r}: expected {' or '.join(PARAGRAPHS)}.")
    made = [fill_item(unit, k, language) if task == "paragraph-fill" else translate_item(unit, k, language, direction)
            for unit in found for k in range(unit.first, unit.end)]
    return balanced(made, n, lambda item: item.place and item.place[0], random.Random(f"{task}/{seed}"), f"{task} items", 3)


def document_items(found: Sequence[Unit], language: str, task: str = "document-summary", direction: str = "into") -> list[Item]:
    """One item a unit."""
    return [summary_item(unit, language) if task == "document-summary" else translate_item(unit, None, language, direction)
            for unit in found]


def cell(item: Item) -> Hashable:
    """The item's place among the nine; None where its paragraph is too short for one."""
    return None if item.place is None or item.place[1] is None else item.place


def _drawn(made: Sequence[Item], n: int, seed: int, balance: bool) -> list[Item]:
    rng, what = random.Random(f"items/{seed}"), f"{made[0].task if made else ''} items".strip()
    if balance:
        return balanced(made, n, cell, rng, what, CELLS)
    return balanced(made, n, lambda _: 0, rng, what, 1)


def _spot(item: Item) -> Spot:
    return Spot(int(item.id.split("/")[2]), item.gold, str(item.details["kind"]))
