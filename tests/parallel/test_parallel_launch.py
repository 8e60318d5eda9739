"""Ranks that go wrong end the others, with one sentence, in time, and leave no process behind."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import context_parallel_cases as cases
import pytest

from longspan.parallel import RankFailed, launch
from longspan.parallel.launch import _Rank, _results


def failure(*arguments, **settings):
    start = time.monotonic()
    with pytest.raises(RankFailed) as raised:
        launch(*arguments, **settings)
    assert multiprocessing.active_children() == []
    assert "\n" not in str(raised.value)
    return raised.value, time.monotonic() - start


@pytest.mark.parametrize("where", ["outputs, stage 1", "gradients of queries, stage 1"], ids=["forward", "backward"])
def test_a_rank_that_dies_ends_the_others(where):
    failed, seconds = failure(cases.killed_at, 2, timeout=120, args=(where,), operation_timeout=60)
    assert str(failed) == "rank 1 of 2 was ended by SIGKILL; all ranks were stopped."
    assert failed.rank == 1
    survivor = failed.reports[0].splitlines()[0]
    assert survivor == f"PeerLost: rank 0 of 2: all-to-all of {where}: a connection was lost, since another rank ended."
    assert seconds < 55  # the operation's own time was not waited for


def test_an_error_is_passed_back_and_ends_the_busy():
    failed, _ = failure(cases.one_raises, 2, timeout=120, grace=0.5)
    assert str(failed) == "rank 1 of 2 failed: ValueError: no such thing as 7; all ranks were stopped."
    assert "one_raises" in failed.reports[1] and failed.reports[0] == "was still running"


def test_the_time_is_bounded():
    failed, seconds = failure(cases.sleeper, 1, timeout=0.5)
    assert str(failed) == "rank 0 of 1 didn't end within 0.5 s; all ranks were stopped." and seconds < 30


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path):
    code = ("import sys; sys.path.insert(0, sys.argv[1])\nimport context_parallel_cases as cases\n"
            "from longspan.parallel import launch\nif __name__ == '__main__':\n"
            "    launch(cases.sleeper, 1, args=(sys.argv[2],))\n")
    script, file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(Path(__file__).parent), str(file)])
    try:
        _until(lambda: file.exists() and file.read_text(), 60)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not _runs(int(file.read_text())), 20)


def _runs(pid):
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _until(holds, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_rank_needs_no_group():
    assert launch(cases.names, 1, args=("a",), timeout=120) == [["a", 0, 1, 1]]
    with pytest.raises(ValueError, match="at least one rank"):
        launch(cases.names, 0)


@pytest.mark.parametrize("reports, rank, words", [
    ([("result", 1), ("error", "PeerLost: x.\ntrace"), ("died", "ended with exit code 3, no report")], 2, "exit code 3"),
    ([("error", "PeerLost: x."), ("error", "ValueError: y"), ("result", 1)], 1, "failed: ValueError: y; all"),
    ([("error", "PeerLost: x."), None], 0, "failed: PeerLost: x; all"),
    ([None, ("result", 1), None], 0, "rank 0, 2 of 3 didn't end within 9 s"),
])
def test_the_cause_is_named_first(reports, rank, words):
    with pytest.raises(RankFailed, match=words) as raised:
        _results([_Rank(None, None, report) for report in reports], 9.0)
    assert raised.value.rank == rank
