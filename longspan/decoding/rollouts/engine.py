"""BubbleSpec's rollout step: strictly synchronous, and the wait for the slowest rank is spent on the next step's drafts.

Each rank, step by step:

1. write all answers of its share of the prompts, proposing from the pool that the step before left;
2. when its share is done and another rank's is not (*bubble mode*): answer its share of the next step's prompts with the policy
   it has, one draft of every prompt before a second of any;
3. when the last rank is done, end at once; drafts that were cut short are kept as they are;
4. after the step, forget its drafts. What a learner is given comes from 1. alone.

Ranks move one pass at a time here, all in one process; `distributed` has a process for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from longspan.decoding.drafts.bubblespec import BubbleSpec
from longspan.decoding.noise import Noise
from longspan.decoding.rollouts.pool import Key, Rollout, RolloutPool
from longspan.decoding.rollouts.step import Policy, Running, Sampling, learner_inputs
from longspan.registry import Refused, nearest

KEYS = ("shared", "fresh")
LOOKAHEAD = ("none", "one", "two")
Prompts = Callable[[int], "Sequence[Sequence[int]] | None"]
"""The prompts of a step, the same whenever it is asked; none after the last step; None where they aren't known yet."""


@dataclass(frozen=True)
class Rollouts:
    """How a step is made.

    Attributes:
        samples: answers to each prompt.
        draft: how drafts are proposed; None writes plainly and does nothing in bubbles.
        keys: the noise of drafts: ``shared`` is the noise of the answer they are for, ``fresh`` is their own. Rules other
            than ``match`` need fresh noise, for what they accept may not depend on the noise they have yet to use.
        lookahead: how many steps ahead drafts are made; the sampler of prompts must know them.
        slots: drafts written at once in bubble mode; by default as many as the rank has answers to write.
    """

    samples: int
    sampling: Sampling
    draft: BubbleSpec | None = None
    keys: str = "shared"
    lookahead: str = "two"
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise Refused(f"samples={self.samples}: expected at least 1 answer to a prompt.")
        if self.slots is not None and self.slots < 1:
            raise Refused(f"slots={self.slots}: expected at least 1.")
        for value, known, what in ((self.keys, KEYS, "keys"), (self.lookahead, LOOKAHEAD, "lookahead")):
            if value not in known:
                raise Refused(nearest(value, known, what))
        if self.draft is not None and self.draft.rule != "match" and self.keys == "shared" and not self.sampling.law.greedy:
            raise Refused(f"rule={self.draft.rule} with keys='shared': its proposals must not depend on the noise that "
                          "judges them; expected keys='fresh', or rule='match'.")

    @property
    def steps_ahead(self) -> int:
        return LOOKAHEAD.index(self.lookahead) if self.draft is not None else 0


@dataclass
class Report:
    """What one rank did in one step."""

    rank: int
    passes: int = 0
    """Of its own share; the slowest rank's are the step's."""
    bubble_passes: int = 0
    """Calls of the model for drafts: passes, and readings of prompts."""
    tokens: int = 0
    bubble_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    sequence_passes: int = 0
    """Sum over its sequences."""


@dataclass
class Step:
    """The answers of one step, by key, and what they took."""

    number: int
    rollouts: list[Rollout]
    reports: list[Report]

    @property
    def passes(self) -> int:
        """Passes until the slowest rank was done."""
        return max((r.passes for r in self.reports), default=0)

    @property
    def accepted_length(self) -> float:
        """Tokens per pass of a sequence."""
        return sum(r.tokens for r in self.reports) / max(1, sum(r.sequence_passes for r in self.reports))

    @property
    def utilisation(self) -> float:
        """Share of all ranks' passes that wrote answers."""
        return sum(r.passes for r in self.reports) / max(1, self.passes * len(self.reports))

    @property
    def utilisation_with_drafts(self) -> float:
        """Share that wrote answers or drafts."""
        return sum(r.passes + r.bubble_passes for r in self.reports) / max(1, self.passes * len(self.reports))

    @property
    def metrics(self) -> dict[str, Any]:
        return {"step": self.number, "passes": self.passes, "accepted_length": self.accepted_length,
                "utilisation": self.utilisation, "utilisation_with_drafts": self.utilisation_with_drafts,
                "ranks": [asdict(r) for r in self.reports]}

    def learner_inputs(self) -> dict[str, Tensor]:
        """See `step.learner_inputs`; a rollout of another step among them is an error."""
        if strange := [r.key for r in self.rollouts if r.key[0] != self.number or not r.ended]:
            raise ValueError(f"rollout {strange[0]} is not a finished answer of step {self.number}")
        return learner_inputs(self.rollouts)


@dataclass
class Rank:
    """One data-parallel rank: its share of every step, and its pool."""

    number: int
    of: int
    how: Rollouts
    pool: RolloutPool | None = None
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"rank {self.number} of {self.of}")

    def begin(self, step: int, policy: Policy, prompts: Prompts) -> None:
        """Start a step.

        Raises:
            Refused: prompts of this or of a coming step that aren't known, or a pool of another vocabulary.
        """
        self.step, self.policy = step, policy
        self.ahead = {t: self._share(t, prompts) for t in range(step, step + 1 + self.how.steps_ahead)}
        if self.pool is None:
            self.pool = RolloutPool(policy.vocabulary)
        self.pool.check(policy.vocabulary)
        self.report = Report(self.number)
        self.found: list[Rollout] = []
        self.drafts: list[Rollout] = []
        draft, ends = self.how.draft, self.how.sampling.ends
        pool = self.pool
        find = None if draft is None else lambda rollout: draft.over(pool, rollout, ends)
        self.own = Running(policy, self.how.sampling, rule=draft.rule if draft else "match", drafter=find)
        self.own.add([((step, place, sample), ids) for place, ids in self.ahead[step] for sample in range(self.how.samples)])
        self.bubble: Running | None = None
        self.coming = self._coming()

    @property
    def done(self) -> bool:
        """Whether its share of the step is written."""
        return not self.own.rows

    def advance(self) -> None:
        """One pass over its own share."""
        assert self.pool is not None
        for rollout in self.own.advance():
            self._note(rollout)
        self.report.passes = self.own.passes

    def fill(self) -> bool:
        """One call of the model in bubble mode, a pass or the reading of prompts; False when nothing is left to draft."""
        if self.bubble is None:
            fresh, draft = self.how.keys == "fresh", self.how.draft
            self.bubble = Running(self.policy, self.how.sampling, keep_laws=draft is not None and draft.rule == "reject",
                                  noise=(lambda key: Noise(("draft", *key))) if fresh else Noise)
        new = list(islice(self.coming, self._slots() - len(self.bubble.rows)))
        if new:
            self.bubble.add(new)
            self.drafts += [row.rollout for row in self.bubble.rows[-len(new) :]]
        elif self.bubble.rows:
            self.bubble.advance()
        else:
            return False
        self.report.bubble_passes += 1
        return True

    def end(self) -> list[Rollout]:
        """The step is over: keep the drafts, whole or not, forget those of this step; the rank's answers."""
        assert self.pool is not None
        self.pool.drop(self.step)
        for rollout in self.drafts:
            self.pool.add(rollout)
        self.report.bubble_tokens = sum(len(r.tokens) for r in self.drafts)
        return sorted(self.found, key=lambda r: r.key)

    def _note(self, rollout: Rollout) -> None:
        """An answer is finished; until the step ends, others of its group may propose from it."""
        self.found.append(rollout)
        self.report.tokens += len(rollout.tokens)
        self.report.proposed += rollout.proposed
        self.report.accepted += rollout.accepted
        self.report.sequence_passes += rollout.passes
        if self.how.draft is not None:
            assert self.pool is not None
            self.pool.add(rollout)

    def _share(self, step: int, prompts: Prompts) -> list[tuple[int, Sequence[int]]]:
        """The rank's prompts of a step, with their places among all."""
        found = prompts(step)
        if found is None:
            also = "" if step == self.step else ", or lookahead='none'"
            raise Refused(f"the prompts of step {step} aren't known at step {self.step}; expected a sampler with a fixed "
                          f"order{also}.")
        for ids in found:
            self.how.sampling.room(len(ids))
        return [(place, ids) for place, ids in enumerate(found) if place % self.of == self.number]

    def _coming(self) -> Iterator[tuple[Key, Sequence[int]]]:
        """What to draft, in order: of each step, one answer to every prompt before a second."""
        assert self.pool is not None
        for step, share in self.ahead.items():
            for sample in range(self.how.samples) if step > self.step else ():
                for place, ids in share:
                    if self.pool.own((step, place, sample), ids) is None:
                        yield (step, place, sample), ids

    def _slots(self) -> int:
        return self.how.slots or self.how.samples * max(1, *(len(share) for share in self.ahead.values()))


def rollout_step(ranks: Iterable[Rank], step: int, policy: Policy, prompts: Prompts) -> Step:
    """One synchronous step of all ranks, pass by pass.

    Raises:
        Refused: see `Rank.begin`.
    """
    ranks = list(ranks)
    for rank in ranks:
        rank.begin(step, policy, prompts)
    while not all(rank.done for rank in ranks):
        idle = [rank for rank in ranks if rank.done]
        for rank in ranks:
            if not rank.done:
                rank.advance()
        for rank in idle:
            rank.fill()
    found = sorted((rollout for rank in ranks for rollout in rank.end()), key=lambda r: r.key)
    return Step(step, found, [rank.report for rank in ranks])
