import numpy as np
import pytest

from longspan.evaluation.ink import competition, damage, g_of_attention, hard_share, ink_index, recovered_by_replacing
from longspan.registry import Refused

MARGINS = {"delta_e": 6.0, "delta_h": 2.5, "delta_o": 7.0, "distractor_tokens": 1000, "other_tokens": 200}


def softmax_on_gold(p: float) -> float:
    """Attention to a gold logit of 9 among explicit logits of all other tokens."""
    gold, hard = 9.0, round(p * 1000)
    others = [gold - 6.0] * (1000 - hard) + [gold - 2.5] * hard + [gold - 7.0] * 200
    weights = np.exp(np.array([gold, *others]) - gold)
    return float(weights[0] / weights.sum())


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_attention_is_that_of_an_explicit_softmax(p):
    assert competition(**MARGINS).alpha(p) == pytest.approx(softmax_on_gold(p), abs=1e-12)


def test_attention_falls_and_is_convex():
    made, p, h = competition(**MARGINS), np.linspace(0.1, 0.9, 9), 1e-4
    numerical = (made.alpha(p + h) - 2 * made.alpha(p) + made.alpha(p - h)) / h**2
    assert made.curvature(p) == pytest.approx(2 * (made.b - made.a) ** 2 * made.alpha(p) ** 3, rel=1e-14)
    assert made.curvature(p) == pytest.approx(numerical, rel=1e-3)
    assert (made.curvature(p) > 0).all() and (np.diff(made.alpha(p)) < 0).all()


def test_normalised_loss_of_attention_is_the_damage_curve():
    made, p = competition(**MARGINS), np.linspace(0, 1, 11)
    alpha = made.alpha(p)
    assert damage(p, made.g) == pytest.approx((alpha[0] - alpha) / (alpha[0] - alpha[-1]), abs=1e-12)


def test_a_gap_of_5_83_makes_hard_tokens_340_times_as_strong():
    assert np.exp(5.83) == pytest.approx(340, abs=0.5)
    assert float(hard_share(0.1, 5.83)) == pytest.approx(0.974, abs=5e-4)


def test_alike_distractors_do_linear_damage():
    made = competition(5.0, 5.0, 7.0, 1000, 200)
    p = np.linspace(0, 1, 11)
    assert made.g == 0 and damage(p, made.g) == pytest.approx(p, abs=1e-15) and float(ink_index(0.0)) == 0


@pytest.mark.parametrize("g,at_a_tenth", [(10, 0.55), (11.43, 0.58)])
def test_damage_at_a_tenth(g, at_a_tenth):
    assert float(damage(0.1, g)) == pytest.approx(at_a_tenth, abs=5e-5)


def test_attention_down_to_a_quarter_at_a_tenth_needs_a_g_of_31_67():
    g = g_of_attention(0.1, 0.24)
    assert g == pytest.approx(31.67, abs=5e-3) and 1 / (1 + g * 0.1) == pytest.approx(0.24)


@pytest.mark.parametrize("after,recovered", [(0.1, 0.40), (0.02, 0.80), (0.0, 1.0)])
def test_replacing_recovers_late(after, recovered):
    assert recovered_by_replacing(0.5, after, 10) == pytest.approx(recovered, abs=5e-3)


def test_index_is_the_area_above_the_diagonal_and_below_a_half():
    p = np.linspace(0, 1, 200_001)
    for g in (1e-4, 1e-2, 0.3, 10.0, 400.0):
        assert float(ink_index(g)) == pytest.approx(float(np.trapezoid(damage(p, g) - p, p)), rel=1e-4, abs=1e-9)
    assert float(ink_index(0.01 - 1e-9)) == pytest.approx(float(ink_index(0.01)), rel=1e-6)
    assert 0.49 < float(ink_index(1e6)) < 0.5


@pytest.mark.parametrize("call", [lambda: damage(1.5, 1), lambda: damage(0.5, -1), lambda: ink_index(-0.1),
                                  lambda: hard_share(-1, 2), lambda: g_of_attention(0, 0.5),
                                  lambda: recovered_by_replacing(0.1, 0.5, 10)])
def test_values_out_of_range_are_refused(call):
    with pytest.raises(Refused, match="expected"):
        call()
