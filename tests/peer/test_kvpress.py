"""Kept entries equal those of kvpress; and the comparison itself notices when they don't."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _benchmark(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


peer = _benchmark("kvpress_peer")


def side(kept: list[int], scores: list[float]) -> dict[str, torch.Tensor]:
    return {"kept": torch.tensor([[kept]]), "scores": torch.tensor([[scores]])}


def test_equal_sets_count_as_equal():
    found = peer.compare_kept(side([0, 2], [4, 1, 3, 2]), side([0, 2], [4, 1, 3, 2.5]))
    assert (found["heads"], found["equal"], found["tied"], found["different"]) == (1, 1, 0, 0)
    assert found["score_error"] == pytest.approx(0.5 / 4)


def test_entries_that_changed_places_must_be_tied_in_both_packages():
    ours, near, far = [4, 1, 3, 3 - 1e-6], [4, 1, 3 - 1e-6, 3], [4, 1, 2.9, 3]
    assert peer.compare_kept(side([0, 2], ours), side([0, 3], near))["tied"] == 1
    found = peer.compare_kept(side([0, 2], ours), side([0, 3], far))
    assert found["different"] == 1 and found["gap"] == pytest.approx(0.1 / 3, rel=1e-4)
    assert [(c["layer"], c["head"], c["ours"], c["theirs"]) for c in found["changed"]] == [(0, 0, [2], [3])]


def test_marks_of_protected_entries_are_no_score_error():
    assert peer.compare_kept(side([0, 2], [4, 1, 9]), side([0, 2], [4, 1, 5]), protected=1)["score_error"] == 0.0


def test_different_numbers_kept_are_an_error():
    with pytest.raises(ValueError, match="kept"):
        peer.compare_kept(side([0], [2, 1]), side([0, 1], [2, 1]))


def test_compared_lengths_keep_the_same_number_in_both_packages():
    assert not peer.kept_counts_agree(600, 0.8)  # 600 * (1 - 0.8) is a hair under 120
    wanted = [(n, r) for n in peer.INDEX_LENGTHS for r in peer.INDEX_RATIOS]
    wanted += [(n, peer.TIMED_RATIO) for n in peer.TIMED_LENGTHS]
    assert all(peer.kept_counts_agree(n, r) for n, r in wanted)


def test_a_set_up_that_fails_says_why():
    with pytest.raises(peer.NoPeer, match="no such package"):
        peer._do([sys.executable, "-c", "import sys; sys.exit('no such package')"])


def test_timed_row_takes_medians_over_rounds():
    turns = [{"ours": {"prefill_s": p, "decode_s": 1.0}, "theirs": {"prefill_s": 2 * p, "decode_s": 2.0}}
             for p in (1.0, 5.0, 3.0)]
    row = peer.timed_row("knorm", 2048, turns)
    assert row["ours"]["total_s"] == 4.0 and row["ours"]["rounds_s"] == [2.0, 6.0, 4.0] and row["ratio"] == 0.5


def test_render_prints_a_row_for_every_measurement():
    versions = {"torch": "2", "transformers": "5", "kvpress": "0.5.5"}
    common = {"model": "m", "dtype": "float32", "environments": {"longspan": versions, "kvpress": versions}}
    kept = peer.compare_kept(side([0, 2], [4, 1, 3, 2]), side([0, 2], [4, 1, 3, 2]))
    index = {"method": "knorm", "ratio": 0.5, "tokens": 2003, "kept": 2, **kept, "same_answer": 16, "answer": 16}
    turn = {name: {"prefill_s": 2.0, "decode_s": 1.0} for name in ("ours", "theirs")}
    text = peer.render({
        "indices": {**common, "tie": 1e-5, "rows": [index]}, "machine": {"cpu": "CPU"},
        "timing": {**common, "threads": 2, "rounds": 1, "ratio": 0.8, "new_tokens": 64,
                   "rows": [peer.timed_row("tova", 4096, [turn])]}})
    assert "| knorm | 50% | 2,003 | 2 | 1 | 1 | 0 | 0 | 0 | 0 | 16 of 16 |" in text
    assert "| tova | 4,096 | 3.00 (2.00 + 1.00) | 3.00 (2.00 + 1.00) | 1.00 |" in text


@pytest.mark.peer
def test_kept_entries_equal_those_of_kvpress():
    try:
        python = peer.setup()
    except peer.NoPeer as reason:
        pytest.skip(f"kvpress's environment can't be made: {reason}")
    found = peer.compare_indices(python, torch.get_num_threads(), lengths=(603,), say=lambda line: None)
    assert {(row["method"], row["ratio"]) for row in found["rows"]} == {
        (method, ratio) for method in peer.METHODS for ratio in peer.INDEX_RATIOS}
    for row in found["rows"]:
        case = f"{row['method']} {row['ratio']}: {row['changed'][:3]}, gap {row['gap']:.1e}"
        assert row["different"] == 0, case
        assert row["equal"] >= 0.95 * row["heads"], case
        assert row["score_error"] is None or row["score_error"] < peer.TIE, case
        assert row["same_answer"] == row["answer"] or row["tied"], case
