"""The planner's check: what is hidden, the baseline, and how predictions are counted."""

from __future__ import annotations

import math

import pytest

from longspan.evaluation.prediction import Prediction, cells_of
from longspan.evaluation.shape import Shape
from longspan.evaluation.statistics import DENSE, mean_interval
from longspan.experiments import planner_check
from longspan.experiments.planner_check import Nearest, Share, figures, hide, made_up, measure, share_figures, told_bytes, wilson
from longspan.registry import Refused

SHAPE = Shape(30, 3, 64, 2)


@pytest.fixture(scope="module")
def cells():
    return cells_of(made_up(), SHAPE)


def test_a_third_is_hidden_and_never_the_dense_run(cells):
    shown, hidden = hide(cells, 0)
    able = [c for c in cells if c.place.recipe != DENSE]
    assert len(hidden) == round(len(able) / 3) and not set(map(id, shown)) & set(map(id, hidden))
    assert len(shown) + len(hidden) == len(cells) and all(c.place.recipe != DENSE for c in hidden)
    assert hide(cells, 0)[1] == hidden != hide(cells, 1)[1]


def test_the_interval_is_wilsons(cells):
    cell = next(c for c in cells if 0 < c.accuracy < 1)
    hits = round(cell.accuracy * cell.n)
    _, low, high = mean_interval([1.0] * hits + [0.0] * (cell.n - hits))
    assert wilson(cell, 1.959963984540054) == pytest.approx((low, high))
    assert wilson(cell, 1.96, 1.0) == (0.0, 1.0)


def test_the_baseline_takes_the_nearest_cell_of_the_family_and_covers_what_it_was_tuned_on(cells):
    made = Nearest.tuned(cells)
    for cell in (c for c in cells if c.place.recipe != DENSE):
        near = Nearest([c for c in cells if c is not cell], made.weight).of(cell)
        assert near.place.task == cell.place.task and near.place.family == cell.place.family
    others = [(c, Nearest([o for o in cells if o is not c], made.weight, made.reach, made.margin)) for c in cells
              if c.place.recipe != DENSE]
    told = [(c.accuracy, baseline.accuracy(c)) for c, baseline in others]
    assert sum(p.low <= value <= p.high for value, p in told) >= math.ceil(0.95 * (len(told) + 1))


def test_what_is_declined_counts_as_outside():
    told = [Prediction(0.5, 0.4, 0.6), Prediction(0.5, 0.4, 0.6), Prediction(reason="unknown"), Prediction(0.1, 0.0, 0.2)]
    found = figures(told, [0.6, 0.7, 0.5, None])
    assert found == {"cells": 3, "declined": 1, "inside": 1 / 3, "width": pytest.approx(0.2), "error": pytest.approx(0.15)}


def test_recommendations_are_counted_by_the_lower_end():
    good, unsure, bad = Prediction(0.95, 0.92, 1.0), Prediction(0.9, 0.8, 1.0), Prediction(0.2, 0.1, 0.3)
    found = share_figures([Share(good, Prediction(0.95, 0.8, 1.0), 0.85), Share(unsure, unsure, 0.95), Share(bad, bad, 0.4)])
    assert found["recommended"] == found["recommended, measured below the floor"] == 1
    assert found["not recommended, measured above the floor"] == 1 and found["inside"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["inside the share's own interval"] == pytest.approx(1 / 3, abs=1e-4)


def test_bytes_are_told_for_the_contexts_the_dense_run_read():
    rows = [{"recipe": r, "task": "niah", "length": 512, "context_tokens": n, "cache_bytes": b}
            for r, n, b in (("full", 400, 1), ("full", 500, 1), ("knorm(budget=0.5)", 400, 10), ("knorm(budget=0.5)", 500, 20))]
    told, measured = told_bytes(rows, SHAPE, "knorm(budget=0.5)", "niah", 512)
    assert told == 225 * 90 * (2 * 64 * 2 + 4) and measured == 15


def test_missing_data_and_paper_scale_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(planner_check, "DATA", tmp_path / "planner_sweep.parquet")
    for scale, what in (("small", r"docs/data/planner_sweep\.parquet"), ("paper", "larger models")):
        with pytest.raises(Refused, match=what):
            measure(scale, lambda _: None)
