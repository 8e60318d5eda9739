"""Methods as tables: the list in the terminal, one method with its knobs, and Markdown for the docs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longspan.registry import CAPABILITIES, KINDS, Card, Knob


def card_table(cards: Iterable[Card]) -> Any:
    """A `rich` table of methods, grouped by kind."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("kind", "name", "system", "what it does"):
        table.add_column(column, overflow="fold")
    last = ""
    for card in sorted(cards, key=lambda c: (list(KINDS).index(c.kind), c.name)):
        table.add_row("" if card.kind == last else card.kind, f"[bold]{card.name}[/]", card.system, card.summary)
        last = card.kind
    return table


def card_page(card: Card) -> Any:
    """One method: what it is, where it comes from, its knobs."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = [Text(card.name, style="bold"), Text(f"{card.kind} · {card.room} · {card.system}"
                 + (f" · {card.paper}" if card.paper else "") + f" · used by `longspan {KINDS[card.kind]}`"),
            Text(""), Text(card.summary), Text(" ".join(card.doc.split()), style="dim"), Text("")]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("knob", "type", "default", "range", "meaning"):
        table.add_column(column, overflow="fold")
    for knob in card.knobs:
        table.add_row(knob.name, knob.kind or knob.type, str(knob.default), allowed(knob), knob.help)
    needs = [Text(f"· {CAPABILITIES[c]}") for c in card.capabilities]
    return Group(*head, *([table] if card.knobs else [Text("no knobs")]), *([Text("")] if needs else []), *needs)


def allowed(knob: Knob) -> str:
    """The values a knob takes, in a few characters."""
    if knob.choices:
        return ", ".join(map(str, knob.choices))
    if knob.low is None and knob.high is None:
        return ""
    return f"{'' if knob.low is None else knob.low}–{'' if knob.high is None else knob.high}"


def markdown_cards(cards: Iterable[Card]) -> str:
    """A Markdown table of methods."""
    lines = ["| kind | name | what it does | source |", "|---|---|---|---|"]
    for card in sorted(cards, key=lambda c: (list(KINDS).index(c.kind), c.name)):
        lines.append(f"| {card.kind} | `{card.name}` | {card.summary} | {source(card)} |")
    return "\n".join(lines) + "\n"


def source(card: Card) -> str:
    """The paper as a link where it is on arXiv."""
    if card.paper.startswith("arXiv:"):
        return f"[{card.paper}](https://arxiv.org/abs/{card.paper.removeprefix('arXiv:')})"
    return card.paper
