"""Margins, bias and the distance effect."""

from __future__ import annotations

import numpy as np
import pytest

from longspan.evaluation.order import Margins, distance_effect, margins, summary
from longspan.evaluation.order.judge import beside_people, by_bin, logistic, read_people
from longspan.registry import Refused

RNG = np.random.default_rng(0)


def scores(n, oracle):
    """Logits (l_A, l_B) of both orders."""
    one, two = np.zeros((n, 2)), np.zeros((n, 2))
    one[:, 0], two[:, 1 if oracle else 0] = 3.0, 3.0
    return margins(one, two)


def test_an_oracle_is_always_right_without_bias():
    found = scores(10, oracle=True)
    assert found.right.mean() == found.raw.mean() == 1.0 and (found.bias == 0).all() and (found.m == 3).all()


def test_a_constant_answer_is_half_right_with_no_margin():
    found = scores(10, oracle=False)
    assert (found.m == 0).all() and (found.right == 0.5).all() and found.raw.mean() == 0.5 and (found.bias == 3).all()


def test_a_constant_on_one_label_cancels_in_m():
    one, two = RNG.normal(size=(20, 2)), RNG.normal(size=(20, 2))
    plain, moved = margins(one, two), margins(one + [5.0, 0.0], two + [5.0, 0.0])
    np.testing.assert_allclose(moved.m, plain.m, atol=1e-12)
    np.testing.assert_allclose(moved.bias, plain.bias + 5)


def test_exchanging_the_labels_of_both_orders_turns_the_bias_only():
    one, two = RNG.normal(size=(20, 2)), RNG.normal(size=(20, 2))
    plain, turned = margins(one, two), margins(two[:, ::-1], one[:, ::-1])
    np.testing.assert_allclose(turned.m, plain.m)
    np.testing.assert_allclose(turned.bias, -plain.bias)


def test_margins_that_are_no_numbers_are_refused():
    with pytest.raises(Refused, match="1 of 3 pairs"):
        Margins(np.array([0.0, np.nan, 1.0]), np.zeros(3))


def test_the_slope_is_that_of_the_drawn_answers():
    x = np.log(RNG.uniform(0.01, 1, 20_000))
    right = (RNG.random(len(x)) < 1 / (1 + np.exp(-(1.5 + 0.6 * x)))).astype(float)
    b0, b1 = logistic(x, right)
    assert b0 == pytest.approx(1.5, abs=0.12) and b1 == pytest.approx(0.6, abs=0.06)


def test_the_interval_is_over_texts():
    delta = RNG.uniform(0.01, 1, 400)
    right = (RNG.random(400) < 1 / (1 + np.exp(-(2 + 1.0 * np.log(delta))))).astype(float)
    few = distance_effect(right, delta, np.zeros(400, int))
    many = distance_effect(right, delta, np.arange(400) // 20, resamples=200)
    assert few.low is None and many.b1 == few.b1
    assert many.low is not None and many.high is not None and 0 < many.low < many.b1 < many.high
    # The same pairs in copies: without whole texts drawn together the interval would shrink.
    copies = distance_effect(np.tile(right, 4), np.tile(delta, 4), np.tile(np.arange(400) // 20, 4), resamples=200)
    assert copies.high - copies.low == pytest.approx(many.high - many.low, rel=0.1)


def test_answers_all_right_have_a_finite_slope():
    found = distance_effect(np.ones(40), RNG.uniform(0.01, 1, 40), np.arange(40) // 10, resamples=20)
    assert abs(found.b1) < 0.1


def test_a_distance_of_zero_is_refused():
    with pytest.raises(Refused, match="above 0"):
        distance_effect(np.ones(3), np.array([0.1, 0.0, 0.2]), np.arange(3))


def test_the_summary_has_accuracy_by_distance():
    right = np.array([1.0, -1.0, 1.0, 1.0])
    found = summary(Margins(right, right), np.array([0.1, 0.1, 0.4, 0.4]), np.array([0, 0, 5, 5]), np.array([0, 1, 0, 1]))
    assert found["accuracy"] == 0.75 and found["bias"] == 0.0
    assert [(r["bin"], r["n"], r["accuracy"]) for r in found["by distance"]] == [(0, 2, 0.5), (5, 2, 1.0)]
    assert by_bin(right, np.zeros(4, int), np.full(4, 0.25))[0]["distance"] == pytest.approx(0.25)


def test_answers_of_people_are_read(tmp_path):
    file = tmp_path / "people.csv"
    file.write_text("pair,correct\n7,1\n7,0\n9,1\n")
    assert read_people(file) == {"7": 0.5, "9": 1.0}
    file.write_text("pair,right\n7,1\n")
    with pytest.raises(Refused, match="expected pair and correct"):
        read_people(file)
    file.write_text("pair,correct\n7,maybe\n")
    with pytest.raises(Refused, match="correct='maybe'"):
        read_people(file)
    with pytest.raises(Refused, match="no such file"):
        read_people(tmp_path / "none.csv")


def test_people_and_model_are_set_side_by_side():
    people = {"1": 1.0, "2": 0.5, "3": 0.0, "9": 1.0}
    found = beside_people(np.array([1.0, 0.0, 0.0, 1.0]), ["1", "2", "3", "4"], people)
    assert found["pairs"] == 3 and found["model"] == pytest.approx(1 / 3) and found["people"] == 0.5
    assert found["correlation"] == pytest.approx(np.corrcoef([1, 0, 0], [1, 0.5, 0])[0, 1])
    with pytest.raises(Refused, match="no pair of the 4"):
        beside_people(np.ones(1), ["7"], people)
