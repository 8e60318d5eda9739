import json
import math

import numpy as np
import pytest

from longspan.evaluation.ink import GRID, Curve, damage, drop_ratio, fit, normalised
from longspan.registry import Refused

PUBLISHED = {0.0: 87.0, 0.01: 85.5, 0.02: 82.0, 0.03: 78.0, 0.05: 76.0, 0.1: 72.5, 1.0: 62.0}


def questions(y, n=40, noise=0.0, seed=0) -> Curve:
    """Questions that differ by a level of their own and by noise."""
    rng = np.random.default_rng(seed)
    return Curve(GRID, np.asarray(y) + rng.normal(size=(n, 1)) + noise * rng.normal(size=(n, len(GRID))))


def falling(g):
    return 3.0 - 2.0 * damage(GRID, g)


def test_published_series_has_a_drop_ratio_of_0_58():
    assert drop_ratio(tuple(PUBLISHED), list(PUBLISHED.values())) == 0.58


@pytest.mark.parametrize("g", [0.1, 1.0, 10.0, 50.0])
def test_fit_finds_g_from_noiseless_curves(g):
    made = fit(GRID, falling(g))
    assert made.g == pytest.approx(g, rel=0.01)
    assert (made.y0, made.delta) == (pytest.approx(3.0, abs=0.01), pytest.approx(2.0, abs=0.01))


def test_linear_damage_fits_a_small_g():
    made = fit(GRID, [1 - 0.5 * p for p in GRID])
    assert made.g < 0.05 and made.index < 0.01


def test_questions_give_damage_ratio_and_intervals():
    curve = questions(falling(10.0), noise=0.05)
    made = curve.fit()
    assert curve.drop_ratio == pytest.approx(0.55, abs=0.03)
    assert curve.damage[0] == 0 and curve.damage[-1] == 1
    assert made.g_interval[0] < made.g < made.g_interval[1] and made.g_interval[0] < 10 < made.g_interval[1]
    assert made.index_interval[0] < made.index < made.index_interval[1] < 0.5
    assert curve.fit() == made and curve.fit(seed=1).g_interval != made.g_interval


def test_the_level_of_a_question_does_not_widen_intervals():
    quiet, loud = questions(falling(10.0), noise=0.05), questions(falling(10.0), noise=0.05)
    loud = Curve(GRID, loud.scores + 50 * np.arange(len(loud.scores))[:, None])
    assert loud.fit().g_interval == pytest.approx(quiet.fit().g_interval, rel=1e-6)


def test_alike_pools_leave_damage_undefined_with_a_message():
    curve = questions([1.0] * len(GRID))
    with pytest.warns(UserWarning, match="damage is undefined"):
        assert np.isnan(curve.damage).all()
    report = curve.report()
    assert math.isnan(report["drop_ratio"]) and math.isnan(report["g"]) and "standard errors" in report["message"]
    assert np.isnan(normalised((0.0, 1.0), [2.0, 2.0])).all()


def test_damage_below_two_standard_errors_is_refused():
    curve = questions(falling(1.0), n=10, noise=8.0, seed=2)
    with pytest.raises(Refused, match="not above 2 standard errors"):
        curve.fit()
    with pytest.raises(Refused, match="not above 2 standard errors"):
        _ = curve.drop_ratio
    with pytest.raises(Refused, match="at least 2 questions"):
        questions(falling(1.0), n=1).fit()


def test_report_of_damage_is_json():
    report = questions(falling(10.0), noise=0.05).report()
    assert json.loads(json.dumps(report))["message"] == "" and report["questions"] == 40


def test_shares_that_are_no_grid_are_refused():
    for shares in ((0.0, 0.5), (0.1, 1.0), (0.0, 0.5, 0.5, 1.0), (1.0, 0.0)):
        with pytest.raises(Refused, match="rising ones from 0 to 1"):
            Curve(shares, np.zeros((2, len(shares))))
    with pytest.raises(Refused, match=r"no score at p=0\.1"):
        drop_ratio((0.0, 0.2, 1.0), [1, 0.5, 0])


def row(share, index, score, **changes):
    meta = json.dumps({"share": share})
    figures = {"meta": meta, "index": index, "score": score, "answer_nll": 1 - score}
    return figures | {"recipe": "full", "length": 512, "seed": 0} | changes


def test_rows_of_a_run_make_a_curve():
    rows = [row(share, index, 1 - share * (index + 1) / 3) for share in (0.5, 1.0, 0.0) for index in (1, 0, 2)]
    curve = Curve.of(rows)
    assert curve.shares == (0.0, 0.5, 1.0) and curve.scores[:, 2] == pytest.approx([2 / 3, 1 / 3, 0])
    assert Curve.of(rows, "answer_nll").scores == pytest.approx(curve.scores - 1)
    with pytest.raises(Refused, match="question 2 has no row at share 0"):
        Curve.of(rows[:-1])
    with pytest.raises(Refused, match="rows of 2 recipes"):
        Curve.of([*rows, row(0.5, 0, 1.0, recipe="knorm")])
    with pytest.warns(UserWarning, match="1 rows repeat"):
        Curve.of([*rows, row(0.5, 0, 1.0)])
