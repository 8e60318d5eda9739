"""What `--metadata` may say to our own tasks: their keys and kinds of values.

Of the metadata of other tasks nothing is known, so unknown keys are refused only where every task asked for is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from longspan.registry import Refused, nearest

TASKS = Path(__file__).parent / "tasks"
"""YAML files of our own generated tasks."""
LEAST = {"length": 1, "examples": 1, "seed": 0}
"""Whole numbers and their least values."""
EXAMPLE = {"length": 2048, "examples": 50, "seed": 0}
KNOWN = (*LEAST, "tokenizer")


def ours(known: Sequence[str] | None = None) -> list[str]:
    """Names of our tasks, among those `known` where given."""
    names = [f"longspan_{file.stem}" for file in sorted(TASKS.glob("*.yaml"))]
    return names if known is None else [name for name in names if name in known]


def check_metadata(metadata: dict[str, Any], asked: Sequence[str], known: Sequence[str]) -> None:
    """Refuse what our tasks can't read.

    Args:
        metadata: as given.
        asked: tasks, or patterns such as `longspan_*`.
        known: every task of the harness.

    Raises:
        Refused: an unknown key where all tasks are ours, or a value of the wrong kind where one is.
    """
    own = set(ours(known))
    meant = [{task for task in known if task == name or fnmatch(task, name)} for name in asked]
    if not any(tasks & own for tasks in meant):
        return
    for name, value in metadata.items():
        if name in KNOWN:
            check_value(name, value)
        elif all(tasks <= own for tasks in meant):
            raise Refused(f"--metadata: {nearest(name, KNOWN, 'key')} Our tasks read {', '.join(KNOWN)}.")


def check_value(name: str, value: Any) -> None:
    """Refuse a value of the wrong kind for one of our keys."""
    if name == "tokenizer":
        if not isinstance(value, str) or not value:
            raise Refused(f"--metadata: tokenizer={value!r}; expected a folder or hub id as text.")
    elif isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]:
        raise Refused(f"--metadata: {name}={value!r}; expected a whole number of at least {LEAST[name]}, "
                      f"such as {EXAMPLE[name]}.")
