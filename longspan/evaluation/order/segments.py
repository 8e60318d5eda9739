"""Segments of a text that occur once, and pairs of them at log-spaced distances.

A segment is w words from the start of a sentence on. Positions are counted in tokens where the text's tokens are given,
else in characters; a pair's distance is delta = (start_j - start_i) / n, i the earlier one. Distances fall into bins of
equal width in log delta, equally many pairs in each as far as the text has them; within a bin every pair is equally likely,
so both ends are uniform given the distance.
"""

from __future__ import annotations

import bisect
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longspan.registry import Refused

WORDS, BINS, PAIRS = 20, 8, 400
"""Book-SORT's shorter segments (arXiv:2410.08133); bins of distance; pairs of a long text."""
LEAST_SEGMENTS = 4
"""A text shorter than this many segments has no order to ask for."""
SENTENCE_END = re.compile(r"[.!?][\"')\]”’]*$")


@dataclass(frozen=True)
class Segment:
    """Words of a text: the characters [first, last) of it, and where it starts and ends, in tokens or characters."""

    text: str
    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True)
class Pair:
    """Two segments of a text of length `n`, the earlier first. `Refused` when they overlap or start together."""

    earlier: Segment
    later: Segment
    n: int
    bin: int = 0

    def __post_init__(self) -> None:
        if self.later.start <= self.earlier.start:
            raise Refused(f"a pair of segments that start at {self.earlier.start} and {self.later.start}: expected the earlier "
                          "one first, and a distance above 0.")
        if self.later.start < self.earlier.end or self.later.first < self.earlier.last:
            raise Refused(f"the segments at {self.earlier.start} and {self.later.start} overlap; expected the second to start at "
                          f"{self.earlier.end} or later.")

    @property
    def distance(self) -> float:
        """delta, above 0 and below 1."""
        return (self.later.start - self.earlier.start) / self.n

    @property
    def times(self) -> tuple[float, float]:
        """tau = start / n of both."""
        return self.earlier.start / self.n, self.later.start / self.n


def locate(text: str, words: str, starts: Sequence[int] | None = None) -> Segment:
    """The segment that consists of these words.

    Args:
        starts: character at which each token of the text starts; positions are characters without it.

    Raises:
        Refused: the words aren't found exactly once.
    """
    first = text.find(words) if words else -1
    if first < 0 or text.find(words, first + 1) >= 0:
        found = "not found in the text" if first < 0 else "found more than once in the text"
        raise Refused(f"segment {words[:40]!r}: {found}; expected a segment that occurs exactly once.")
    return _placed(words, first, starts)


def _placed(words: str, first: int, starts: Sequence[int] | None) -> Segment:
    last = first + len(words)
    if starts is None:
        return Segment(words, first, last, first, last)
    return Segment(words, first, last, bisect.bisect_right(starts, first) - 1, bisect.bisect_left(starts, last))


def find_segments(text: str, words: int = WORDS, starts: Sequence[int] | None = None) -> list[Segment]:
    """All segments of `words` words that start a sentence and occur once, in order.

    Raises:
        Refused: the text is shorter than four segments.
    """
    spans = [m.span() for m in re.finditer(r"\S+", text)]
    if len(spans) < LEAST_SEGMENTS * words:
        raise Refused(f"a text of {len(spans)} words: expected at least {LEAST_SEGMENTS} segments of {words} words, "
                      f"{LEAST_SEGMENTS * words} words.")
    said = [text[a:b] for a, b in spans]
    cores = [" ".join(said[i + 1 : i + words - 1]) for i in range(len(spans) - words + 1)]
    often = Counter(cores)  # a segment whose inner words come once comes once itself; only the others are searched for
    found = []
    for i, core in enumerate(cores):
        if i and not SENTENCE_END.search(said[i - 1]):
            continue
        first, last = spans[i][0], spans[i + words - 1][1]
        piece = text[first:last]
        if often[core] == 1 or (text.find(piece) == first and text.find(piece, first + 1) < 0):
            found.append(_placed(piece, first, starts))
    return found


def bin_edges(segments: Sequence[Segment], n: int, bins: int = BINS) -> list[float]:
    """Log-spaced edges from the smallest to the largest distance of two segments that don't overlap.

    Raises:
        Refused: all segments overlap.
    """
    begins = [s.start for s in segments]
    least = min((begins[j] - s.start for s in segments if (j := _next(segments, s)) < len(begins)), default=0)
    if not least:
        raise Refused(f"{len(segments)} segments that occur once, all of which overlap; expected a longer text.")
    low, high = math.log(least / n), math.log((begins[-1] - begins[0]) / n)
    return [math.exp(low + (high - low) * b / bins) for b in range(bins + 1)]


def _next(segments: Sequence[Segment], s: Segment) -> int:
    """Index of the first segment that starts where `s` has ended."""
    return bisect.bisect_left(segments, s.end, key=lambda other: other.start)


def sample_pairs(segments: Sequence[Segment], n: int, count: int = PAIRS, rng: random.Random | None = None,
                 bins: int = BINS) -> list[Pair]:
    """About `count` different pairs: equally many from each bin, or all that it has; a remainder goes to bins drawn for it.

    Args:
        n: length of the text, in the unit of the segments' positions.
    """
    rng = random.Random(0) if rng is None else rng
    edges = bin_edges(segments, n, bins)
    further = rng.sample(range(bins), count % bins)
    found: list[Pair] = []
    for b in range(bins):
        found += draw_pairs(segments, n, edges, b, count // bins + (b in further), rng)
    return found


def draw_pairs(segments: Sequence[Segment], n: int, edges: Sequence[float], b: int, wanted: int,
               rng: random.Random) -> list[Pair]:
    """Up to `wanted` different pairs of bin `b`, every pair of the bin equally likely."""
    begins = np.array([s.start for s in segments])
    # Edges are shortest and longest distance: a hair more keeps both ends inside.
    low, high = edges[b] * n * (1 - 1e-9), edges[b + 1] * n * (1 + 1e-9 if b + 2 == len(edges) else 1 - 1e-9)
    first = np.maximum(np.searchsorted(begins, begins + low), [_next(segments, s) for s in segments])
    last = np.maximum(first, np.searchsorted(begins, begins + high))
    reached = np.cumsum(last - first)
    total = int(reached[-1])
    pairs = []
    for flat in sorted(rng.sample(range(total), min(wanted, total))):
        i = int(np.searchsorted(reached, flat, side="right"))
        j = int(last[i] - (reached[i] - flat))
        pairs.append(Pair(segments[i], segments[j], n, b))
    return pairs


def shuffled(sentences: Sequence[str], block: int, rng: random.Random) -> list[str]:
    """Blocks of `block` sentences in a random order: what came first is then presentation alone, not the story's logic."""
    blocks = [list(sentences[a : a + block]) for a in range(0, len(sentences), block)]
    rng.shuffle(blocks)
    return [s for one in blocks for s in one]
