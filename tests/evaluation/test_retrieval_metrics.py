import math

import pytest

from longspan.evaluation import retrieval_metrics as found


def test_ndcg_variants():
    assert found.ndcg([0, 1], 2, "longmemeval") == 1.0
    assert found.ndcg([0, 1], 2) == pytest.approx(1 / math.log2(3))
    assert found.dcg([1, 1, 1], 3) == pytest.approx(1 + 1 / math.log2(3) + 0.5)
    assert found.dcg([1, 1, 1], 3, "longmemeval") == pytest.approx(2 + 1 / math.log2(3))
    assert found.ndcg([0, 0], 2) == 0.0
    assert found.ndcg([1], 2, ideal=[1, 1]) == pytest.approx(1 / (1 + 1 / math.log2(3)))  # one that wasn't ranked
    with pytest.raises(ValueError, match="variant"):
        found.dcg([1], 1, "other")


def test_recall_of_any_and_all():
    assert found.recall_any(["a", "b", "c"], ["c", "z"], 3) == 1.0
    assert found.recall_any(["a", "b", "c"], ["c", "z"], 2) == 0.0
    assert found.recall_all(["a", "b", "c"], ["c", "a"], 3) == 1.0
    assert found.recall_all(["a", "b", "c"], ["c", "z"], 3) == 0.0


def test_scores_of_one_ranking():
    scores = found.retrieval_scores(["x", "a", "b"], ["a", "b"], cutoffs=(1, 2, 3))
    assert [scores[f"recall_any@{k}"] for k in (1, 2, 3)] == [0.0, 1.0, 1.0]
    assert [scores[f"recall_all@{k}"] for k in (1, 2, 3)] == [0.0, 0.0, 1.0]
    assert scores["ndcg_any@2"] == pytest.approx(1 / 2)
    assert scores["ndcg_any@3"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    with pytest.raises(ValueError, match="without evidence"):
        found.retrieval_scores(["x"], [])


def test_abstention_is_left_out_of_the_means():
    rankings = {"q1": ["a"], "q2": ["x"], "q3_abs": ["x"]}
    means = found.mean_retrieval_scores(rankings, {"q1": ["a"], "q2": ["a"]}, cutoffs=(1,))
    assert means == {"recall_any@1": 0.5, "recall_all@1": 0.5, "ndcg_any@1": 0.5}
    assert found.mean_retrieval_scores({"q3_abs": ["x"]}, {}) == {}


def test_turns_become_sessions():
    assert found.sessions_of_turns(["s_1_4", "s_1_2", "s_2_0", "s_3_1"], 2) == ["s_1", "s_2"]


def test_rankings_are_read_from_the_longest_run():
    assert found.parse_ranking("First 3 > 1. So: 7 > 2 > 9") == ["7", "2", "9"]
    assert found.parse_ranking("none") == []


def test_ndcg_of_a_written_ranking():
    gains = {"7": 2.0, "2": 1.0, "9": 0.0}
    assert found.ranking_ndcg("Ranking: 7 > 2 > 9", gains) == 1.0
    best = 2 + 1 / math.log2(3)
    assert found.ranking_ndcg("2 > 7 > 9", gains) == pytest.approx((1 + 2 / math.log2(3)) / best)
    assert found.ranking_ndcg("7 > 7 > 7", gains) == pytest.approx(2 / best)  # an id counts once
    assert found.ranking_ndcg("", gains) == 0.0
