"""Prose with hidden lines, which several experiments ask about: plain English sentences of the installed text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from longspan.evaluation.texts import load_text


def plain_prose() -> list[str]:
    """Sentences of ordinary words, without the marks of documentation."""
    bare = (re.sub(r"[*`\"|]+", "", s) for s in load_text("pydoc").sentences)
    return [s for s in bare if re.fullmatch(r"[A-Z][\w ,;'()-]{40,}\.", s)]


def hide(lines: Sequence[str], prose: Sequence[str], tokens: int, count: Callable[[str], int], rng: random.Random) -> list[str]:
    """Consecutive sentences of `prose` with `lines` at random places between them, `tokens` or a little more in all.

    Args:
        count: tokens of a text.
    """
    start, length = rng.randrange(len(prose)), sum(count(" " + line) for line in lines)
    body: list[str] = []
    while length < tokens:
        body.append(prose[(start + len(body)) % len(prose)])
        length += count(" " + body[-1])
    for place, line in zip(sorted(rng.sample(range(1, len(body)), len(lines)), reverse=True), lines):
        body.insert(place, line)
    return body
