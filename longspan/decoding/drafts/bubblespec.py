"""BubbleSpec: drafts are whole answers that an earlier policy wrote to the same prompt, while it had nothing else to do.

In synchronous reinforcement learning all ranks wait for the slowest. One that is done early answers the prompts of the
next step with the policy it has; the next policy then checks those answers several tokens at a time, and what it
writes follows its own law exactly. For each sequence:

- *aligned*: while what is written is the beginning of the sequence's own draft, its next `gamma` tokens are proposed;
- *suffix match* otherwise: the longest run at the end of the text that stands in a draft of the same prompt, or in a
  finished answer to it, and what most often follows it, `alpha` tokens for each matched one;
- `gamma` doubles when a whole proposal stands and is halved when less than half of it does.

The rollout step itself, with its bubble mode, is in `decoding/rollouts`. In a recipe the pool is a file; without one, what
was answered to the same prompt before is proposed again. The paper (arXiv:2605.08862) comes without code; the drafting
follows its abstract, and drawing drafts with the noise that the checked sequence will use is an addition.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longspan.decoding.base import Draft, Drafter, Proposal, Target
from longspan.decoding.drafts.index import RunIndex
from longspan.decoding.noise import Noise
from longspan.decoding.plain import end_ids
from longspan.decoding.rollouts.pool import Rollout, RolloutPool
from longspan.registry import Refused, knob, method

MOST_PROMPTS, MOST_ANSWERS = 64, 8
"""Prompts, and answers to each, that are remembered where there is no pool."""


class BubbleDrafter(Drafter):
    """Proposes for one sequence from its own draft, then from others' of the same prompt."""

    def __init__(self, draft: BubbleSpec, prompt: int, own: Rollout | None, others: RunIndex | None,
                 ends: Sequence[int] = ()) -> None:
        self.draft, self.prompt, self.own, self.others, self.ends = draft, prompt, own, others, frozenset(ends)
        self.text = RunIndex(draft.min_match, draft.max_match) if draft.own_text else None
        self.gamma = draft.gamma
        self.agreed = 0
        """Written tokens known to be those of the draft."""
        self.aligned = own is not None

    def propose(self, ids: Sequence[int], limit: int) -> Proposal:
        limit = min(limit, self.gamma)
        if limit < 1:
            return Proposal()
        return self._from_own(ids, limit) or Proposal(self._upto_end(self._matched(ids, limit)))

    def settle(self, ids: Sequence[int], accepted: int, proposed: int) -> None:
        if proposed and accepted == proposed:
            self.gamma = min(2 * self.gamma, max(self.draft.gamma_max, self.draft.gamma))
        elif 2 * accepted < proposed:
            self.gamma = max(1, self.gamma // 2)

    def _from_own(self, ids: Sequence[int], limit: int) -> Proposal | None:
        """The next tokens of the draft, with their laws where it has them; None where it doesn't fit or has no more."""
        written = len(ids) - self.prompt
        if self.aligned:
            assert self.own is not None
            new = list(ids[self.prompt + self.agreed :])
            self.aligned = new == self.own.tokens[self.agreed : written]
            self.agreed = written
        if not self.aligned or self.own is None or written >= len(self.own.tokens):
            return None
        tokens = self._upto_end(self.own.tokens[written : written + limit])
        laws = self.own.laws
        return Proposal(tokens, None if laws is None else torch.stack(laws[written : written + len(tokens)]))

    def _matched(self, ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """What most often follows the longest match, in the pool or, where that has none as long, in the text itself."""
        best: tuple[int, ...] = ()
        length = 0
        if self.text is not None:
            self.text.follow(ids)
        for index in (self.others, self.text):
            found = index.find(ids, self.draft.candidates) if index is not None else None
            if index is not None and found is not None and found.length > length:
                length = found.length
                best = index.after(found.places, min(limit, math.ceil(self.draft.alpha * length)))
        return best

    def _upto_end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Nothing is proposed after a token that ends the answer."""
        for i, token in enumerate(tokens):
            if token in self.ends:
                return tuple(tokens[: i + 1])
        return tuple(tokens)


@method("bubblespec", kind="draft", system="bubblespec", paper="arXiv:2605.08862",
        summary="Propose answers that an earlier policy wrote to the same prompt in otherwise idle time.")
class BubbleSpec(Draft):
    """Drafts from stored rollouts; see the module for the idea and `decoding.rollouts` for making them."""

    pool: str = knob("", "file of stored rollouts; empty: earlier answers to the same prompt")
    gamma: int = knob(8, "tokens proposed at once, at first", low=1)
    gamma_max: int = knob(32, "most tokens proposed at once; no more than gamma: it never grows", low=1)
    min_match: int = knob(2, "shortest repetition that counts, in tokens", low=1)
    max_match: int = knob(16, "repetitions are compared up to this length", low=1)
    alpha: float = knob(2.0, "tokens proposed for each matched one", low=1.0, high=2.0)
    own_text: bool = knob(True, "look for repetitions in prompt and answer as well")
    candidates: int = knob(64, "latest places looked at", low=1)

    def check(self) -> None:
        if self.max_match < self.min_match:
            raise Refused(f"{self}: expected max_match of at least min_match={self.min_match}.")

    def begin(self, target: Target) -> BubbleDrafter:
        """Start on a sequence whose prompt was read.

        Raises:
            Refused: rule ``reject``, a file that can't be read, or one of another vocabulary.
        """
        if self.rule == "reject":
            raise Refused(f"{self}: rule=reject needs the laws that the drafts were drawn from, which a file doesn't hold; "
                          "expected match or point-mass.")
        ends = end_ids(target.model, target.tokenizer)
        if not self.pool:
            earlier = _answers(target, self.rule)
            index = RunIndex(self.min_match, self.max_match)
            for rollout in earlier:
                rollout.into(index)
            return BubbleDrafter(self, len(target.ids), earlier[-1] if earlier else None, index, ends)
        pool = _read(self.pool, Path(self.pool).stat().st_mtime_ns if Path(self.pool).is_file() else 0)
        pool.check(target.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        found = pool.of(target.ids)
        return BubbleDrafter(self, len(target.ids), found[0] if found else None,
                             pool.index(target.ids, self.min_match, self.max_match), ends)

    def over(self, pool: RolloutPool, rollout: Rollout, ends: Sequence[int] = ()) -> BubbleDrafter:
        """For one sequence of a rollout step: its own draft and those of the same prompt."""
        own = pool.own(rollout.key, rollout.prompt)
        if self.rule == "reject" and own is not None and own.laws is None:
            raise Refused(f"{self}: rule=reject needs the laws that draft {own.key} was drawn from, and it has none; "
                          "expected drafts of the step before, or rule=match.")
        return BubbleDrafter(self, len(rollout.prompt), own, pool.index(rollout.prompt, self.min_match, self.max_match), ends)


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> RolloutPool:
    return RolloutPool.load(path)


@dataclass(frozen=True)
class _Begun:
    """A sequence that was begun: `ids` grows as it is written behind its prompt."""

    ids: list[int]
    prompt: int
    noise: Noise


_begun: WeakKeyDictionary[nn.Module, dict[bytes, list[_Begun]]] = WeakKeyDictionary()
"""Sequences of a model by prompt."""


def _answers(target: Target, rule: str) -> list[Rollout]:
    """What was answered to the same prompt before; the sequence that begins now is remembered for the next.

    An answer drawn with the noise that this sequence will use is left out where a rule may not depend on it.
    """
    known = _begun.setdefault(target.model, {})
    digest = hashlib.blake2b(repr(target.ids).encode(), digest_size=16).digest()
    before = known.pop(digest, [])
    known[digest] = [*before[1 - MOST_ANSWERS :], _Begun(target.ids, len(target.ids), target.noise)]
    while len(known) > MOST_PROMPTS:
        del known[next(iter(known))]
    any_noise = rule == "match" or target.law.greedy
    return [Rollout((0, 0, i), tuple(one.ids[: one.prompt]), one.ids[one.prompt :], "earlier") for i, one in enumerate(before)
            if len(one.ids) > one.prompt and (any_noise or one.noise != target.noise)]
