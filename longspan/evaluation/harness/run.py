"""Tasks of the harness under several recipes: one table, with what each recipe held beside each score."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.evaluation.harness.metadata import TASKS, check_metadata
from longspan.evaluation.harness.require import harness
from longspan.evaluation.harness.samples import pair_with_full, sample_rows, write_samples
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused

STORED = ("results", "groups", "n-shot", "n-samples", "versions", "configs")
"""What is stored of the harness's own results."""
Line = dict[str, Any]


def run_harness(loaded: Loaded, recipes: Sequence[Recipe | str], tasks: Sequence[str], *, include: Sequence[Path] = (),
                out: Path | None = None, metadata: dict[str, Any] | None = None, batch_size: int = 1,
                progress: Callable[[int, int, str], None] | None = None, **options: Any) -> list[Line]:
    """Run tasks under every recipe; a line for each recipe, task and metric, compared with `full` where that is among them.

    Args:
        tasks: names of tasks, groups or tags of the harness, ours (`longspan_niah`) among them.
        include: folders with more YAML files.
        out: folder for `results.json` (all lines), the harness's results (`recipe-0.json`, …) and each document's prompt hash,
            prediction and scores (`samples-0-TASK.jsonl`, …); the number is the recipe's place.
        metadata: for tasks that make their data, such as {"length": 2048, "examples": 20}.
        options: for `lm_eval.simple_evaluate`: limit, num_fewshot, apply_chat_template, …

    Raises:
        Refused: the harness is missing, a task or folder isn't there, or our tasks can't read the metadata.
    """
    harness()
    with quiet():
        return _run(loaded, recipes, tasks, include, out, metadata or {}, batch_size, progress, options)


def _run(loaded: Loaded, recipes: Sequence[Recipe | str], tasks: Sequence[str], include: Sequence[Path], out: Path | None,
         metadata: dict[str, Any], batch_size: int, progress: Callable[[int, int, str], None] | None,
         options: dict[str, Any]) -> list[Line]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from longspan.evaluation.harness.model import LongspanLM

    for folder in include:
        if not Path(folder).is_dir():
            raise Refused(f"--include-path {str(folder)!r}: no such folder; expected one with task files (.yaml).")
    about = {"tokenizer": str(loaded.folder), "pretrained": str(loaded.folder)} | metadata
    manager = TaskManager(include_path=[str(TASKS), *map(str, include)], metadata=about)
    check_tasks(tasks, manager.all_tasks)
    check_metadata(metadata, tasks, manager.all_tasks)
    found: list[Line] = []
    rows: list[dict[str, Any]] = []
    for n, recipe in enumerate(recipes):
        if progress is not None:
            progress(n, len(recipes), str(recipe))
        model = LongspanLM(loaded, recipe, batch_size=batch_size)
        results = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, **options)
        mine = lines(str(recipe), results, model.ledger)
        documents = sample_rows(str(recipe), results)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            keep = {name: results[name] for name in STORED if name in results}
            _write(out / f"recipe-{n}.json", {"recipe": str(recipe), "model": loaded.name, "lines": mine, **keep})
            write_samples(out, n, documents)
        found += mine
        rows += documents
        pair_with_full(found, rows)
        if out is not None:
            _write(out / "results.json", {"model": loaded.name, "recipes": [str(r) for r in recipes[: n + 1]], "lines": found})
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """The harness's own logs from errors on, for a while: what it warns of here is how we call it."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def check_tasks(asked: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that the harness doesn't have."""
    from fnmatch import filter as matching

    from longspan.registry import nearest

    for name in asked:
        if name not in known and not matching(known, name):
            raise Refused(f"--task {name}: {nearest(name, list(known), 'task of the harness')}")


def lines(recipe: str, results: dict[str, Any], ledger: Any) -> list[Line]:
    """A line for each task or group and metric, beside it the means over the requests of its tasks."""
    found = []
    inside = results.get("group_subtasks") or {}
    for task, values in (results["results"] | (results.get("groups") or {})).items():
        held = ledger.means(_leaves(task, inside))
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            found.append({"recipe": recipe, "task": task, "metric": metric, "filter": chosen, "value": float(value),
                          "stderr": float(error) if isinstance(error, (int, float)) else None, **held})
    return found


def _leaves(task: str, inside: dict[str, Sequence[str]]) -> list[str]:
    below = [name for name in inside.get(task) or () if name != task]
    return [leaf for name in below for leaf in _leaves(name, inside)] if below else [task]


def _write(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
