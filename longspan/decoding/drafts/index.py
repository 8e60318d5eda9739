"""An index of runs of tokens: where the longest repetition of the latest tokens stands, in one text or many.

A hash of every run of a few lengths (the shortest that counts, then doubled up to the longest) gives the places right
after it. The longest run that is known leads to all places whose match is longest, for a match between two of these
lengths has the shorter one in the hash as well; comparing token by token then says which places those are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]
"""A text of the index, and an offset in it: the token that follows a run."""


@dataclass(frozen=True)
class Match:
    """The longest repetition found: its length in tokens, and the places after it, oldest first."""

    length: int = 0
    places: tuple[Place, ...] = ()


class RunIndex:
    """Runs of `shortest` to `longest` tokens in the texts added, and in one text that still grows."""

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"runs of {shortest} to {longest} tokens: expected 1 <= shortest <= longest")
        self.shortest, self.longest = shortest, longest
        self.depths = [n for i in range(longest.bit_length()) if (n := shortest << i) <= longest]
        self.texts: list[Sequence[int]] = [()]
        """The growing text is the first."""
        self.ends: dict[tuple[int, ...], list[Place]] = {}
        self.followed = 0

    def __len__(self) -> int:
        """Tokens of the texts added."""
        return sum(map(len, self.texts[1:]))

    def add(self, text: Sequence[int], first: int = 1) -> None:
        """Take in a finished text; only what follows its first `first` tokens is ever found."""
        self.texts.append(text)
        self._index(len(self.texts) - 1, max(first, 1), len(text))

    def follow(self, ids: Sequence[int]) -> None:
        """Take in what the growing text has now. Its last run is left out: it is what is looked up."""
        self.texts[0] = ids
        self._index(0, self.followed + 1, len(ids))
        self.followed = max(self.followed, len(ids) - 1)

    def find(self, ids: Sequence[int], most: int | None = None) -> Match:
        """The longest run at the end of `ids` that stands in a text with something after it; at most the latest `most`
        places are looked at."""
        for depth in reversed(self.depths):
            found = self.ends.get(tuple(ids[len(ids) - depth :]), []) if depth <= len(ids) else []
            if found:
                found = found[-most:] if most else found
                lengths = [self._match(ids, place) for place in found]
                best = max(lengths)
                return Match(best, tuple(place for place, n in zip(found, lengths) if n == best))
        return Match()

    def after(self, places: Sequence[Place], count: int) -> tuple[int, ...]:
        """The most frequent continuation, up to `count` tokens: at each step the token that most of the places still in
        agreement have next, of equally many the latest."""
        out: list[int] = []
        for i in range(count):
            places = [(t, at) for t, at in places if at + i < len(self.texts[t])]
            if not places:
                break
            following = [self.texts[t][at + i] for t, at in places]
            token = max(reversed(following), key=Counter(following).__getitem__)
            places = [place for place, found in zip(places, following) if found == token]
            out.append(token)
        return tuple(out)

    def _index(self, text: int, first: int, last: int) -> None:
        tokens = self.texts[text]
        for end in range(first, last):
            for depth in self.depths:
                if depth <= end:
                    self.ends.setdefault(tuple(tokens[end - depth : end]), []).append((text, end))

    def _match(self, ids: Sequence[int], place: Place) -> int:
        """Tokens before `place` that equal those before the end of `ids`, up to `longest`."""
        text, end = self.texts[place[0]], place[1]
        length, most = 0, min(self.longest, end, len(ids))
        while length < most and text[end - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        return length
