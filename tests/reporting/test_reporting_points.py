from __future__ import annotations

import math
from typing import Any

import pytest

from longspan.reporting.points import labelled, points


def line(recipe: str = "x", n: int = 10, accuracy: float | None = 0.5, ci: Any = (0.3, 0.8), **more: Any) -> Any:
    return {
        "recipe": recipe, "compress": "before-question", "n": n, "accuracy": accuracy, "ci95": list(ci),
        "answer_nll": 1.0, "cache_bytes": 100, "full_cache_bytes": 400, "ttft_s": 1.0, "tokens_per_s": 10.0, **more,
    }  # fmt: skip


def test_intervals_combine_by_mover() -> None:
    (found,) = points([line(n=10, accuracy=0.5, ci=(0.3, 0.8)), line(n=30, accuracy=0.9, ci=(0.8, 0.95))])
    assert found.accuracy == pytest.approx(0.8) and found.n == 40
    assert found.lo == pytest.approx(0.8 - math.hypot(0.25 * 0.2, 0.75 * 0.1))
    assert found.hi == pytest.approx(0.8 + math.hypot(0.25 * 0.3, 0.75 * 0.05))


def test_one_line_keeps_its_interval_and_means_are_weighted() -> None:
    (one,) = points([line()])
    assert (one.lo, one.hi) == pytest.approx((0.3, 0.8)) and one.share == 0.25
    (two,) = points([line(n=1, cache_bytes=100), line(n=3, cache_bytes=500)])
    assert two.cache_bytes == 400


def test_nll_interval_is_that_of_the_paired_difference() -> None:
    versus = {"nll_difference": 0.4, "nll_ci95": [0.3, 0.6]}
    (found,) = points([line(answer_nll=2.0, vs_full=versus)])
    assert (found.nll_lo, found.nll_hi) == pytest.approx((1.9, 2.2))
    (dense,) = points([line("full")])
    assert dense.nll_lo is None and dense.answer_nll == 1.0


def test_not_measured_stays_out() -> None:
    (found,) = points([line(accuracy=None, ci=(None, None)), line(accuracy=0.7, ci=(0.5, 0.9), n=5)])
    assert found.accuracy == pytest.approx(0.7) and found.lo == pytest.approx(0.5)
    (found,) = points([line(accuracy=0.5, ci=(None, None)), line()])
    assert found.accuracy == 0.5 and found.lo is None
    (found,) = points([line(accuracy=None, ci=(None, None), cache_bytes=None)])
    assert found.accuracy is None and found.share is None


def test_a_recipe_with_both_moments_of_compression_is_two_points() -> None:
    lines = [line(), line(compress="after-question"), line("full"), line("full", compress="after-question"), line("y")]
    assert [found.recipe for found in points(lines)] == ["x (before-question)", "x (after-question)", "full", "y"]
    assert [found["recipe"] for found in labelled([line(), line("y")])] == ["x", "y"]
