"""The rollout step with a process for each rank, over torch.distributed (gloo).

The stop flag is a counter in the group's store: a rank that is done adds one, and a rank in bubble mode looks before
every call of the model whether all are. A rank that died is named there by the launcher; every rank also counts its passes
in the store, and one whose count stands still for `timeout` seconds is taken for dead. Then the others end with one
sentence. Answers are gathered as plain numbers.

``python -m longspan.decoding.rollouts.distributed JOB.json`` is one rank of a job that samples from given checkpoints, step by
step; `run_job` starts all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.decoding.drafts.bubblespec import BubbleSpec
from longspan.decoding.law import Law
from longspan.decoding.rollouts.engine import Prompts, Rank, Report, Rollouts, Step
from longspan.decoding.rollouts.pool import Rollout
from longspan.decoding.rollouts.processes import LOST, RankLost, join, processes
from longspan.decoding.rollouts.step import Policy, Sampling
from longspan.registry import Refused

MODULE = "longspan.decoding.rollouts.distributed"
POLL_S = 0.005
"""Seconds that a rank with nothing to draft sleeps between two looks at the flag."""


@dataclass
class DistributedRank:
    """This process's rank of a group that torch.distributed has set up."""

    rank: Rank
    store: Any
    timeout: float = 600.0
    """Seconds that another rank may take for one pass, or to arrive."""
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Of the other ranks: passes counted last, and when they last changed."""

    def step(self, number: int, policy: Policy, prompts: Prompts) -> Step:
        """One synchronous step; every rank gets all answers, the same as `engine.rollout_step` gives.

        Raises:
            Refused: see `Rank.begin`.
            RankLost: another rank died or hangs.
        """
        rank, flag = self.rank, f"done/{number}"
        rank.begin(number, policy, prompts)
        try:
            while not rank.done:
                rank.advance()
                self._count()
            self.store.add(flag, 1)
            self.seen = {other: (-1, time.monotonic()) for other in range(rank.of) if other != rank.number}
            while self.store.add(flag, 0) < rank.of:
                if not rank.fill():
                    time.sleep(POLL_S)
                self._count()
                self._look_after_others(number)
            return self._gather(number, rank.end(), prompts)
        except RankLost:
            raise
        except RuntimeError as error:  # the store or the group is gone
            if isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower():
                raise RankLost(f"step {number}: rank {rank.number} can't reach the other ranks any more and ends.") from error
            raise

    def _count(self) -> None:
        self.store.add(f"passes/{self.rank.number}", 1)

    def _look_after_others(self, number: int) -> None:
        now = time.monotonic()
        if lost := self.store.add(LOST, 0):
            raise RankLost(f"step {number}: rank {lost - 1} died; rank {self.rank.number} ends.")
        for other, (count, since) in self.seen.items():
            found = self.store.add(f"passes/{other}", 0)
            if found != count:
                self.seen[other] = (found, now)
            elif now - since > self.timeout:
                raise RankLost(f"step {number}: rank {other} has made no pass for {self.timeout:g} s; rank {self.rank.number} "
                               "ends.")

    def _gather(self, number: int, own: Sequence[Rollout], prompts: Prompts) -> Step:
        """Everybody's answers and reports. This is the barrier of the step."""
        counts = [n for r in own for n in (*r.key, r.ended, r.passes, r.proposed, r.accepted, len(r.tokens), *r.tokens)]
        report = [getattr(self.rank.report, f.name) for f in fields(Report)]
        numbers = _all_gather(torch.tensor([len(own), *report, *counts], dtype=torch.long), self.rank.of)
        logprobs = _all_gather(torch.tensor([x for r in own for x in r.logprobs], dtype=torch.float64), self.rank.of)
        known = prompts(number) or ()
        found: list[Rollout] = []
        reports: list[Report] = []
        for flat, scores in zip(numbers, logprobs):
            many, *rest = flat.tolist()
            at, scored, left = len(report), 0, scores.tolist()
            reports.append(Report(*rest[:at]))
            for _ in range(many):
                step, place, sample, ended, passes, proposed, accepted, n = rest[at : at + 8]
                found.append(Rollout((step, place, sample), tuple(known[place]), rest[at + 8 : at + 8 + n],
                                     self.rank.policy.version, bool(ended), left[scored : scored + n], None, passes,
                                     proposed, accepted))
                at, scored = at + 8 + n, scored + n
        return Step(number, sorted(found, key=lambda r: r.key), reports)


def _all_gather(mine: Tensor, ranks: int) -> list[Tensor]:
    """Tensors (n,) of all ranks, whatever their lengths."""
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    width = max(int(n) for n in sizes)
    found = [mine.new_zeros(width) for _ in range(ranks)]
    dist.all_gather(found, torch.nn.functional.pad(mine, (0, width - len(mine))))
    return [x[: int(n)] for x, n in zip(found, sizes)]


# ------------------------------------------------------------------------------------------------------------- a job


@dataclass(frozen=True)
class JobStep:
    """A checkpoint to sample from, prompts as token ids, and the greatest length of prompt and answer."""

    checkpoint: str
    prompts: list[list[int]]
    max_length: int
    ends: list[int] | None = None
    """Tokens that end an answer, where they are not the job's."""


@dataclass(frozen=True)
class Job:
    """Steps to run; rank 0 writes ``step-N.json`` to `out` after each. Without `gamma` it writes plainly."""

    steps: list[JobStep]
    out: str
    samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    ends: tuple[int, ...] = ()
    gamma: int | None = 8
    rule: str = "match"
    keys: str = "shared"
    lookahead: str = "two"
    dtype: str = "float32"
    timeout: float = 600.0

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job's JSON file.

        Raises:
            Refused: the file is not one of a job.
        """
        try:
            found: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**{**found, "steps": [JobStep(**step) for step in found["steps"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"job {str(path)!r}: expected a JSON file with steps and out, as `Job` describes ({error}).") from error

    def rollouts(self, step: JobStep) -> Rollouts:
        draft = None if self.gamma is None else BubbleSpec(gamma=self.gamma, rule=self.rule)  # type: ignore[call-arg]
        ends = tuple(self.ends if step.ends is None else step.ends)
        sampling = Sampling(Law(self.temperature, self.top_p), max_length=step.max_length, ends=ends)
        return Rollouts(self.samples, sampling, draft, self.keys, self.lookahead)

    def prompts(self, number: int) -> list[list[int]]:
        return self.steps[number].prompts if number < len(self.steps) else []


def run_job(path: str | Path, ranks: int, timeout: float) -> None:
    """Run a job with a process for each rank.

    Raises:
        Refused: a file that is not one of a job.
        RankLost: a rank died, or `timeout` seconds are over.
    """
    job = Job.load(path)
    if not job.steps:
        raise Refused(f"job {str(path)!r} has no steps; expected at least one.")
    for step in job.steps:
        job.rollouts(step)  # refuses what no rank could do
    with processes(MODULE, [str(path)], ranks, Path(job.out), job.timeout) as started:
        started.wait(timeout)


def main(path: str) -> int:
    """One rank of a job; the rank, their number and the store's address are in the environment."""
    from longspan.models import load

    job = Job.load(path)
    number, ranks, store = join()
    me = DistributedRank(Rank(number, ranks, job.rollouts(job.steps[0])), store, job.timeout)
    try:
        for t, step in enumerate(job.steps):
            model = load(step.checkpoint, dtype=job.dtype, device="cpu").model
            me.rank.how = replace(me.rank.how, sampling=job.rollouts(step).sampling)
            store.set(f"begun/{t}/{number}", "1")
            found = me.step(t, Policy(model, step.checkpoint), job.prompts)
            if number == 0:
                rows = [{"key": r.key, "tokens": r.tokens, "logprobs": r.logprobs, "passes": r.passes} for r in found.rollouts]
                (Path(job.out) / f"step-{t}.json").write_text(json.dumps({"rollouts": rows, "metrics": found.metrics}))
        torch.distributed.destroy_process_group()
    except (RankLost, Refused) as error:
        sys.stderr.write(f"\n{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # a group whose other ranks are gone may wait for them on its way out
