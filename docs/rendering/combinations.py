"""Which methods go together: every pair is built the way a user's recipe is, and says yes or why not.

Nothing is run. What depends on the prompt (a budget smaller than what a score always keeps) can't show here.
"""

from __future__ import annotations

from collections.abc import Callable

from longspan.recipe import Recipe
from longspan.registry import Card, Refused
from rendering.cards import own
from rendering.text import cell, code, table

YES = "yes"


def attempt(recipe: str) -> str:
    """Empty if the recipe can be built, else the sentence it is refused with."""
    try:
        Recipe.parse(recipe)
    except Refused as refusal:
        return str(refusal)
    return ""


def names(kind: str) -> list[str]:
    return [card.name for card in own() if card.kind == kind]


class Reasons:
    """Refusals of one table, each numbered once."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def cell(self, recipe: str) -> str:
        reason = attempt(recipe)
        if not reason:
            return YES
        if reason not in self.known:
            self.known.append(reason)
        return f"no ({self.known.index(reason) + 1})"

    def listed(self) -> str:
        return "".join(f"{n}. {cell(reason)}\n" for n, reason in enumerate(self.known, 1))


def grid(corner: list[str], rows: list[tuple[str, ...]], columns: list[str], write: Callable[..., str]) -> str:
    """A table of ``write(*row, column)``, with the reasons of what is refused below."""
    reasons = Reasons()
    lines = [[*map(code, row), *(reasons.cell(write(*row, column)) for column in columns)] for row in rows]
    text = table([*corner, *map(code, columns)], lines, "l" * len(corner) + "c" * len(columns))
    return text + (f"\n{reasons.listed()}" if reasons.known else "")


def page() -> str:
    """All tables."""
    scores, budgets, stores, schedules = (names(kind) for kind in ("score", "budget", "store", "schedule"))
    parts = [
        "## Score, budget and store\n",
        "Written `score(store=…) @ budget(budget=0.5)`; without a store, `score @ …`.\n",
        grid(
            ["budget", "store"],
            [(b, s) for b in budgets for s in ("", *stores)],
            scores,
            lambda budget, store, score: f"{score}{f'(store={store})' if store else ''} @ {budget}(budget=0.5)",
        ),
        "## Store and schedule\n",
        "Written `snapkv(budget=0.5, store=…, schedule=…)`.\n",
        grid(
            ["store"],
            [(s,) for s in stores],
            schedules,
            lambda store, schedule: f"snapkv(budget=0.5, store={store}, schedule={schedule})",
        ),
    ]
    if wrappers():
        parts += [
            "## Scores that refine another\n",
            "Written `score(base=…, budget=0.5)`.\n",
            grid(
                ["score"],
                [(c.name,) for c in wrappers()],
                scores,
                lambda outer, base: f"{outer}(base={base}, budget=0.5)",
            ),
        ]
    parts += [
        "## Selector and score\n",
        "Written `selector + score(budget=0.5)`: the prompt is read sparsely, then compressed.\n",
        grid(
            ["selector"],
            [(s,) for s in names("selector")],
            scores,
            lambda selector, score: f"{selector} + {score}(budget=0.5)",
        ),
    ]
    return "\n".join(parts)


def wrappers() -> list[Card]:
    return [card for card in own() if card.kind == "score" and card.can("wraps-score")]
