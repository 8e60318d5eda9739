"""``longspan tasks``: what recipes can be compared on."""

from __future__ import annotations

from typing import Annotated

import typer

from longspan import registry
from longspan.commands.methods import list_cards
from longspan.registry import Refused
from longspan.terminal import Json, Load, own_methods


def tasks(
    name: Annotated[str | None, typer.Argument(help="One task, with its knobs.")] = None,
    load: Load = None, as_json: Json = False,
) -> None:
    """List the tasks, or explain one."""
    own_methods(load)
    found = registry.cards(kind="task")
    if name is not None and name not in {c.name for c in found}:
        raise Refused(registry.nearest(name, [c.name for c in found], "task"))
    list_cards([c for c in found if name in (None, c.name)], as_json, one=name is not None)
