"""Reading the user's copies of published data sets: JSON lines, one row each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from longspan.evaluation.texts import Text
from longspan.registry import Refused

T = TypeVar("T")


def rows(text: Text, what: str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """Every line of a file through `read`.

    Raises:
        Refused: not JSON lines, rows of another shape, or none.
    """
    found = []
    for number, line in enumerate(text.text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(read(json.loads(line)))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            problem = f"no field {error.args[0]!r}" if isinstance(error, KeyError) else str(error) or type(error).__name__
            raise Refused(f"{text.source!r} line {number}: not a row of {what} ({problem}); expected its .jsonl as "
                          "published.") from None
    if not found:
        raise Refused(f"{text.source!r}: no rows; expected {what}'s .jsonl as published.")
    return found
