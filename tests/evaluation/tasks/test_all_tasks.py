"""What must hold for every task, whatever it asks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan import registry
from longspan.evaluation.base import Task, answer_text, prompt_parts, token_spans, total_length
from longspan.registry import Refused

for module in registry.method_modules():
    if module.startswith("longspan.evaluation.tasks."):
        registry.importlib.import_module(module)

NEED_FILES = {"helmet-rag", "infinitebench", "kvfunda-safety", "longbench", "lv-eval", "mgal", "ruler-qa"}
NAMES = sorted(name for name, found in registry._methods.items()
               if found.card.kind == "task" and found.card.room == "evaluation" and name not in NEED_FILES
               and found.card.module.startswith("longspan.evaluation.tasks."))
EXPECTED = {"niah", "ruler-niah-single-1", "ruler-niah-single-2", "ruler-niah-single-3", "ruler-niah-multikey-1",
            "ruler-niah-multikey-2", "ruler-niah-multikey-3", "ruler-niah-multivalue", "ruler-niah-multiquery",
            "ruler-vt", "ruler-cwe", "ruler-fwe", "passkey", "kv-retrieval", "perplexity", "number-string", "code-run",
            "math-find", "math-calc", "babilong", "nolima", "longmemeval", "longbench-cite", "json-kv", "helmet-icl",
            "helmet-rerank"}


def make(name: str) -> Task:
    return registry.get(name)()


def examples(name: str, n: int, length: int | None = None, seed: int = 0):
    task, tokenizer = make(name), tiny_tokenizer()
    return task, list(task.examples(length or task.floor(tokenizer) + 300, n, seed, tokenizer))


def test_the_tasks_are_all_there():
    assert set(NAMES) >= EXPECTED


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_score_one_and_no_answer_zero(name):
    task, found = examples(name, 3)
    for example in found:
        right = example.meta["target"] if "target" in example.meta else " " + answer_text(example)
        assert task.metric(right, example) == 1.0
        assert task.metric("", example) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_prompts_fit_and_fill_the_length(name):
    task, tokenizer = make(name), tiny_tokenizer()
    for length in (task.floor(tokenizer), task.floor(tokenizer) + 1000):
        totals = [total_length(example, tokenizer) for example in task.examples(length, 2, 0, tokenizer)]
        assert all(total <= length for total in totals)
        assert all(total >= 0.8 * length for total in totals) or length == task.floor(tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_examples_depend_on_their_key_only(name):
    length = make(name).floor(tiny_tokenizer()) + 300
    _, few = examples(name, 2, length)
    _, many = examples(name, 4, length)
    assert many[:2] == few
    assert len({example.context for example in many}) == 4
    _, other = examples(name, 2, length, seed=1)
    assert other[0].context != few[0].context


@pytest.mark.parametrize("name", NAMES)
def test_below_the_floor_is_refused_with_the_floor(name):
    task, tokenizer = make(name), tiny_tokenizer()
    floor = task.floor(tokenizer)
    with pytest.raises(Refused, match=f"{name} at length {floor - 1}: .* at least {floor}"):
        list(task.examples(floor - 1, 1, 0, tokenizer))


@pytest.mark.parametrize("name", NAMES)
def test_meta_is_json_and_spans_lie_in_the_context(name):
    tokenizer = tiny_tokenizer()
    _, found = examples(name, 3)
    for index, example in enumerate(found):
        assert json.loads(json.dumps(example.meta)) == example.meta
        assert example.meta["index"] == index
        assert 0 <= example.meta.get("depth", 0) <= 1
        ids = prompt_parts(example, tokenizer).context_ids
        for name_ in ("spans", "shots"):
            for (start, end), (first, last) in zip(example.meta.get(name_, []),
                                                   token_spans(example, tokenizer, name_)):
                assert 0 <= start < end <= len(example.context)
                assert example.context[start:end] in tokenizer.decode(ids[first:last])


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_named_with_their_hash(name):
    task = make(name)
    if task.text is not None:
        assert len(task.text.sha256) == 64
        assert task.text.source
    assert task.score_name in (name, f"{name}-open")


DIGEST = """
import hashlib, sys
sys.path[:0] = [{here!r}, {tests!r}]
from test_all_tasks import NAMES, examples
found = [(e.context, e.question, e.answer_prefix, e.answers, e.meta) for name in NAMES for e in examples(name, 2)[1]]
print(hashlib.sha256(repr(found).encode()).hexdigest())
"""


@pytest.mark.slow
def test_examples_are_the_same_in_every_process():
    here = Path(__file__).parent
    code = DIGEST.format(here=str(here), tests=str(here.parents[1]))
    found = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                            capture_output=True, text=True).stdout for seed in ("1", "2")}
    assert len(found) == 1
    assert len(found.pop()) == 65
