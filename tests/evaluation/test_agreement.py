"""Comparing rankings: recall and rank correlation on rankings whose answers are known, and what sums up the layers."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from longspan.evaluation.agreement import Agreement, compare_rankings, over_layers
from longspan.registry import Refused


def ranking(n=50, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_a_ranking_agrees_with_itself_and_not_with_its_reverse():
    """Check 8."""
    r = ranking()
    recall, spearman = compare_rankings(r, r)
    assert recall == 1 and spearman == pytest.approx(1)
    recall, spearman = compare_rankings(-r, r)
    assert recall == 0 and spearman == pytest.approx(-1)
    assert compare_rankings(ranking(seed=1), r, W=0, share=1.0)[0] == 1


def test_recall_is_the_overlap_of_the_best_tenth_of_all_tokens():
    r = torch.arange(40.0)
    scores = r.clone()
    scores[[28, 29, 30, 31]] = torch.tensor([0.0, -1, 30, 31])  # two of the four best before the window fall behind
    assert compare_rankings(scores, r, W=8)[0] == 0.5
    scores[32:] = 1000  # the window is not compared
    assert compare_rankings(scores, r, W=8)[0] == 0.5


def test_spearman_is_scipys():
    a, b = ranking(seed=1).round(decimals=1), ranking().round(decimals=1)  # with ties
    wanted = stats.spearmanr(a[:42].numpy(), b[:42].numpy()).statistic
    assert compare_rankings(a, b)[1] == pytest.approx(wanted)


def test_equal_scores_have_no_correlation_and_the_earlier_of_equals_is_better():
    recall, spearman = compare_rankings(torch.zeros(20), torch.arange(20.0).flip(0), W=0)
    assert (recall, spearman) == (1.0, None)


def test_bad_rankings():
    with pytest.raises(Refused, match="1 of 9 ranked tokens are left to compare"):
        compare_rankings(torch.zeros(9), torch.zeros(9))
    with pytest.raises(Refused, match="NaN"):
        compare_rankings(torch.full((20,), float("nan")), ranking(20))
    with pytest.raises(ValueError, match="rank different tokens"):
        compare_rankings(torch.zeros(9), torch.zeros(10))


def test_layers_are_summed_up():
    assert over_layers([0.5, 0.7, 0.2]) == {"mean": pytest.approx(1.4 / 3), "min": 0.2, "spread": pytest.approx(0.5),
                                            "jump": pytest.approx(0.35)}
    assert over_layers([0.5, None, 0.2])["jump"] is None
    assert over_layers([]) == dict.fromkeys(("mean", "min", "spread", "jump"))
    found = Agreement([0.5, 0.6], [None, None]).as_json()
    assert found["recall_per_layer"] == [0.5, 0.6] and found["spearman"]["mean"] is None
