"""Each document's prompt, prediction and scores, and recipes paired by them.

Two recipes read the same documents, so they are compared document by document, as in `longspan compare`. A metric can be
paired where it is the mean of its documents' numbers; a perplexity isn't, nor is the score of a group.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan.evaluation.statistics import DENSE, holm, paired

Line = dict[str, Any]
Row = dict[str, Any]
ABOUT = ("doc_id", "doc_hash", "prompt_hash", "target")


def sample_rows(recipe: str, results: dict[str, Any]) -> list[Row]:
    """One row for each document (and filter) of each task, from the harness's own samples; none where it kept none."""
    return [{"recipe": recipe, "task": task, "filter": sample["filter"], **{name: sample.get(name) for name in ABOUT},
             "prediction": sample["filtered_resps"], "scores": {name: _plain(sample.get(name)) for name in sample["metrics"]}}
            for task, samples in (results.get("samples") or {}).items() for sample in samples]


def write_samples(folder: Path, number: int, rows: Iterable[Row]) -> None:
    """`samples-<number of the recipe>-<task>.jsonl`, one row a line."""
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    for task, some in tasks.items():
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in some)
        (folder / f"samples-{number}-{re.sub(r'[^A-Za-z0-9._-]+', '_', task)}.jsonl").write_text(text, encoding="utf-8")


def pair_with_full(lines: list[Line], rows: list[Row]) -> None:
    """Add `vs_full` to each line whose documents the recipe `full` has read too.

    Keys: difference (recipe minus full, in the metric's own unit), ci95, p_value, p_holm (over the recipes of the same task and
    metric), n, wins and losses (documents with a higher and a lower value). Nothing measured is None.
    """
    scores = _scores(rows)
    families: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        line.pop("vs_full", None)
        families.setdefault((line["task"], line["filter"], line["metric"]), []).append(line)
    for key, family in families.items():
        dense = next((scores.get((DENSE, *key)) for line in family if line["recipe"] == DENSE and _mean_of(line, scores)), None)
        others = [line for line in family if line["recipe"] != DENSE and _mean_of(line, scores)] if dense else []
        found = [_versus(scores[(line["recipe"], *key)], dense or {}) for line in others]
        for line, versus, p in zip(others, found, holm([versus["p_value"] for versus in found])):
            if versus["n"]:
                line["vs_full"] = versus | {"p_holm": _finite(p)}


Scores = dict[tuple[Any, ...], float]


def _scores(rows: list[Row]) -> dict[tuple[str, str, str, str], Scores]:
    """For each recipe, task, filter and metric the number of each document."""
    found: dict[tuple[str, str, str, str], Scores] = {}
    for row in rows:
        for metric, value in row["scores"].items():
            if isinstance(value, (int, float)):
                of = found.setdefault((row["recipe"], row["task"], row["filter"], metric), {})
                of[(row["doc_id"], row["prompt_hash"])] = float(value)
    return found


def _mean_of(line: Line, scores: dict[tuple[str, str, str, str], Scores]) -> bool:
    """Whether the line's value is the mean of its documents' numbers."""
    values = scores.get((line["recipe"], line["task"], line["filter"], line["metric"]), {}).values()
    return bool(values) and math.isclose(sum(values) / len(values), line["value"], rel_tol=1e-6, abs_tol=1e-9)


def _versus(mine: Scores, dense: Scores) -> dict[str, Any]:
    both = [document for document in mine if document in dense]
    found = paired([mine[document] for document in both], [dense[document] for document in both])
    return {"difference": _finite(found.difference), "ci95": [_finite(found.lo), _finite(found.hi)],
            "p_value": _finite(found.p_value), "p_holm": None, "n": found.n, "wins": found.wins, "losses": found.losses}


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return value.item() if hasattr(value, "item") else value


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
