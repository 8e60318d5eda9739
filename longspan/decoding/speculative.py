"""Writing with drafts: propose, read all proposals in one call, keep those that stand, go on.

One loop serves every draft, every verifier and every rule. It keeps the one thing they all rely on: the cache has read
the whole sequence but its last token. With an exact verifier the text follows the target's law whatever is proposed;
with rule ``match`` it is the text that writing token by token with the same noise gives.

Proposing costs time even when nothing stands. `Pays` keeps account of it and lets the draft rest while more was lost than
three hundredths of the time that plain steps would have taken. It also says how many tokens to propose.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from longspan.decoding.base import Draft, Proposal, Target
from longspan.decoding.law import pick
from longspan.decoding.plain import Generated
from longspan.decoding.verify import verify, verify_greedy

NOTHING = Proposal()
FIRST_STEPS = 2
"""Plain steps at the start, to know what one costs."""
RECENT = 9
"""Plain steps whose median is taken for the cost of one."""
SHARE = 0.03
"""Of the time plain steps would have taken, what drafts may lose."""
CREDIT = 0.5
"""Steps they may lose at once, at the start."""
SAVED = 4.0
"""Steps gained that count against later losses; more would let a draft that once was good go on for long."""


@dataclass
class Pays:
    """Whether rounds write more tokens a second than plain steps: an account of time lost, in plain steps."""

    late: float = 0.0
    """Steps lost so far; gains count up to `SAVED`."""
    written: int = 0
    rounds: int = 0
    most: int = 1
    """Tokens to propose at once: few until some stood, so that trying costs little; twice as many after a round of which
    all stood, or twice those that did."""
    recent: list[float] = field(default_factory=list)
    """Seconds of the latest plain steps."""

    def propose(self) -> bool:
        """Whether to propose now: while no more was lost than what may be."""
        return len(self.recent) >= FIRST_STEPS and self.late <= CREDIT + SHARE * self.written

    def step(self, seconds: float, wasted: float = 0.0) -> None:
        """A token was written without a proposal, after `wasted` seconds of looking for one."""
        self.recent = [*self.recent[1 - RECENT:], seconds]
        self.written += 1
        self.late += wasted / statistics.median(self.recent)

    def round(self, accepted: int, proposed: int, seconds: float) -> None:
        """Of the `proposed` tokens `accepted` stood, and one more was written.

        The first round may also pay for what is set up once, so it counts for two steps at most.
        """
        lost = seconds / statistics.median(self.recent) - (accepted + 1)
        self.rounds += 1
        self.written += accepted + 1
        self.most = 2 * self.most if accepted == proposed else max(1, 2 * accepted)
        self.late = max(-SAVED, self.late + (min(lost, 2.0) if self.rounds == 1 else lost))


def write(target: Target, draft: Draft, logits: Float[Tensor, "1 V"], max_new_tokens: int, end_ids: Sequence[int],
          stop: Sequence[str] = (), until: Callable[[Sequence[int]], bool] | None = None) -> Generated:
    """Write after a prompt that the target's cache has read and whose next-token logits are given.

    The sequence in `target.ids` grows by what is written.

    Args:
        end_ids: tokens that end the answer (not part of it).
        stop: texts that end the answer, found in the decoded text; need a tokenizer.
        until: asked after every token, with the whole sequence, whether the answer has ended.

    Raises:
        Refused: the draft or its verifier can't work with this target.
    """
    done = Generated()
    start = time.perf_counter()
    checker, drafter, pays = draft.verify.begin(target, draft), draft.begin(target), Pays()
    # Where the text depends on what was proposed when, it must not depend on the clock.
    always = draft.adapt == "always" or draft.rule != "match" or not draft.verify.card.can("lossless")
    out = _Writing(target, done, max_new_tokens, end_ids, stop, until)
    ids = target.ids
    try:
        drafter.watch(checker.draft_layers)
        out.add([pick(target.law.probabilities(ids, logits)[0], target.noise, len(ids))])
        while not out.over:
            began = time.perf_counter()
            room = max_new_tokens - len(done.ids) - 1
            asked = room > 0 and (always or pays.propose())
            proposal = drafter.propose(ids, room if always else min(room, pays.most)) if asked else NOTHING
            looked = time.perf_counter() - began
            after = checker.check(ids[-1], proposal)
            if target.law.greedy and target.law.process is None:
                verdict = verify_greedy(after, proposal.tokens)
            else:
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
            if always:
                continue
            if proposal.tokens:
                pays.round(verdict.accepted, len(proposal.tokens), seconds)
            else:
                pays.step(seconds - looked, looked if asked else 0.0)
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
    until: Callable[[Sequence[int]], bool] | None = None
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
            if self.until is not None and self.until(self.target.ids):
                self.over = True
            if self.stop and any(s in self.target.tokenizer.decode(self.done.ids) for s in self.stop):
                self.done.stopped = self.over = True
            elif len(self.done.ids) >= self.most:
                self.over = True
