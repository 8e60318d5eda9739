"""A real run of two processes: answers as in one process, bubbles that stop, and one clear sentence when a rank dies."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, replace

import pytest
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan.decoding import Law
from longspan.decoding.rollouts.distributed import MODULE, DistributedRank, Job, JobStep
from longspan.decoding.rollouts.engine import Rank, Rollouts, rollout_step
from longspan.decoding.rollouts.processes import RankLost, processes
from longspan.decoding.rollouts.step import Policy, Sampling
from longspan.registry import Refused

HARD_LIMIT = 200
"""Seconds for the whole run."""
TIMEOUT = 100.0
"""Seconds after which a rank that makes no pass is taken for dead; a death is noticed at once."""
GRACE = 30.0


def job(folder):
    """Three ordinary steps, the second with a single prompt, and one in which rank 0 writes for minutes
    while rank 1 has no prompt."""
    for seed in (0, 1):
        write_tiny_folder(folder / f"v{seed}", seed=seed)
    prompts = [[tiny_ids(1, 6 + p, seed=9 * step + p)[0].tolist() for p in range(3 if step != 1 else 1)] for step in range(3)]
    steps = [JobStep(str(folder / f"v{step % 2}"), found, 40) for step, found in enumerate(prompts)]
    steps.append(JobStep(str(folder / "v0"), [[7, 8]], 4000, ends=[]))
    return Job(steps, str(folder), samples=2, ends=tuple(range(60)), dtype="float64", timeout=TIMEOUT)


def wait_for(path_or_check, seconds=HARD_LIMIT):
    end = time.monotonic() + seconds
    while not path_or_check():
        assert time.monotonic() < end, "the ranks did not get this far in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The job's folder, what the launcher said after rank 0 was killed in the last step, and the seconds that took."""
    folder = tmp_path_factory.mktemp("job")
    made = job(folder)
    (folder / "job.json").write_text(json.dumps(asdict(made)))
    with processes(MODULE, [str(folder / "job.json")], 2, folder, timeout=HARD_LIMIT) as started:
        def going():
            assert all(p.poll() is None for p in started.running), [f.read_text() for f in folder.glob("*.log")]
            return started.store.add("done/3", 0) == 1  # rank 1 is in bubble mode
        wait_for(going)
        os.kill(started.running[0].pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RankLost) as said:
            started.wait(HARD_LIMIT, GRACE)
        seconds = time.monotonic() - begun
        codes = [p.poll() for p in started.running]
    return made, folder, str(said.value), seconds, codes


def test_answers_are_those_of_one_process(killed):
    made, folder = killed[:2]
    from longspan.models import load

    plain = replace(made, gamma=None)
    ranks = [Rank(0, 1, plain.rollouts(made.steps[0]))]
    for step in range(3):
        policy = Policy(load(made.steps[step].checkpoint, dtype="float64", device="cpu").model, "v")
        wanted = rollout_step(ranks, step, policy, made.prompts).rollouts
        found = json.loads((folder / f"step-{step}.json").read_text())
        assert [(tuple(r["key"]), r["tokens"]) for r in found["rollouts"]] == [(r.key, r.tokens) for r in wanted]
        assert [r["logprobs"] for r in found["rollouts"]] == [r.logprobs for r in wanted], "to the last bit"
        assert [r["rank"] for r in found["metrics"]["ranks"]] == [0, 1]
        assert found["metrics"]["passes"] <= max(len(r.tokens) for r in wanted)


def test_a_rank_without_prompts_fills_its_time_and_stops(killed):
    found = json.loads((killed[1] / "step-1.json").read_text())["metrics"]["ranks"]
    assert found[0]["tokens"] > 0 and found[1]["passes"] == found[1]["tokens"] == 0


def test_a_dead_rank_ends_the_others_with_one_sentence(killed):
    _, folder, said, seconds, codes = killed
    assert said == "rank 0 was ended by SIGKILL; the other ranks were ended."
    assert seconds < GRACE, "rank 1 found out by itself"
    assert codes == [-signal.SIGKILL, 1]
    last = (folder / "rank-1.log").read_text().strip().splitlines()[-1]
    assert last == "step 3: rank 0 died; rank 1 ends."


class OneStore:
    """A store of one process."""

    def __init__(self):
        self.counts = {}

    def add(self, key, amount):
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


@pytest.mark.parametrize("moves", [False, True])
def test_a_rank_that_makes_no_pass_is_taken_for_dead(moves):
    """Rank 1 has no prompts; rank 0 does nothing, or makes passes for a while and stops."""
    how = Rollouts(1, Sampling(Law(1.0), max_new_tokens=4))
    store, begun = OneStore(), time.monotonic()
    if moves:
        plain = store.add
        store.add = lambda key, amount: plain(key, amount + (key == "passes/0" and time.monotonic() - begun < 0.5))
    rank = DistributedRank(Rank(1, 2, how), store, timeout=0.3)
    with pytest.raises(RankLost, match=r"step 0: rank 0 has made no pass for 0.3 s; rank 1 ends\."):
        rank.step(0, Policy(tiny("llama"), "v"), lambda step: [(5, 6)])
    assert (0.7 if moves else 0.25) < time.monotonic() - begun < 20


def test_a_job_that_is_none_is_refused(tmp_path):
    (tmp_path / "job.json").write_text('{"steps": [{"model": "x"}]}')
    for name in ("job.json", "none.json"):
        with pytest.raises(Refused, match="expected a JSON file with steps"):
            Job.load(tmp_path / name)


@pytest.mark.parametrize(("statement", "said"), [
    ("pass", None),
    ("raise OSError('the disk is full')", r"rank [01] ended with code 1 \(OSError: the disk is full\); the other ranks"),
    ("import time; time.sleep(60)", "not done within 1 s"),
])
def test_processes_end_together(tmp_path, statement, said):
    begun = time.monotonic()
    with processes("timeit", ["-n", "1", "-r", "1", statement], 2, tmp_path) as started:
        if said is None:
            started.wait(30)
        else:
            with pytest.raises(RankLost, match=said):
                started.wait(1.0 if "sleep" in statement else 30, grace=1.0)
        assert all(p.poll() is not None for p in started.running)
    assert time.monotonic() - begun < 40
