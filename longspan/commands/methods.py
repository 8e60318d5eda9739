"""``longspan methods``: what there is."""

from __future__ import annotations

from typing import Annotated

import typer

from longspan import registry
from longspan.registry import Refused
from longspan.terminal import Json, Load, own_methods, show


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its knobs.")] = None,
    room: Annotated[str | None, typer.Option(help="Only methods of this room, such as cache.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only methods of this kind, such as score.")] = None,
    load: Load = None, as_json: Json = False,
) -> None:
    """List the methods, or explain one."""
    own_methods(load)
    found = registry.cards()
    for option, value in (("room", room), ("kind", kind)):
        known = {getattr(c, option) for c in found}
        if value is not None and value not in known:
            raise Refused(registry.nearest(value, known, option))
    chosen = [registry.card(name)] if name else [c for c in found if room in (None, c.room) and kind in (None, c.kind)]
    list_cards(chosen, as_json, one=name is not None)


def list_cards(cards: list[registry.Card], as_json: bool, *, one: bool) -> None:
    if as_json:
        show([c.as_json() for c in cards])
        return
    from rich.console import Console

    from longspan.reporting.methods import card_page, card_table

    Console().print(card_page(cards[0]) if one else card_table(cards))
