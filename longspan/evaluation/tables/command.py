"""What ``longspan tables`` does: questions over tables as JSON lines, and a summary of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from longspan.evaluation.base import Example, Task, total_length
from longspan.evaluation.tables.filtering import Judged, check_rollouts, judge
from longspan.models import Loaded
from longspan.registry import Refused

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Filter:
    """The model whose pass rates are taken, and how."""

    loaded: Loaded
    rollouts: int
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_rollouts(self.rollouts)

    def __call__(self, task: Task, example: Example) -> Judged:
        return judge(self.loaded, task, example, self.rollouts, temperature=self.temperature, seed=self.seed)


def write_questions(path: Path, task: Task, tokenizer: Any, questions: int, length: int, *, seed: int = 0,
                    filter: Filter | None = None, progress: Progress = lambda done, total, what: None) -> dict[str, Any]:
    """Draw questions, keep those that a filter keeps, write a JSON line for each; the summary.

    Raises:
        Refused: fewer than one question, a file that can't be written, a length that can't be had.
    """
    if questions < 1:
        raise Refused(f"--questions {questions}: expected at least 1.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise Refused(f"--out {str(path)!r} can't be written ({error.strerror}); name a file in a folder that you may write "
                      "to.") from None
    rows: list[dict[str, Any]] = []
    with file:
        for row, is_kept in _rows(task, tokenizer, questions, length, seed, filter, progress):
            rows.append(row | {"kept": is_kept})
            if is_kept:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
    return summary(rows, filter is not None)


def _rows(task: Task, tokenizer: Any, questions: int, length: int, seed: int, filter: Filter | None, progress: Progress
          ) -> Iterator[tuple[dict[str, Any], bool]]:
    for number, example in enumerate(task.examples(length, questions, seed, tokenizer)):
        progress(number, questions, example.meta["family"])
        judged = None if filter is None else filter(task, example)
        yield row_of(example, total_length(example, tokenizer), judged), judged is None or judged.kept
    progress(questions, questions, "")


def row_of(example: Example, tokens: int, judged: Judged | None = None) -> dict[str, Any]:
    """A question as a JSON line: `prompt` is the user's turn, `answer_prefix` what the answer begins with."""
    meta = example.meta
    row = {"prompt": example.context + example.question, "answer_prefix": example.answer_prefix, "sql": meta["sql"],
           "answer": meta["gold"], "ordered": meta["ordered"], "decimals": meta["decimals"], "family": meta["family"],
           "cells_needed": meta["cells_needed"], "tables": meta["tables"], "tokens": tokens, "index": meta["index"]}
    return row if judged is None else row | {"P": judged.p}


def summary(rows: Sequence[dict[str, Any]], filtered: bool) -> dict[str, Any]:
    """Figures over all questions drawn; those on pass rates by family."""
    kept = [row for row in rows if row["kept"]]
    found: dict[str, Any] = {
        "drawn": len(rows), "kept": len(kept), "families": dict(Counter(row["family"] for row in rows)),
        "cells_needed": spread([row["cells_needed"] for row in rows]), "tables": spread([row["tables"] for row in rows]),
        "tokens": spread([row["tokens"] for row in rows]),
    }
    if filtered:
        by_family = {family: [row["P"] for row in rows if row["family"] == family] for family in found["families"]}
        found |= {"P": {family: sum(own) / len(own) for family, own in by_family.items()},
                  "P = 0": sum(row["P"] == 0 for row in rows), "P = 1": sum(row["P"] == 1 for row in rows)}
    return found


def spread(values: Sequence[float]) -> list[float]:
    """Least, median, most."""
    return [min(values), median(values), max(values)]
