"""What the experiment on standard suites makes of its rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.base import prompt_parts
from longspan.experiments import standard_suites as suites
from longspan.models import Loaded

SIZE = {"tasks": ("ruler-niah-single-1", "ruler-vt"), "lengths": [1100], "examples": 2}


@pytest.fixture(scope="module")
def loaded():
    tokenizer = tiny_tokenizer()
    return Loaded(tiny("llama", vocab=len(tokenizer), positions=2048), tokenizer, "tiny", "", Path())


def test_prompts_leave_the_tasks_whole_allowance(loaded, monkeypatch):
    prompts, fit = suites.all_prompts(loaded, SIZE)
    assert fit and len(prompts) == 4
    assert prompts == suites.all_prompts(loaded, SIZE)[0]
    example, = parse_task("ruler-vt").examples(1100, 1, suites.SEED, loaded.tokenizer)
    assert prompts[2] == prompt_parts(example, loaded.tokenizer).ids
    monkeypatch.setattr(suites, "drawn", lambda size, loaded: [(len(prompts[2]) + example.max_new_tokens - 1, example)])
    assert not suites.all_prompts(loaded, SIZE)[1]  # one token too long


def test_predictions_are_compared_row_by_row():
    rows = [{"task": "a", "length": 1, "index": i, "prediction": str(i)} for i in range(3)]
    assert suites.same_predictions(rows, rows[1:])
    assert not suites.same_predictions(rows, [rows[0] | {"prediction": "1"}])


def test_needles_near_the_cut_are_left_out():
    rows = [{"score": i, "depth": depth} for i, depth in enumerate((0.0, 0.69, 0.72, 0.78, 0.81, None))]
    lost, held = suites.by_place(rows)
    assert lost.tolist() == [0, 1] and held.tolist() == [4]
    assert suites.found(np.array([1.0, 0.0])) == "1 of 2 found"


def test_summaries_over_lengths():
    table = [{"task": t, "length": n, "score": s} for t, n, s in (("a", 1, 1.0), ("b", 1, 0.8), ("a", 2, 0.6), ("b", 2, 0.2))]
    assert suites.over_lengths(table, [1, 2]) == {"mean": {1: 0.9, 2: 0.4}, "effective length": 1}
    lines = [{"length": n, "score": s} for n, s in ((250, 0.6), (500, 0.8), (1000, 0.7), (2000, 0.68), (4000, 0.1))]
    found = suites.nolima_summary(lines)
    assert (found["base score"], found["effective length"]) == (0.8, 2000)


def test_one_example_reproduces_nothing(loaded, monkeypatch):
    """Whatever the checks say, the smoke scale shows the machinery only; the larger ones go by the checks."""
    monkeypatch.setattr(suites, "load", lambda: loaded)
    monkeypatch.setattr(suites, "by_checks", lambda checks: ("reproduced", ""))
    smoke = suites.measure("smoke", lambda what: None)
    assert smoke.verdict == "mechanism-only" and "one short example" in smoke.reason
    monkeypatch.setitem(suites.SIZES, "small", suites.SIZES["smoke"])
    assert suites.measure("small", lambda what: None).verdict == "reproduced"


def test_word_perplexity_of_a_uniform_model(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.lm_head, "weight", torch.nn.Parameter(torch.zeros_like(loaded.model.lm_head.weight)))
    found = suites.word_perplexities(loaded, 60, 32)
    assert found["overlapping"] == pytest.approx(found["disjoint"], rel=1e-3)  # context is of no use to it
    tokens = len(loaded.tokenizer.encode("".join(suites.load_text("pydoc").words[:60]), add_special_tokens=False))
    assert found["disjoint"] == pytest.approx(len(loaded.tokenizer) ** ((tokens - 1) / 60), rel=1e-3)
