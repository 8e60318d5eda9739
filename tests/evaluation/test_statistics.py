from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from longspan.evaluation.statistics import average, holm, mean_interval, paired, pareto, summarise
from longspan.registry import Refused

# ------------------------------------------------------------------------------------------------------- mean_interval


@pytest.mark.parametrize(("right", "n"), [(0, 5), (1, 1), (7, 10), (10, 10), (48, 200)])
def test_right_or_wrong_scores_get_wilsons_interval(right: int, n: int) -> None:
    mean, lo, hi = mean_interval([1] * right + [0] * (n - right))
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert (mean, lo, hi) == pytest.approx((right / n, expected.low, expected.high), abs=1e-12)


def test_bootstrap_interval_is_near_the_t_interval_and_repeatable() -> None:
    x = np.random.default_rng(3).normal(2.0, 1.5, size=80)
    mean, lo, hi = mean_interval(x, seed=1)
    t = stats.t.interval(0.95, 79, loc=x.mean(), scale=stats.sem(x))
    assert mean == pytest.approx(x.mean())
    assert (lo, hi) == pytest.approx(t, abs=0.08)
    assert (mean, lo, hi) == mean_interval(x, seed=1) != mean_interval(x, seed=2)


def test_bootstrap_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        _, lo, hi = mean_interval(rng.gamma(2.0, 1.0, size=40), seed=i, n=400)
        hits += lo <= 2.0 <= hi
    assert 0.89 <= hits / 200 <= 0.985


def test_a_higher_level_gives_a_wider_interval() -> None:
    x = np.random.default_rng(0).normal(size=30)
    _, lo, hi = mean_interval(x, level=0.8)
    _, wide_lo, wide_hi = mean_interval(x, level=0.99)
    assert wide_lo < lo < hi < wide_hi


def test_degenerate_samples() -> None:
    assert all(map(math.isnan, mean_interval([])))
    assert all(map(math.isnan, mean_interval([None, math.nan])))
    one = mean_interval([2.5])
    assert one[0] == 2.5 and math.isnan(one[1]) and math.isnan(one[2])
    assert mean_interval([2.5, 2.5, None]) == (2.5, 2.5, 2.5)
    mean, lo, hi = mean_interval([math.inf, 1.0])
    assert mean == math.inf and math.isnan(lo) and math.isnan(hi)


def test_all_right_and_all_wrong_end_exactly_at_the_edge() -> None:
    for n in range(1, 60):
        assert mean_interval([1] * n)[2] == 1.0 and mean_interval([0] * n)[1] == 0.0


def test_flat_scores_keep_an_honest_interval() -> None:
    mean, lo, hi = mean_interval([0.5] * 4, bounded=True)
    assert mean == 0.5 and (lo, hi) == pytest.approx(tuple(stats.binomtest(2, 4).proportion_ci(method="wilson")))
    _, lo, hi = mean_interval([0.3], bounded=True)
    assert 0 <= lo < 0.3 < hi <= 1


# -------------------------------------------------------------------------------------------------------------- paired


def test_mcnemar_counts_only_examples_that_one_of_the_two_got_right() -> None:
    a = [1] * 8 + [0] * 2 + [1] * 30
    b = [0] * 8 + [1] * 2 + [1] * 30
    found = paired(a, b)
    assert (found.wins, found.losses, found.ties, found.n) == (8, 2, 30, 40)
    assert found.difference == pytest.approx(0.15)
    assert found.p_value == pytest.approx(stats.binomtest(8, 10).pvalue)
    assert found.lo < 0.15 < found.hi


def test_agresti_min_interval_against_the_adjusted_table() -> None:
    # 40 pairs with 8 and 2 discordant; half a count in each of four cells: n = 42, 8.5 and 2.5.
    found = paired([1] * 8 + [0] * 2 + [1] * 30, [0] * 8 + [1] * 2 + [1] * 30)
    b, c, n = 8.5, 2.5, 42
    se = math.sqrt(b + c - (b - c) ** 2 / n) / n
    assert (found.lo, found.hi) == pytest.approx(((b - c) / n - 1.959964 * se, (b - c) / n + 1.959964 * se), abs=1e-6)


def test_two_equal_recipes_differ_by_nothing_but_that_is_not_certain() -> None:
    found = paired([1, 0, 1, 1], [1, 0, 1, 1])
    assert (found.difference, found.p_value, found.ties) == (0.0, 1.0, 4)
    assert found.lo == pytest.approx(-found.hi) and found.hi > 0.1


def test_sign_flip_is_exact_for_few_pairs() -> None:
    assert paired([1.1, 2.2, 3.3, 4.4, 5.5], [1.0, 2.0, 3.0, 4.0, 5.0]).p_value == 2 / 32
    assert paired([0.5, 0.5, 0.7], [0.5, 0.5, 0.6]).p_value == 1.0  # one difference that isn't zero
    assert paired([0.5] * 10 + [0.1] * 9, [0.3] * 10 + [0.1] * 9).p_value == 2 / 2**10  # equal pairs don't count


@pytest.mark.parametrize("n", [9, 12, 60])
def test_sign_flip_agrees_with_scipys_permutation_test(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.normal(0.3, 1, n), rng.normal(0, 0.5, n)
    expected = stats.permutation_test(
        (a - b,), np.mean, permutation_type="samples", n_resamples=4096 if n <= 12 else 20_000, rng=0
    ).pvalue
    assert paired(a, b).p_value == pytest.approx(expected, abs=1e-9 if n <= 12 else 0.015)


def test_sampled_p_value_is_never_zero_and_depends_on_the_seed_only() -> None:
    a = np.linspace(1, 2, 40)
    assert paired(a, a - 1 - 0.01 * a).p_value == pytest.approx(1 / 10_000)
    b = a + np.random.default_rng(0).normal(size=40)
    assert paired(a, b, seed=4) == paired(a, b, seed=4)


def test_pairs_with_a_missing_value_are_left_out() -> None:
    found = paired([1, None, 0, math.nan, 1], [0, 1, 0, 1, None])
    assert (found.n, found.wins, found.losses) == (2, 1, 0)


def test_paired_degenerate_and_misaligned() -> None:
    none = paired([None], [1])
    assert none.n == 0 and math.isnan(none.difference) and math.isnan(none.p_value)
    one = paired([0.7], [0.2])
    assert one.difference == pytest.approx(0.5) and math.isnan(one.lo) and one.p_value == 1.0
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        paired([1, 2], [1])


def test_pairing_sees_what_the_spread_between_examples_hides() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 5, 30)
    a, b = hard + 0.3 + 0.1 * rng.normal(size=30), hard
    found = paired(a, b)
    assert found.lo > 0.2 and found.p_value < 0.001
    assert stats.ttest_ind(a, b).pvalue > 0.5


# ---------------------------------------------------------------------------------------------------------------- holm


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
    found = holm([0.02, None, math.nan])
    assert found[0] == 0.02 and math.isnan(found[1]) and math.isnan(found[2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_never_lowers_a_p_value(p: list[float]) -> None:
    found = holm(p)
    assert all(before <= after <= 1 for before, after in zip(p, found))
    by_p = sorted(range(len(p)), key=lambda i: (p[i], i))
    assert [found[i] for i in by_p] == sorted(found)


# -------------------------------------------------------------------------------------------------------------- pareto


def test_pareto_by_hand() -> None:
    points = [(0.9, 100), (0.5, 10), (0.5, 10), (0.4, 20), (0.9, 120), (None, 1), (0.7, 50), (0.2, math.nan)]
    assert pareto(points) == [1, 2, 6, 0]
    assert pareto([]) == []


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=10))
def test_pareto_is_what_its_definition_says(points: list[tuple[int, int]]) -> None:
    def beaten(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return b[0] >= a[0] and b[1] <= a[1] and a != b

    expected = [i for i, a in enumerate(points) if not any(beaten(a, b) for b in points)]
    found = pareto(points)
    assert sorted(found) == expected
    assert [points[i][1] for i in found] == sorted(points[i][1] for i in found)


# ----------------------------------------------------------------------------------------------------------- summarise

KEYS = {
    "recipe", "compress", "task", "length", "n", "accuracy", "ci95", "answer_nll", "cache_bytes", "full_cache_bytes",
    "ttft_s", "tokens_per_s", "achieved",
}  # fmt: skip


def row(recipe: str = "full", index: int = 0, score: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "model": "m", "recipe": recipe, "task": "niah", "length": 1000, "index": index, "seed": 0,
        "compress": "before-question", "score": score, "answer_nll": 0.5, "cache_bytes": 1000,
        "full_cache_bytes": 4000, "ttft_s": 1.0, "new_tokens": 10, "decode_s": 1.0, "tokens_per_s": 10.0,
        "text_hash": "a", "achieved": None, **more,
    }  # fmt: skip


def test_lines_have_exactly_the_keys_of_compare_and_keep_first_seen_order() -> None:
    rows = [row("b(x=1)", 0), row("full", 0), row("b(x=1)", 1, task="vt"), row("full", 1), row("b(x=1)", 1)]
    lines = summarise(rows)
    assert [(line["recipe"], line["task"], line["n"]) for line in lines] == [
        ("b(x=1)", "niah", 2), ("full", "niah", 2), ("b(x=1)", "vt", 1),
    ]  # fmt: skip
    assert set(lines[1]) == KEYS
    assert set(lines[0]) == KEYS | {"vs_full"}
    assert "vs_full" not in lines[2]  # the dense run hasn't read this example
    json.dumps(lines, allow_nan=False)


def test_numbers_of_a_line() -> None:
    reports = [json.dumps({"kept": kept, "w": "a"}) for kept in ([1, 3], [3, 5])]
    rows = [
        row("x", 0, 1.0, ttft_s=1.0, tokens_per_s=30, decode_s=1.0, cache_bytes=100, achieved=reports[0]),
        row("x", 1, 0.0, ttft_s=9.0, tokens_per_s=10 / 3, decode_s=3.0, cache_bytes=300, achieved=reports[1]),
        row("x", 2, 0.0, ttft_s=2.0, tokens_per_s=None, decode_s=0.0, cache_bytes=200, answer_nll=None),
    ]  # fmt: skip
    (line,) = summarise(rows)
    assert line["accuracy"] == pytest.approx(1 / 3)
    assert line["ci95"] == pytest.approx(list(stats.binomtest(1, 3).proportion_ci(method="wilson")))
    assert line["ttft_s"] == 2.0  # the median: one slow start doesn't count
    assert line["tokens_per_s"] == pytest.approx(10.0)  # 40 tokens in 4 seconds, not the mean of 30 and 3.3
    assert line["cache_bytes"] == 200 and line["answer_nll"] == 0.5
    assert line["achieved"] == {"kept": [2.0, 4.0], "w": "a"}


def test_comparison_with_the_dense_run_is_paired_by_example() -> None:
    rows = [row("full", i, 1.0, answer_nll=0.1 * i) for i in range(6)]
    rows += [row("x", i, float(i != 2), answer_nll=0.1 * i + 0.2) for i in (5, 4, 3, 2, 1)]  # any order, one missing
    versus = summarise(rows)[1]["vs_full"]
    assert versus["n"] == 5 and (versus["wins"], versus["losses"]) == (0, 1)
    assert versus["accuracy_difference"] == pytest.approx(-0.2)
    assert versus["nll_difference"] == pytest.approx(0.2)
    assert versus["nll_ci95"] == pytest.approx([0.2, 0.2])
    assert versus["nll_p_value"] == 2 / 32


def test_the_same_index_of_another_text_is_another_example() -> None:
    rows = [row("full", 0, text_hash="a"), row("x", 0, text_hash="b")]
    assert "vs_full" not in summarise(rows)[1]


def test_holm_runs_over_the_recipes_of_one_task_and_length() -> None:
    rows = [row("full", i, 1.0, task=t) for i in range(8) for t in ("a", "b")]
    rows += [row(r, i, 0.0, task=t) for i in range(8) for t in ("a", "b") for r in ("x", "y")]
    found = [line["vs_full"] for line in summarise(rows) if line["recipe"] != "full"]
    p = stats.binomtest(0, 8).pvalue
    assert [versus["p_holm"] for versus in found] == pytest.approx([2 * p] * 4)


def test_pooling_over_tasks_and_lengths() -> None:
    rows = [row(r, i, task=t, length=n) for r in ("full", "x") for i in (0, 1) for t in ("a", "b") for n in (10, 20)]
    lines = summarise(rows, by=("recipe", "length"))
    assert [(line["recipe"], line["task"], line["length"], line["n"]) for line in lines] == [
        ("full", "all", 10, 4), ("full", "all", 20, 4), ("x", "all", 10, 4), ("x", "all", 20, 4),
    ]  # fmt: skip
    assert lines[2]["vs_full"]["n"] == 4


def test_both_moments_of_compression_stay_apart_and_meet_the_same_dense_run() -> None:
    rows = [row("full", 0), row("x", 0), row("x", 0, 0.0, compress="after-question")]
    lines = summarise(rows)
    assert [(line["recipe"], line["compress"], line["accuracy"]) for line in lines[1:]] == [
        ("x", "before-question", 1.0), ("x", "after-question", 0.0),
    ]  # fmt: skip
    assert lines[2]["vs_full"]["accuracy_difference"] == -1.0


def test_a_task_without_scores_is_none_not_nan() -> None:
    rows = [row(r, i, None, answer_nll=math.nan) for r in ("full", "x") for i in range(2)]
    line = summarise(rows)[1]
    assert line["accuracy"] is None and line["ci95"] == [None, None] and line["answer_nll"] is None
    assert line["vs_full"]["p_value"] is None and line["vs_full"]["p_holm"] is None
    json.dumps(line, allow_nan=False)


def test_one_fractional_score_still_has_an_interval() -> None:
    (line,) = summarise([row("x", 0, 0.4)])
    assert line["ci95"][0] < 0.4 < line["ci95"][1]


def test_rows_of_two_models_are_refused() -> None:
    with pytest.raises(Refused, match="one model, got 'm', 'other'"):
        summarise([row(), row(model="other")])
    assert summarise([]) == []


def test_average_of_reports() -> None:
    assert average([]) is None
    assert average([{"a": 1, "b": {"c": [1.0, 2.0]}}, {"a": 2, "b": {"c": [3.0, 2.0]}}, None]) == {
        "a": 1.5, "b": {"c": [2.0, 2.0]},
    }  # fmt: skip
    assert average([[1], [1, 2]]) is None
    assert average(["x", "y"]) is None and average([True, True]) is True
    assert average([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}
