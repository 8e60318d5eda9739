"""The experiment harness, and the smoke scale of every experiment."""

from __future__ import annotations

import json

import pytest

from longspan.experiments import base, find, names, perform
from longspan.experiments.base import Experiment, Outcome
from longspan.registry import Refused


def outcome(verdict="reproduced", reason=""):
    return Outcome({"gain": 1.5}, {"gain": 2.0}, {"gain is positive": True}, verdict, reason, [1], [{"n": 1}])


def test_outcomes_are_stored_as_json(tmp_path):
    done = perform(Experiment("x", "x", "a claim", lambda scale, progress: outcome()), "smoke", tmp_path)
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored == json.loads(json.dumps(done.as_json()))
    assert {"id", "scale", "claim", "measured", "expected", "checks", "verdict", "reason"} <= set(stored)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    started = []
    with pytest.raises(Refused, match="can't be made a folder"):
        perform(Experiment("x", "x", "", lambda *_: started.append(1)), "smoke", tmp_path / "file")
    assert started == []


def test_numbers_that_json_does_not_know_are_null(tmp_path):
    odd = Outcome({"gain": float("nan"), "ends": (1.0, float("inf"))}, {}, {"ok": True}, "reproduced", "", [1], [{"n": 1}])
    perform(Experiment("x", "x", "", lambda *_: odd), "smoke", tmp_path)
    stored = json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert stored["measured"] == {"gain": None, "ends": [1.0, None]}


def test_a_verdict_needs_its_reason():
    with pytest.raises(ValueError, match="needs a reason"):
        outcome("failed")
    with pytest.raises(ValueError, match="unknown verdict"):
        outcome("splendid")


def test_unknown_names_are_refused():
    with pytest.raises(Refused, match="cache-baselines"):
        find(["cache-baseline"])
    with pytest.raises(Refused, match="smoke"):
        perform(Experiment("x", "x", "", lambda *_: outcome()), "smok")


def test_every_file_is_an_experiment_of_its_name():
    assert [e.id for e in find([])] == names()


@pytest.mark.parametrize("name", names())
def test_smoke(name, tmp_path):
    done = perform(find([name])[0], "smoke", tmp_path)
    assert done.verdict in base.VERDICTS and done.outcome.measured and done.outcome.checks and done.outcome.table
