"""The planner: predicted bytes are real bytes, and advice follows from measured rows."""

from __future__ import annotations

import io
import json

import pytest
import torch
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan.evaluation import planner, read_parquet
from longspan.evaluation.runner import write_parquet
from longspan.recipe import Recipe
from longspan.registry import Refused
from longspan.reporting.plans import plan_table


@pytest.mark.parametrize("text", [
    "full", "knorm(budget=0.3)", 'knorm(budget="40 tokens")', "knorm @ adakv(budget=0.3)", "knorm(budget=0.5, store=ragged)",
    "knorm(budget=0.5, store=quantised(bits=4, group=8))", "full(store=quantised(group=8))", 'knorm(budget="20 kB")',
    "knorm(budget=0.3, store=tiered)", "knorm(budget=0.3, store=tiered(sparse_rounds=2))", "knorm @ pyramid(budget=0.3)",
    "knorm(budget=0.3, schedule=per-chunk(size=50))", "knorm(budget=0.4, store=quantised(group=8), schedule=every(steps=2))",
    'knorm(budget="20 kB", store=quantised(bits=4, group=8))',
])
@pytest.mark.parametrize("length", [61, 128])
def test_predicted_bytes_are_those_of_a_cache(text, length):
    assert predicted(text, length) == pytest.approx(held(text, length), rel=1e-9)


@pytest.mark.parametrize("text", ["knorm(store=quantised(group=8)) @ adakv(budget=0.3)", 'knorm @ adakv(budget="20 kB")',
                                  "knorm(store=quantised(bits=2, group=8)) @ pyramid(budget=0.4)"])
def test_what_depends_on_how_heads_differ_is_told_within_two_per_cent(text):
    for length in (128, 200):
        assert predicted(text, length) == pytest.approx(held(text, length), rel=0.02)


def test_bytes_of_several_rows():
    for text in ("full", "knorm(budget=0.3, store=tiered(sparse_rounds=2))", "knorm(budget=0.3, store=quantised(group=8))",
                 'knorm(budget="40 kB")'):
        assert predicted(text, 100, rows=3) == held(text, 100, rows=3)


MODEL_LAYERS = 3


def predicted(text, length, rows=1):
    return planner.shape_of(tiny("llama", layers=MODEL_LAYERS)).bytes(Recipe.parse(text), length, rows)


def held(text, length, rows=1):
    """What a real cache takes."""
    model, recipe = tiny("llama", layers=MODEL_LAYERS), Recipe.parse(text)
    with torch.no_grad(), recipe.on(model):
        model.generate(tiny_ids(rows, length), max_new_tokens=1, do_sample=False, pad_token_id=2)
    return recipe.achieved.cache_bytes


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


# --------------------------------------------------------------------------------------------------------- from a sweep


def sweep_folder(folder, models, recipes, lengths=(512, 1024, 2048), n=40):
    """The folder of a sweep: the share of right answers of each recipe, over two tasks."""
    rows = [{"model": model, "dtype": "float32", "recipe": recipe, "task": task, "length": length, "seed": 0, "index": i,
             "score": float(i < share * dense * n), "answer_nll": 2 - share, "tokens_per_s": None, "ttft_s": None}
            for model in models for task, dense in (("niah", 1.0), ("passkey", 0.9)) for length in lengths
            for recipe, share in recipes.items() for i in range(n)]
    folder.mkdir()
    write_parquet(folder / "rows.parquet", rows)
    (folder / "grid.json").write_text(json.dumps({"models": list(models)}))
    return folder


SHARES = {"full": 1.0, "knorm(budget=0.8)": 1.0, "knorm(budget=0.6)": 0.9, "knorm(budget=0.4)": 0.5, "knorm(budget=0.2)": 0.1}


@pytest.fixture
def swept(tmp_path):
    model = write_tiny_folder(tmp_path / "tiny")
    name = planner.model_shape(str(model), None)[0]
    return sweep_folder(tmp_path / "sweep", [name], SHARES), str(model)


def test_a_sweep_is_planned_by_intervals(swept):
    folder, model = swept
    plan = planner.make_plan(model, 800, "1GiB", 0.9, results=folder)
    assert [c.recipe for c in plan.recommended] == ["knorm(budget=0.8)", "full"] and plan.note == ""
    told = {c.recipe: c for c in plan.choices}
    assert all(c.interval[0] <= c.quality <= c.interval[1] and c.measured_at is None for c in plan.choices)
    unsure = told["knorm(budget=0.6)"]
    low, high = unsure.interval
    assert low < 0.9 < high and unsure.reason == f"not sure: between {low:.0%} and {high:.0%} kept"
    assert told["knorm(budget=0.2)"].reason.startswith("keeps 1") and told["knorm(budget=0.2)"].nll_increase > 0.5
    shape = planner.model_shape(model, "float32")[1]
    assert told["knorm(budget=0.4)"].bytes == shape.bytes(Recipe.parse("knorm(budget=0.4)"), 800)
    assert json.loads(json.dumps(plan.as_json()))["choices"][0]["interval"][0] > 0.9


def test_a_lower_floor_takes_what_was_not_sure(swept):
    folder, model = swept
    assert "knorm(budget=0.6)" in [c.recipe for c in planner.make_plan(model, 800, "1GiB", 0.7, results=folder).recommended]


def test_memory_comes_first(swept):
    folder, model = swept
    plan = planner.make_plan(model, 800, "1kB", 0.9, results=folder)
    assert not plan.recommended and all("times the memory" in c.reason for c in plan.choices)


def test_beyond_the_measured_lengths_it_widens_and_then_declines(swept):
    folder, model = swept
    inside, beyond = (next(c for c in planner.make_plan(model, n, "1GiB", 0.9, results=folder).choices if "0.6" in c.recipe)
                      for n in (2048, 4096))
    assert beyond.interval[1] - beyond.interval[0] > inside.interval[1] - inside.interval[0]
    assert "only" in planner.make_plan(model, 4096, "1GiB", 0.9, results=folder).note
    short = planner.make_plan(model, 200, "1GiB", 0.9, results=folder)
    assert not short.recommended and {c.quality for c in short.choices} == {None}
    assert short.choices[0].reason == "not sure: 200 tokens are more than 1 octave from the 512 that were measured"


def test_a_sweep_of_several_models_asks_which(swept, tmp_path):
    name = planner.model_shape(swept[1], None)[0]
    both = sweep_folder(tmp_path / "both", ["another", name], SHARES)
    with pytest.raises(Refused, match=f"several models; pick one with --model: another, {name}"):
        planner.make_plan(None, 800, "1GiB", results=both)
    assert planner.make_plan(swept[1], 800, "1GiB", results=both).measured_on == name
    with pytest.raises(Refused, match=f"no rows of {name}; measured there: another"):
        planner.make_plan(swept[1], 800, "1GiB", results=sweep_folder(tmp_path / "other", ["another"], SHARES))


def test_without_a_model_it_is_that_of_the_sweep(swept):
    folder, model = swept
    (folder / "grid.json").write_text(json.dumps({"models": [model]}))
    assert planner.make_plan(None, 800, "1GiB", results=folder).model == planner.model_shape(model, None)[0]


def test_results_of_compare_are_read_as_measured(swept):
    folder, model = swept
    (folder / "grid.json").unlink()
    rows = [row | {"text_hash": "", "compress": "before-question", "cache_bytes": 1, "full_cache_bytes": 1}
            for row in read_parquet(folder / "rows.parquet")]
    write_parquet(folder / "rows.parquet", rows)
    plan = planner.make_plan(model, 800, "1GiB", 0.9, results=folder)
    told = {c.recipe: c for c in plan.choices}
    assert told["knorm(budget=0.6)"].measured_at == 1024 and told["knorm(budget=0.6)"].interval is None
    assert told["knorm(budget=0.6)"].quality == pytest.approx(0.9, abs=0.02)


def test_the_table_tells_predictions_from_measurements(swept):
    from rich.console import Console

    folder, model = swept
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_table(planner.make_plan(model, 800, "1GiB", 0.9, results=folder)))
    text = console.export_text()
    assert "predicted" in text and "100% (100% to 100%)" in text and "not sure: between" in text
