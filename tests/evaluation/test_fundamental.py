"""KVFundaBench's figures: relative change, prompt gain, their correlation, and the harness on a tiny model."""

from __future__ import annotations

import json
import math

import pytest
from tiny_folder import write_tiny_folder

from longspan.evaluation import BEFORE, fundamental
from longspan.evaluation.fundamental import METHODS, RATIOS, Curve, Harness, correlation, prompt_gain, recipe_of, relative_change
from longspan.models import load
from longspan.registry import Refused

pytestmark = pytest.mark.filterwarnings("ignore:shotkv")
TASK = "kvfunda-arithmetic(shots=4)"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("fundamental") / "tiny"), dtype="float32", device="cpu")


def test_relative_change():
    """Exact check 10."""
    assert relative_change(0.4, 0.4) == 0
    assert relative_change(0.0, 0.4) == -1
    assert relative_change(0.6, 0.4) == pytest.approx(0.5)
    assert math.isnan(relative_change(0.0, 0.0)) and math.isnan(relative_change(0.3, 0.0))
    assert math.isnan(relative_change(math.nan, 0.4))


def test_curves_flag_what_is_not_defined():
    curve = Curve("m", "t", (1.0, 0.5, 0.1), (0.8, 0.6, 0.0), 0.8)
    assert curve.changes == (0, pytest.approx(-0.25), -1) and curve.sensitivity == pytest.approx(0.625) and not curve.undefined
    lost = Curve("m", "t", (1.0, 0.5), (0.0, 0.2), 0.0)
    assert lost.undefined and all(map(math.isnan, lost.changes)) and math.isnan(lost.sensitivity)
    found = json.loads(json.dumps(lost.as_json(), allow_nan=False))
    assert found["undefined"] is True and found["changes"] == [None, None] and found["sensitivity"] is None
    assert json.loads(json.dumps(curve.as_json()))["sensitivity"] == pytest.approx(0.625)
    assert RATIOS == (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def test_gain_and_correlation():
    assert prompt_gain(0.75, 0.25) == 0.5
    assert correlation([0.1, 0.2, 0.4], [1.0, 2.0, 4.0]) == pytest.approx(1)
    assert correlation([0.1, 0.2, 0.4, 0.9], [3.0, 2.0, 0.0, math.nan]) == pytest.approx(-1)
    assert math.isnan(correlation([0.1, 0.2], [1.0, 2.0])) and math.isnan(correlation([0.1, 0.1, 0.1], [1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="2 gains with 1"):
        correlation([1.0, 2.0], [1.0])


def test_methods_as_recipes():
    assert str(recipe_of("shotkv", 0.4)) == "shotkv(r_p=0.4, r_d=0.4, schedule=every(steps=1))"
    assert all(str(recipe_of(method, 1.0)) == "full" for method in [*METHODS, "full"])
    for method in METHODS:
        assert "0.4" in str(recipe_of(method, 0.4))
    assert str(recipe_of("knorm(budget={ratio})", 0.25)) == "knorm(budget=0.25)"
    for ratio in (0.0, 1.2, -1):
        with pytest.raises(Refused, match="expected a share of the cache"):
            recipe_of("snapkv", ratio)
    with pytest.raises(Refused, match=r"did you mean 'snapkv'.*knorm"):
        recipe_of("snapkvv", 0.4)


def test_every_method_is_given_the_same_prompts(loaded, monkeypatch):
    asked, original = [], fundamental.run
    monkeypatch.setattr(fundamental, "run", lambda loaded, request: asked.append(request) or original(loaded, request))
    harness = Harness(loaded, 800, 2, max_new_tokens=2)
    asked_for = (("full", 1.0), ("streaming-llm", 0.5), ("shotkv", 0.7))
    rows = {method: harness.rows(method, TASK, ratio) for method, ratio in asked_for}
    assert len({json.dumps([r["meta"] for r in found]) for found in rows.values()}) == 1
    assert len({r["answer_nll"] for found in rows.values() for r in found}) == 6
    assert all(r["compress"] == "after-question" for found in rows.values() for r in found)
    harness.rows("shotkv", TASK, 0.7)
    harness.rows("snapkv", TASK, 1.0)
    assert len(asked) == 3, "what was measured is not measured again"


def test_off_is_no_change_and_nothing_right_is_flagged(loaded):
    harness = Harness(loaded, 800, 2, compress=BEFORE, max_new_tokens=2)
    curve = harness.curve("streaming-llm", TASK, (1.0, 0.5))
    assert curve.base == curve.accuracies[0] == 0 and curve.undefined  # a random model solves nothing
    assert harness.gain(TASK) == 0
    report = harness.report(["streaming-llm"], [TASK], (1.0, 0.5))
    assert json.loads(json.dumps(report, allow_nan=False))["correlation"] == {"streaming-llm": None}


def test_a_right_answer_counts(loaded, monkeypatch):
    """A model that answers right without compression and half of it with."""
    scores = {"full": [1.0, 1.0], "streaming-llm(budget=0.5, schedule=every(steps=1))": [1.0, 0.0]}
    monkeypatch.setattr(fundamental, "run", lambda loaded, request: [
        {"score": 0.0 if "shots=0" in str(request.tasks[0]) else s} for s in scores[str(request.recipes[0])]])
    harness = Harness(loaded, 800, 2)
    assert harness.run("streaming-llm", TASK, 0.5) == 0.5
    assert harness.curve("streaming-llm", TASK, (1.0, 0.5)).changes == (0, -0.5)
    assert harness.gain(TASK) == 1


def test_refusals(loaded):
    harness = Harness(loaded, 800, 1)
    with pytest.raises(Refused, match="has no shots to gain from"):
        harness.gain("kvfunda-arithmetic(shots=0)")
    with pytest.raises(Refused, match="has no shots to gain from"):
        harness.gain("passkey")
    with pytest.raises(Refused, match="generates nothing"):
        Harness(loaded, 256, 1).run("full", "perplexity", 1.0)
