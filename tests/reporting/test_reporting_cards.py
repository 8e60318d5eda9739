"""Tables of methods, experiments and plans."""

from __future__ import annotations

import json

from rich.console import Console

from longspan import registry
from longspan.evaluation.planner import Choice, Plan
from longspan.experiments.base import Experiment, Outcome, perform
from longspan.reporting.experiments import outcome_table, reproduction_table
from longspan.reporting.methods import allowed, card_page, card_table, markdown_cards
from longspan.reporting.plans import plan_table


def shown(thing) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(thing)
    return console.export_text()


def test_every_method_is_in_the_list():
    text = shown(card_table(registry.cards()))
    assert all(card.name in text for card in registry.cards())


def test_one_method_shows_its_knobs_and_needs():
    text = shown(card_page(registry.card("snapkv")))
    for word in ("arXiv:2404.14469", "window", "32", "mean, max", "reads the last query rows", "longspan compare"):
        assert word in text


def test_ranges():
    knob = registry.Knob("x", "int", 1, "", low=1, high=4)
    assert allowed(knob) == "1–4"
    assert allowed(registry.Knob("x", "int", 1, "", choices=(1, 2))) == "1, 2"
    assert allowed(registry.Knob("x", "int", 1, "")) == ""


def test_markdown_links_papers():
    text = markdown_cards([registry.card("snapkv"), registry.card("random")])
    assert "[arXiv:2404.14469](https://arxiv.org/abs/2404.14469)" in text
    assert text.count("\n") == 4


def test_experiments(tmp_path):
    outcome = Outcome({"gain": 1.23456, "order": ["a", "b"]}, {}, {"x": True}, "mechanism-only", "too small", [1], [])
    done = perform(Experiment("x", "x", "it gains", lambda *_: outcome), "smoke", tmp_path)
    text = shown(outcome_table([done]))
    assert "gain: 1.235" in text and "order: a, b" in text and "too small" in text
    table = reproduction_table(tmp_path)
    assert "| [x](reproduction/x.json) | it gains |" in table and "**mechanism-only** too small" in table
    assert json.loads((tmp_path / "x.json").read_text())["verdict"] == "mechanism-only"


def test_plans():
    good = Choice("knorm(budget=0.5)", 1 << 20, True, 0.95, 0.1, 9.0, 1.0, 1024, 20)
    bad = Choice("full", 1 << 30, False, 1.0, 0.0, 9.0, 1.0, 1024, 20, "takes 2.0 times the memory")
    plan = Plan("tiny", 1024, 1 << 29, 0.9, 2, "other", "quality was measured on other", [good, bad])
    text = shown(plan_table(plan))
    for word in ("knorm(budget=0.5)", "95% (n=20)", "fits", "takes 2.0 times", "× 2 rows", "measured on other"):
        assert word in text
    empty = shown(plan_table(Plan("tiny", 1024, 1, 0.9, 1, "tiny", "", [bad])))
    assert "Nothing fits" in empty
