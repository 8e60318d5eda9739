"""One colour and one mark per recipe, the same in every table, picture and page, on light and on dark paper.

The dense run is grey: it is the yardstick, not a contestant. The other colours keep their lightness close to each
other and their hues far apart; marks differ too, so that no picture depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

DENSE = "full"

LIGHT = ("#1f6feb", "#c2510a", "#0a8a6a", "#8250df", "#bf3989", "#8a6a00", "#cf222e", "#0b7fa5", "#4d7c0f", "#7a4b2a")
DARK = ("#58a6ff", "#f0883e", "#3fc9a4", "#b18cff", "#f778ba", "#e3b341", "#ff7b72", "#56d4dd", "#a3d65c", "#d2a27f")
MARKS = ("circle", "square", "diamond", "triangle", "cross", "star")


class Look(NamedTuple):
    """How a recipe is drawn."""

    light: str
    dark: str
    mark: str


def looks(recipes: Iterable[str]) -> dict[str, Look]:
    """Look of every recipe, by order of appearance; colours come round again after ten, with another mark."""
    out: dict[str, Look] = {}
    for recipe in recipes:
        if recipe in out:
            continue
        if recipe == DENSE:
            out[recipe] = Look("#57606a", "#9aa4b2", "circle")
            continue
        i = sum(name != DENSE for name in out)
        out[recipe] = Look(LIGHT[i % len(LIGHT)], DARK[i % len(DARK)], MARKS[(i + i // len(LIGHT) + 1) % len(MARKS)])
    return out
