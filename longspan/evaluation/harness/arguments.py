"""Arguments of a model as the harness writes them, `name=value,name=value`, where a recipe has commas of its own.

A comma inside parentheses belongs to the value. What the harness has split already is joined again. Where a knob
occurs twice in one recipe the split has lost one, so `;` may be written for a recipe's commas.
"""

from __future__ import annotations

from typing import Any

from longspan.registry import Refused


def split_arguments(text: str) -> dict[str, str]:
    """`"recipe=snapkv(budget=0.2, store=dense),dtype=float32"` -> recipe and dtype, all as text."""
    found, depth, piece = [], 0, ""
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append(piece)
            piece = ""
        else:
            piece += letter
    pairs = [item.partition("=") for item in (*found, piece) if item.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def recipe_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments split at every comma, with the recipe whole again.

    Raises:
        Refused: the recipe's parentheses don't close.
    """
    found: dict[str, Any] = {}
    recipe = None
    for name, value in given.items():
        if recipe is not None and _open(recipe):
            recipe += f",{name}={value}" if value != "" else f",{name}"
        elif name == "recipe":
            recipe = str(value)
        else:
            found[name] = value
    if recipe is None:
        return found
    if _open(recipe):
        raise Refused(f"recipe={recipe!r}: its parentheses don't close; expected a whole recipe, with ; for its commas where a "
                      "knob occurs twice, as in recipe=snapkv(budget=0.2;store=dense).")
    return found | {"recipe": recipe.replace(";", ",")}


def _open(text: str) -> bool:
    return text.count("(") > text.count(")")
