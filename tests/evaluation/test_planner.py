"""The planner: predicted bytes are real bytes, and advice follows from measured rows."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan.evaluation import planner
from longspan.recipe import Recipe
from longspan.registry import Refused


@pytest.mark.parametrize("text", [
    "full", "knorm(budget=0.3)", 'knorm(budget="40 tokens")', "knorm @ adakv(budget=0.3)", "knorm(budget=0.5, store=ragged)",
    "knorm(budget=0.5, store=quantised(bits=4, group=8))", "full(store=quantised(group=8))", 'knorm(budget="20 kB")',
])
def test_predicted_bytes_are_those_of_a_cache(text):
    model = tiny("llama", layers=3)
    recipe = Recipe.parse(text)
    with torch.no_grad(), recipe.on(model):
        model.generate(tiny_ids(1, 128), max_new_tokens=1, do_sample=False, pad_token_id=2)
    predicted = planner.shape_of(model).bytes(recipe, 128)
    assert predicted == pytest.approx(recipe.achieved.cache_bytes, rel=0.03, abs=600)


def line(recipe, accuracy, dense, length=1024, n=20, nll=0.1):
    found = {"recipe": recipe, "task": "niah", "length": length, "n": n, "accuracy": accuracy, "ttft_s": 1.0, "tokens_per_s": 9.0}
    if recipe != "full":
        found["vs_full"] = {"accuracy_difference": accuracy - dense, "nll_difference": nll}
    return found


@pytest.fixture
def results(tmp_path, monkeypatch):
    rows = [line("full", 0.9, 0.9), line("knorm(budget=0.5)", 0.88, 0.9), line("knorm(budget=0.1)", 0.3, 0.9),
            line("knorm(budget=0.5)", 0.1, 0.9, length=4096)]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"model": "tiny", "rows": rows}))
    monkeypatch.setattr(planner, "MEASURED", file)
    return write_tiny_folder(tmp_path / "tiny")


def test_cheapest_good_recipe_comes_first(results):
    plan = planner.make_plan(str(results), 1024, "1GiB", 0.9, dtype="float32")
    assert [c.recipe for c in plan.recommended] == ["knorm(budget=0.5)", "full"]
    assert plan.choices[-1].reason == "keeps 33% of the dense accuracy"
    assert plan.note == "" and plan.recommended[0].measured_at == 1024


def test_the_nearest_measured_length_counts(results):
    plan = planner.make_plan(str(results), 4000, "1GiB", 0.9)
    assert [c.recipe for c in plan.recommended] == ["full"]


def test_memory_limit(results):
    shape = planner.Shape(2, 2, 8, 4)
    limit = shape.bytes(Recipe.parse("full"), 1024) - 1
    plan = planner.make_plan(str(results), 1024, f"{limit} B", 0.9, dtype="float32")
    assert [c.recipe for c in plan.recommended] == ["knorm(budget=0.5)"]
    assert "times the memory" in next(c.reason for c in plan.choices if c.recipe == "full")
    assert json.loads(json.dumps(plan.as_json()))["recommended"] == ["knorm(budget=0.5)"]


def test_tasks_the_dense_run_cannot_do_say_nothing():
    assert planner.quality_of("x", [line("x", 0.1, 0.2)]) == (None, 0.1, 0)


def test_refusals(results, tmp_path):
    for memory in ("7", "a lot", "512 tokens"):
        with pytest.raises(Refused, match="--memory"):
            planner.make_plan(str(results), 100, memory)
    with pytest.raises(Refused, match="at most 4096"):
        planner.make_plan(str(results), 5000, "1GiB")
    with pytest.raises(Refused, match=r"rows\.parquet"):
        planner.make_plan(str(results), 100, "1GiB", results=tmp_path / "nothing")


def test_shipped_results_are_of_the_bundled_model():
    stored = json.loads(planner.MEASURED.read_text())
    assert stored["model"] == "smollm2-135m-instruct"
    recipes = {r["recipe"] for r in stored["rows"]}
    assert "full" in recipes and len(recipes) >= 5
    for text in recipes:
        Recipe.parse(text)
