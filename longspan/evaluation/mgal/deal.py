"""The order in which questions are handed out: the places in turn, each question once, none that doesn't fit the length."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from longspan.evaluation.mgal.cores import Asked, Core, reachable
from longspan.evaluation.mgal.units import Unit


class Place(NamedTuple):
    """Thirds of the document and of the paragraph; None: any."""

    turn: str | None
    third: str | None


class Dealt(NamedTuple):
    """A question, the widest unit that may be shown with it, and its third of the document."""

    core: Core
    wide: Unit
    turn: str | None


class Deal:
    """Questions about a corpus in drawn order, found as they are asked for.

    A place without a question left is filled from the same third of the document, then from the other thirds in `places`; the
    deal ends when those hold none either.

    Args:
        widest: paragraphs of the largest unit that may be shown.
        places: which place each question in turn is about.
    """

    def __init__(self, asked: Asked, whole: Unit, widest: int, places: Sequence[Place], rng: random.Random
                 ) -> None:
        self.asked, self.whole, self.widest, self.places = asked, whole, widest, places
        self.order, self.shuffle = rng.sample(range(len(whole)), len(whole)), rng.random()
        self.at = 0
        self.dealt: list[Dealt] = []
        self.gone: set[Hashable] = set()
        self.known: dict[tuple[int, str | None], list[Dealt]] = {}

    def get(self, index: int, fits: Callable[[Dealt], bool]) -> Dealt | None:
        """Question number `index`; None if there are fewer.

        Args:
            fits: whether the smallest unit with a question fits the length; the same in every call.
        """
        while len(self.dealt) <= index:
            if (found := self._next(fits)) is None:
                return None
            self.gone.add(found.core.name)
            self.dealt.append(found)
        return self.dealt[index]

    def _next(self, fits: Callable[[Dealt], bool]) -> Dealt | None:
        place = self.places[len(self.dealt) % len(self.places)]
        others = [Place(other.turn, None) for other in self.places]
        for wanted in dict.fromkeys([place, Place(place.turn, None), *others]):
            for step in range(len(self.order)):
                at = (self.at + step) % len(self.order)
                for one in self._about(self.order[at], wanted.turn):
                    if wanted.third in (None, one.core.third) and self._free(one, fits):
                        self.at = at + 1
                        return one
        return None

    def _free(self, one: Dealt, fits: Callable[[Dealt], bool]) -> bool:
        if one.core.name in self.gone or (one.core.name, one.turn) in self.gone:
            return False
        if not fits(one):
            self.gone.add((one.core.name, one.turn))
            return False
        return True

    def _about(self, k: int, turn: str | None) -> list[Dealt]:
        """All that can be asked about a paragraph in a third of the document."""
        if (k, turn) not in self.known:
            found: list[Dealt] = []
            if (run := reachable(len(self.whole), k, self.widest, turn)) is not None:
                wide, rng = Unit(self.whole.corpus, *run), random.Random(f"{self.shuffle}/{k}/{turn}")
                found = [Dealt(core, wide, turn) for core in self.asked.cores(k, wide, rng, turn)]
            self.known[k, turn] = found
        return self.known[k, turn]
