"""What was really held for each request, and its means by task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.cache import Achieved


@dataclass(frozen=True)
class Held:
    """One request: bytes of its cache right after compression, bytes of the full one, tokens read and kept (mean over heads)."""

    cache_bytes: float
    full_bytes: float
    tokens: float
    kept: float

    @classmethod
    def of(cls, achieved: Achieved, rows: int = 1, tokens: float | None = None) -> Held:
        """The share of each of the `rows` of a batch. Bytes are the batch's, padding and its mask among them; `tokens` are
        those read of a row without its padding (mean over rows), all if left out."""
        read = achieved.seen if tokens is None else tokens
        return cls(achieved.cache_bytes / rows, achieved.full_bytes / rows, read, read * achieved.kept_fraction)


def at_prompt(achieved: Achieved, prompt: int) -> Achieved:
    """What was held when the prompt had been read. Compressed caches are reported so; one that wasn't compressed is reported
    with what was written since, and takes the same for every token."""
    if achieved.compressions or achieved.kept or achieved.seen <= prompt:
        return achieved
    return replace(achieved, seen=prompt, cache_bytes=achieved.cache_bytes * prompt // achieved.seen,
                   full_bytes=achieved.full_bytes * prompt // achieved.seen)


@dataclass
class Ledger:
    """Requests by task; `task` is the one at work."""

    task: str = ""
    rows: dict[str, list[Held]] = field(default_factory=lambda: defaultdict(list))
    truncated: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Requests whose prompt lost its left end."""

    def add(self, achieved: Achieved, rows: int = 1, tokens: float | None = None) -> None:
        self.rows[self.task] += [Held.of(achieved, rows, tokens)] * rows

    def cut(self, requests: int) -> None:
        self.truncated[self.task] += requests

    def means(self, tasks: Sequence[str] | None = None) -> dict[str, float | int]:
        """Means over the requests of some tasks (all if left out); empty if they had none."""
        names = list(self.rows) if tasks is None else tasks
        found = [row for name in names for row in self.rows.get(name, ())]
        if not found:
            return {}
        means = {name: sum(getattr(row, name) for row in found) / len(found)
                 for name in ("cache_bytes", "full_bytes", "tokens", "kept")}
        return means | {"requests": len(found), "truncated": sum(self.truncated.get(name, 0) for name in names)}


def by_task(ledger: Ledger, answer: Callable[[list[Any]], list[Any]], requests: Sequence[Any]) -> list[Any]:
    """Answers in the order of the requests, asked for task by task, so that the ledger knows whose they are."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
        groups[getattr(request, "task_name", None) or ""].append(i)
    found: list[Any] = [None] * len(requests)
    for task, places in groups.items():
        ledger.task = task
        for i, value in zip(places, answer([requests[i] for i in places]), strict=True):
            found[i] = value
    return found
