"""The reward: 1 if the list that is written is the gold answer, else 0.

What counts is the last line that begins with ``Answer:``, or the last boxed span if it comes later; a JSON list has to stand
there, and text may follow it. Numbers are equal within 1e-6, or after rounding both to the decimals asked; strings after case
folding and stripping. Lists are compared as multisets unless the SQL orders them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from longspan.registry import Refused

TOLERANCE = 1e-6
MARK = re.compile(r"^[ \t*#>]*Answer:[ \t*]*|\\boxed\{", re.MULTILINE)
"""Before the list; Markdown may set the word off."""


def reward(said: str, gold: Sequence[Any], ordered: bool = False, decimals: int | None = None) -> float:
    """1.0 or 0.0. Whatever `said` is, it is judged, and never raises.

    Args:
        said: the text written, with its ``Answer:``.
        gold: numbers and strings.
        ordered: whether their order counts.
        decimals: those the question asked to round to.

    Raises:
        Refused: a gold answer that isn't a list of finite numbers and strings; decimals below 0.
    """
    _check(gold, decimals)
    found = parse(said)
    if found is None or len(found) != len(gold) or not all(map(_is_value, found)):
        return 0.0
    wanted = list(gold)
    if not ordered:
        # Sorted lists pair up if any pairing does: what equals a number is an interval whose ends rise with it.
        found, wanted = sorted(found, key=_rank), sorted(wanted, key=_rank)
    return float(all(_equal(a, b, decimals) for a, b in zip(found, wanted)))


def parse(said: str) -> list[Any] | None:
    """The list after the last mark; None if there is none, or no JSON list stands there."""
    marks = list(MARK.finditer(said))
    if not marks:
        return None
    try:
        found, _ = _DECODER.raw_decode(said[marks[-1].end():].lstrip())
    except (ValueError, RecursionError):  # also numbers of too many digits, lists too deep
        return None
    return found if isinstance(found, list) else None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _is_value(value: Any) -> bool:
    """Whether it is a finite number or a string; true and false are neither."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int | str) and not isinstance(value, bool)


def _check(gold: Any, decimals: int | None) -> None:
    if not isinstance(gold, list | tuple):
        raise Refused(f"gold answer {gold!r}: expected a list, such as [{gold!r}].")
    for value in gold:
        if not _is_value(value):
            raise Refused(f"gold answer with {value!r}: expected finite numbers and strings.")
    if decimals is not None and decimals < 0:
        raise Refused(f"decimals={decimals}: expected at least 0.")


def _plain(text: str) -> str:
    return text.strip().casefold()


def _rank(value: Any) -> tuple[bool, Any]:
    return (True, _plain(value)) if isinstance(value, str) else (False, value)


def _equal(a: Any, b: Any, decimals: int | None) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and _plain(a) == _plain(b)
    try:
        near = abs(a - b) <= TOLERANCE
    except OverflowError:  # an integer beyond the floats
        near = False
    return near or (decimals is not None and round(a, decimals) == round(b, decimals))
