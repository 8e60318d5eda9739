"""Which recipes may be the best: no winner where there is none, a winner where there is one, and the test itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from longspan.evaluation import ranking
from longspan.evaluation.ranking import better, standing, standings, step_down
from longspan.evaluation.statistics import holm, paired, summarise

DRAWS = 300


def right_or_wrong(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Recipes that are right on 80% of examples, on the same ones half of the time."""
    chance = np.where(rng.random((n, k)) < 0.5, rng.random((n, 1)), rng.random((n, k)))
    return (chance < 0.8).astype(float)


def skewed(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Hard and easy examples, and a long tail of bad luck."""
    return rng.normal(size=(n, 1)) - rng.exponential(size=(n, k)) ** 2


def uneven(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """The same mean, very different spreads."""
    return rng.normal(size=(n, k)) * np.arange(1, k + 1) ** 2


@pytest.mark.parametrize("k", [2, 3, 6])
@pytest.mark.parametrize("n", [10, 30])
@pytest.mark.parametrize("draw", [right_or_wrong, skewed, uneven])
def test_among_equals_a_winner_is_named_and_somebody_called_worse_in_at_most_5_percent(
    draw: Callable[..., np.ndarray], n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "SAMPLED_TOSSES", 399)
    rng = np.random.default_rng(k + 10 * n)
    found = [standing(draw(rng, n, k)) for _ in range(DRAWS)]
    # 5% of 300 draws, and 2.5 standard errors of a share of 5%.
    most = DRAWS * (0.05 + 2.5 * (0.05 * 0.95 / DRAWS) ** 0.5)
    assert sum("best" in one for one in found) <= (most if k == 2 else DRAWS * 0.05)
    assert sum("worse" in one for one in found) <= most


def test_two_equal_ones_far_ahead_of_the_rest_stay_together_and_the_rest_is_worse() -> None:
    rng, parted = np.random.default_rng(0), 0
    for _ in range(100):
        values = rng.normal(size=(20, 5))
        values[:, 2:] = 3 * values[:, 2:] - 8
        found = standing(values)
        assert found[2:] == ["worse"] * 3
        parted += "worse" in found[:2]
    assert parted <= 10


@pytest.mark.parametrize(("n", "ahead"), [(8, 1.5), (40, 0.6)])
def test_a_clear_winner_is_found(n: int, ahead: float) -> None:
    rng, named = np.random.default_rng(1), 0
    for _ in range(40):
        values = rng.normal(size=(n, 1)) + 0.3 * rng.normal(size=(n, 5))
        values[:, 3] += ahead
        found = standing(values)
        assert "best" not in found or found[3] == "best"
        named += found[3] == "best"
    assert named >= 36


def test_one_comparison_is_the_sign_flip_test_of_pairs() -> None:
    rng = np.random.default_rng(2)
    few, many = rng.normal(0.5, 1, (9, 2)), rng.normal(0.2, 1, (50, 2))
    assert step_down(few[:, :1] - few[:, 1:])[0] == pytest.approx(paired(few[:, 0], few[:, 1]).p_value)
    assert step_down(many[:, :1] - many[:, 1:])[0] == pytest.approx(paired(many[:, 0], many[:, 1]).p_value, abs=0.02)
    scores = (rng.random((11, 2)) < (0.9, 0.2)).astype(float)
    assert step_down(scores[:, :1] - scores[:, 1:])[0] == pytest.approx(paired(scores[:, 0], scores[:, 1]).p_value)


def test_step_down_by_hand() -> None:
    """Three examples: all eight signs, largest t first, then the largest of what is left."""
    d = np.array([[1.0, 1.0, 3.0], [1.0, -1.0, 1.0], [1.0, 2.0, -1.0]])
    t = np.abs(d.sum(axis=0)) / np.sqrt((d**2).sum(axis=0))
    signs = np.array(list(itertools.product((1, -1), repeat=3)))
    tossed = np.abs(signs @ d) / np.sqrt((d**2).sum(axis=0))
    order, expected, before = np.argsort(-t), np.empty(3), 0.0
    for place, j in enumerate(order):
        before = max(before, float((tossed[:, order[place:]].max(axis=1) >= t[j] - 1e-12).mean()))
        expected[j] = before
    assert step_down(d) == pytest.approx(expected)
    assert len(set(expected)) > 1


def test_it_loses_less_than_holm_where_recipes_are_nearly_the_same() -> None:
    rng = np.random.default_rng(3)
    values = np.repeat(rng.normal(size=(8, 1)), 6, axis=1) + 0.01 * rng.normal(size=(8, 6))
    values[:, 0] += 1
    pairs = list(itertools.combinations(range(6), 2))
    corrected = dict(zip(pairs, holm([paired(values[:, a], values[:, b]).p_value for a, b in pairs])))
    assert corrected[0, 1] > 0.05  # the smallest p-value of 8 signs, 15 times
    assert standing(values) == ["best"] + ["worse"] * 5


def test_twins_are_never_parted_and_infinite_or_missing_values_part_nobody() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=(20, 3))
    values[:, 1] = values[:, 0]
    values[:, 2] -= 5
    assert standing(values) == ["may-be-best", "may-be-best", "worse"]
    assert better(values)[0][1] is None
    values[3, 2] = -np.inf
    assert standing(values) == ["may-be-best"] * 3
    apart = rng.normal(size=(20, 2))
    apart[:10, 0] = np.nan
    apart[10:, 1] = np.nan
    assert standing(apart) == ["may-be-best"] * 2


def test_a_circle_of_different_examples_names_nobody() -> None:
    values = np.full((60, 3), np.nan)
    for at in range(3):  # on its examples, `at` is far ahead of the next one
        values[20 * at : 20 * at + 20, at] = 1 + 0.01 * np.arange(20)
        values[20 * at : 20 * at + 20, (at + 1) % 3] = 0
    assert standing(values) == ["may-be-best"] * 3


def row(recipe: str, index: int, score: float | None, nll: float, task: str = "niah") -> dict[str, Any]:
    return {"model": "m", "recipe": recipe, "task": task, "length": 100, "seed": 0, "index": index, "text_hash": "",
            "compress": "before-question", "score": score, "answer_nll": nll}


def test_lines_of_a_summary_say_how_recipes_stand_beside_each_other() -> None:
    rows = []
    for i in range(20):
        rows += [row("full", i, 1.0, 0.0), row("a", i, float(i % 2), 1.0 + 0.01 * i), row("b", i, float(i % 2), 2.0 + 0.01 * i),
                 row("c", i, 0.0, 1.5 + 0.02 * (i % 3))]
    lines = {line["recipe"]: line for line in summarise(rows)}
    assert "standing" not in lines["full"]
    assert lines["a"]["standing"] == {"accuracy": "may-be-best", "answer_nll": "best"}
    assert lines["b"]["standing"] == {"accuracy": "may-be-best", "answer_nll": "worse"}
    assert lines["c"]["standing"] == {"accuracy": "worse", "answer_nll": "worse"}


def test_one_recipe_beside_the_dense_run_and_figures_that_are_missing_have_no_standing() -> None:
    rows = [row(r, i, None, 1.0) for i in range(5) for r in ("full", "a")]
    assert not any("standing" in line for line in summarise(rows))
    rows = [row(r, i, None, 1.0 + i) for i in range(5) for r in ("a", "b")]
    assert summarise(rows)[1]["standing"] == {"accuracy": None, "answer_nll": "may-be-best"}
    assert standings([]) == []


def test_tasks_are_pooled_example_by_example() -> None:
    """Ahead on one task and behind on the other by as much: over both nobody is."""
    rows = []
    for i in range(12):
        rows += [row("a", i, None, 1.0 + 0.01 * i, "x"), row("b", i, None, 2.0 + 0.01 * i, "x")]
        rows += [row("a", i, None, 2.0 + 0.01 * i, "y"), row("b", i, None, 1.0 + 0.01 * i, "y")]
    each = {(line["recipe"], line["task"]): line["standing"]["answer_nll"] for line in summarise(rows)}
    assert each == {("a", "x"): "best", ("b", "x"): "worse", ("a", "y"): "worse", ("b", "y"): "best"}
    pooled = [line["standing"]["answer_nll"] for line in summarise(rows, by=("recipe",))]
    assert pooled == ["may-be-best", "may-be-best"]
