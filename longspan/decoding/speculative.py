"""Writing with drafts: propose, read all proposals in one call, keep those that stand, go on.

One loop serves every draft, every verifier and every rule. It keeps the one thing they all rely on: the cache has read
the whole sequence but its last token. With an exact verifier the text follows the target's law whatever is proposed;
with rule ``match`` it is the text that writing token by token with the same noise gives.

Proposing costs time even when nothing stands. `Pays` watches tokens per second of rounds and of plain steps and rests
the draft, for longer each time, while it doesn't pay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from longspan.decoding.base import Draft, Proposal, Target
from longspan.decoding.law import pick
from longspan.decoding.plain import Generated
from longspan.decoding.verify import verify

NOTHING = Proposal()
FIRST_STEPS = 2
"""Plain steps at the start, to know what one costs."""
TRIAL = 4
"""Rounds looked at before it is said that they don't pay."""
FIRST_REST = 16
MOST_REST = 1024
SLACK = 0.05
"""Share of its time by which a trial may be late."""
FORGET = 1.02
"""Growth of the smallest step seen, for each new one: old minima fade as the cache grows."""


@dataclass
class Pays:
    """Whether rounds write more tokens a second than plain steps."""

    step_s: float | None = None
    """Seconds of a plain step, the smallest of late: disturbances only ever add."""
    rest: int = 0
    """Plain steps still to make before the next trial."""
    length: int = FIRST_REST
    rounds: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0

    def propose(self) -> bool:
        """Whether to propose now."""
        if self.rest:
            self.rest -= 1
            return False
        return self.steps >= FIRST_STEPS

    def step(self, seconds: float) -> None:
        """A plain step was made. The first ones of a process also pay for what is set up once."""
        self.steps += 1
        self.step_s = seconds if self.step_s is None or self.steps <= FIRST_STEPS else min(self.step_s * FORGET, seconds)

    def round(self, tokens: int, seconds: float) -> None:
        """A round wrote `tokens`."""
        self.rounds = [*self.rounds[1 - TRIAL:], (tokens, seconds)]
        assert self.step_s is not None
        written, took = (sum(column) for column in zip(*self.rounds))
        # Rounds without a proposal cost what a step costs, give or take. One round that is far too slow is enough: four
        # of them would cost as much as many plain steps.
        late = took - written * self.step_s
        if (len(self.rounds) == TRIAL and late > SLACK * took) or late > 2 * self.step_s:
            self.rest, self.length, self.rounds = self.length, min(2 * self.length, MOST_REST), []
        elif len(self.rounds) == TRIAL:
            self.length = FIRST_REST


def write(target: Target, draft: Draft, logits: Float[Tensor, "1 V"], max_new_tokens: int, end_ids: Sequence[int],
          stop: Sequence[str] = ()) -> Generated:
    """Write after a prompt that the target's cache has read and whose next-token logits are given.

    The sequence in `target.ids` grows by what is written.

    Args:
        end_ids: tokens that end the answer (not part of it).
        stop: texts that end the answer, found in the decoded text; need a tokenizer.

    Raises:
        Refused: the draft or its verifier can't work with this target.
    """
    done = Generated()
    start = time.perf_counter()
    drafter, checker, pays = draft.begin(target), draft.verify.begin(target, draft), Pays()
    out = _Writing(target, done, max_new_tokens, end_ids, stop)
    ids = target.ids
    out.add([pick(target.law.probabilities(ids, logits)[0], target.noise, len(ids))])
    try:
        while not out.over:
            began = time.perf_counter()
            room = max_new_tokens - len(done.ids) - 1
            asked = room > 0 and (draft.adapt == "always" or pays.propose())
            proposal = drafter.propose(ids, room) if asked else NOTHING
            after = checker.check(ids[-1], proposal)
            p = target.law.probabilities(ids, after, proposal.tokens)
            rule = draft.rule if proposal.tokens else "match"
            verdict = verify(p, proposal.tokens, target.noise, len(ids), rule=rule, q=proposal.q)
            checker.keep(1 + verdict.accepted, 1 + len(proposal.tokens))
            done.passes += 1
            done.proposed += len(proposal.tokens)
            done.accepted += verdict.accepted
            out.add(verdict.tokens)
            if asked:
                drafter.settle(ids, verdict.accepted, len(proposal.tokens))
            seconds = time.perf_counter() - began
            if not asked:
                pays.step(seconds)
            elif draft.adapt != "always":
                pays.round(len(verdict.tokens), seconds)
    finally:
        drafter.close()
    done.seconds = time.perf_counter() - start
    return done


@dataclass
class _Writing:
    """The answer so far, and whether it has ended."""

    target: Target
    done: Generated
    most: int
    end_ids: Sequence[int]
    stop: Sequence[str]
    over: bool = False

    def add(self, tokens: Sequence[int]) -> None:
        """Take in tokens up to where the answer ends; what follows that is dropped."""
        for token in tokens:
            if self.over:
                return
            if token in self.end_ids:
                self.done.stopped = self.over = True
                return
            self.done.ids.append(token)
            self.target.ids.append(token)
            if self.stop and any(s in self.target.tokenizer.decode(self.done.ids) for s in self.stop):
                self.done.stopped = self.over = True
            elif len(self.done.ids) >= self.most:
                self.over = True
