"""What the YAML files beside this one ask for: longspan's generated tasks as data sets of the harness, made offline.

A file of its own to the harness, which reads it by its path.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from longspan.evaluation import parse_task
from longspan.evaluation.base import Example, answer_text
from longspan.evaluation.harness.metadata import check_value

LENGTH, EXAMPLES, SEED = 2048, 50, 0


def rows(task: str, tokenizer: Any, length: int = LENGTH, examples: int = EXAMPLES, seed: int = SEED) -> list[dict[str, Any]]:
    """One row for each example; what differs in shape from task to task is JSON text.

    Raises:
        Refused: a length below the task's floor, or a number of the wrong kind.
    """
    for name, value in (("length", length), ("examples", examples), ("seed", seed)):
        check_value(name, value)
    found = parse_task(task).examples(length, examples, seed, tokenizer)
    return [{"task": task, "prompt": example.context + example.question, "answer_prefix": example.answer_prefix,
             "answer": answer_text(example), "question": example.question, "answers": json.dumps(example.answers),
             "max_new_tokens": example.max_new_tokens, "meta": json.dumps(example.meta)} for example in found]


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The task's own score of what was written."""
    example = Example("", doc["question"], doc["answer_prefix"], tuple(json.loads(doc["answers"])), doc["max_new_tokens"],
                      json.loads(doc["meta"]))
    return {"score": parse_task(doc["task"]).metric(results[0], example)}


def data(task: str, *, tokenizer: Any = None, pretrained: Any = None, model: Any = None, length: int = LENGTH,
         examples: int = EXAMPLES, seed: int = SEED, **_: Any) -> dict[str, Any]:
    """The data set of a task, with what `--metadata` and the model's arguments say."""
    from datasets import Dataset

    named = next((str(name) for name in (tokenizer, pretrained, model) if isinstance(name, str) and name), None)
    return {"test": Dataset.from_list(rows(task, _tokenizer(named), length, examples, seed))}


@functools.cache
def _tokenizer(name: str | None) -> Any:
    from transformers import AutoTokenizer

    if name is None:
        from longspan.models import load

        return load().tokenizer
    return AutoTokenizer.from_pretrained(name)


niah = functools.partial(data, "niah")
ruler_niah_multikey_1 = functools.partial(data, "ruler-niah-multikey-1")
ruler_vt = functools.partial(data, "ruler-vt")
babilong = functools.partial(data, "babilong")
kv_retrieval = functools.partial(data, "kv-retrieval")
