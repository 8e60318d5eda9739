"""What does filtering really gain: fewer tokens, or cleaner ones?

Four arms start from a context of N distractors and walk through the same lengths.

* *filter hard*: from 80% hard, hard passages alone are deleted.
* *filter random*: from 20% hard, weak passages alone are deleted.
* *proportional*: both kinds are deleted at a fixed share.
* *replace*: hard passages become weak ones at fixed length; its gain is cleanliness and nothing else.

Equal curves of the first two mean that the gain is length, not cleanliness; so do proportional curves that coincide.
(The first three: arXiv:2605.10828; *replace* is inferred.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from longspan.evaluation.ink.construction import Mix, Nested, hard_count
from longspan.registry import Refused

MOST_HARD, LEAST_HARD = 0.8, 0.2


@dataclass(frozen=True)
class Arm:
    """A walk: its name, the share it starts at, and one context a step; the first is the start."""

    name: str
    start: float
    mixes: tuple[Mix, ...]


def filter_hard(contexts: Nested, lengths: Sequence[int], start: float = MOST_HARD) -> Arm:
    """Delete hard passages until so many distractors are left.

    Raises:
        Refused: lengths that don't fall from N, or fewer than the weak passages alone.
    """
    hard = hard_count(start, contexts.n)
    weak = contexts.n - hard
    _check(contexts, lengths, weak, f"filter hard from {start:.0%}")
    return Arm("filter hard", start, tuple(contexts.kept(hard, length - weak, weak) for length in lengths))


def filter_random(contexts: Nested, lengths: Sequence[int], start: float = LEAST_HARD) -> Arm:
    """Delete weak passages until so many distractors are left. Refuses as `filter_hard` does."""
    hard = hard_count(start, contexts.n)
    _check(contexts, lengths, hard, f"filter random from {start:.0%}")
    return Arm("filter random", start, tuple(contexts.kept(hard, hard, length - hard) for length in lengths))


def proportional(contexts: Nested, lengths: Sequence[int], p: float) -> Arm:
    """Delete both kinds so that the share stays."""
    start = hard_count(p, contexts.n)
    _check(contexts, lengths, 1, f"proportional at {p:.0%}")
    steps = [(hard_count(p, length), length) for length in lengths]
    return Arm("proportional", p, tuple(contexts.kept(start, hard, length - hard) for hard, length in steps))


def replace(contexts: Nested, shares: Sequence[float]) -> Arm:
    """Turn hard passages into weak ones at full length; `shares` falls from the start."""
    if not shares or any(b >= a for a, b in pairwise(shares)):
        given = ", ".join(map(str, shares)) or "(none)"
        raise Refused(f"replace through shares {given}: expected falling ones, such as 0.5, 0.1, 0.")
    return Arm("replace", shares[0], tuple(contexts.at(p) for p in shares))


def recovery(arm: float, start: float, clean: float) -> float:
    """(y(arm) - y(start)) / (y(p=0, start length) - y(start)); NaN where nothing was lost."""
    return (arm - start) / (clean - start) if clean != start else math.nan


def _check(contexts: Nested, lengths: Sequence[int], least: int, what: str) -> None:
    if not lengths or lengths[0] != contexts.n or any(b >= a for a, b in pairwise(lengths)):
        given = ", ".join(map(str, lengths)) or "(no)"
        raise Refused(f"{what} through {given} distractors: expected numbers that fall from {contexts.n}.")
    if lengths[-1] < max(1, least):
        raise Refused(f"{what} down to {lengths[-1]} distractors: {least} stay in any case; expected at least {max(1, least)}.")
