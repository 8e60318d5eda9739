"""Sampling many answers at once, one pass of the model after another.

A pass reads, for every running sequence, its last token and what is proposed to follow, and writes at least one token of
each. Tokens are drawn with noise keyed by (step, prompt, sample) and position, so under rule ``match`` an answer is a function of
weights, prompt and key alone: drafts, order and the other sequences change when it is there, not what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.decoding.base import Drafter, Proposal
from longspan.decoding.law import Law
from longspan.decoding.noise import Noise
from longspan.decoding.rollouts.pool import Key, Rollout
from longspan.decoding.rollouts.rows import RowCache
from longspan.decoding.verify import verify
from longspan.registry import Refused

NOTHING = Proposal()
FindDrafter = Callable[[Rollout], Drafter]


@dataclass(frozen=True)
class Policy:
    """A model, and the version of its weights: what an update of the weights must change."""

    model: nn.Module
    version: str | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, and where they end."""

    law: Law = field(default_factory=lambda: Law(1.0))
    max_new_tokens: int | None = None
    max_length: int | None = None
    """Of prompt and answer together."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer; they are its last token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is None and self.max_length is None:
            raise Refused("sampling without max_new_tokens and max_length: expected one of them, so that answers end.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise Refused(f"max_new_tokens={self.max_new_tokens}: expected at least 1.")

    def room(self, prompt: int) -> int:
        """Most tokens of an answer to a prompt of `prompt` tokens."""
        if prompt < 1:
            raise Refused("a prompt has no tokens; expected at least one.")
        found = [] if self.max_new_tokens is None else [self.max_new_tokens]
        if self.max_length is not None:
            if self.max_length <= prompt:
                raise Refused(f"max_length={self.max_length}: expected more than the longest prompt's {prompt} tokens.")
            found.append(self.max_length - prompt)
        return min(found)


@dataclass
class Row:
    """A running sequence."""

    rollout: Rollout
    ids: list[int]
    noise: Noise
    room: int
    """Tokens it may still write."""
    drafter: Drafter | None


class Running:
    """Sequences that one rank writes together.

    Args:
        rule: when a proposal stands; proposals without laws are judged as certain under ``reject``.
        drafter: makes the drafter of a sequence; None writes plainly.
        noise: the noise of a key.
        keep_laws: note the law each token was drawn from.
    """

    def __init__(self, policy: Policy, sampling: Sampling, *, rule: str = "match", drafter: FindDrafter | None = None,
                 noise: Callable[[Key], Noise] = Noise, keep_laws: bool = False) -> None:
        if policy.model.training:
            raise ValueError("the policy is in training mode; rollouts need model.eval()")
        self.policy, self.sampling, self.drafter, self.noise, self.keep_laws = policy, sampling, drafter, noise, keep_laws
        self.rule = "match" if sampling.law.greedy else rule
        self.rows: list[Row] = []
        self.cache = RowCache(policy.model, 0)
        self.passes = 0

    def add(self, requests: Sequence[tuple[Key, Sequence[int]]]) -> None:
        """Begin sequences: their prompts are read, all but the last token."""
        rows = [self._begin(key, prompt) for key, prompt in requests]
        if not rows:
            return
        prompts = list(dict.fromkeys(row.rollout.prompt for row in rows))
        cache = RowCache(self.policy.model, len(prompts))
        if any(len(p) > 1 for p in prompts):
            cache.read([p[:-1] for p in prompts], last=1)
            cache.keep([len(p) - 1 for p in prompts])
        cache.select([prompts.index(row.rollout.prompt) for row in rows])
        self.cache.join(cache)
        self.rows += rows

    def advance(self) -> list[Rollout]:
        """One pass; the answers that ended in it."""
        if not self.rows:
            return []
        proposals = [NOTHING if row.drafter is None else row.drafter.propose(row.ids, row.room - 1) for row in self.rows]
        after = self.cache.read([[row.ids[-1], *p.tokens] for row, p in zip(self.rows, proposals)])
        self.passes += 1
        kept = [self._judge(row, p, logits[: len(p.tokens) + 1]) for row, p, logits in zip(self.rows, proposals, after)]
        self.cache.keep(kept)
        over = [row.rollout for row in self.rows if row.rollout.ended]
        if over:
            self.cache.select([i for i, row in enumerate(self.rows) if not row.rollout.ended])
            self.rows = [row for row in self.rows if not row.rollout.ended]
        return over

    def run(self) -> list[Rollout]:
        """Pass after pass until all have ended; the answers in the order of their keys."""
        found: list[Rollout] = []
        while self.rows:
            found += self.advance()
        return sorted(found, key=lambda r: r.key)

    def _begin(self, key: Key, prompt: Sequence[int]) -> Row:
        room = self.sampling.room(len(prompt))
        rollout = Rollout(key, tuple(prompt), version=self.policy.version, laws=[] if self.keep_laws else None)
        return Row(rollout, list(prompt), self.noise(key), room, self.drafter(rollout) if self.drafter else None)

    def _judge(self, row: Row, proposal: Proposal, logits: Float[Tensor, "g+1 V"]) -> int:
        """Write what stands; how many of the tokens read belong to the sequence."""
        tokens, done = proposal.tokens, row.rollout
        p = self.sampling.law.probabilities(row.ids, logits, tokens)
        rule = "point-mass" if self.rule == "reject" and proposal.q is None else self.rule
        q = proposal.q.to(p) if rule == "reject" and proposal.q is not None else None
        verdict = verify(p, tokens, row.noise, len(row.ids), rule=rule if tokens else "match", q=q)
        done.passes += 1
        done.proposed += len(tokens)
        done.accepted += verdict.accepted
        for k, token in enumerate(verdict.tokens):
            done.tokens.append(token)
            done.logprobs.append(float(p[k, token].log()))
            if done.laws is not None:
                done.laws.append(p[k])
            row.ids.append(token)
            row.room -= 1
            if token in self.sampling.ends or not row.room:
                done.ended = True
                break
        if row.drafter is not None:
            row.drafter.settle(row.ids, verdict.accepted, len(tokens))
        return 1 + verdict.accepted


def replay(rollouts: Sequence[Rollout], sampling: Sampling, drafter: FindDrafter, *,
           finished: Callable[[Rollout], None] = lambda rollout: None) -> list[Rollout]:
    """What rule ``match`` would have taken for these answers with other drafters: it accepts exactly the proposals that are
    the answer's own tokens, so no model is needed to count passes.

    Args:
        finished: told of every answer when it ends, pass by pass.
    """
    found = [replace(r, passes=0, proposed=0, accepted=0, tokens=[], logprobs=list(r.logprobs), ended=False) for r in rollouts]
    running = [(r, done, list(done.prompt), drafter(done)) for r, done in zip(rollouts, found) if r.tokens]
    while running:
        for whole, done, ids, drafts in running:
            left = whole.tokens[len(done.tokens) :]
            proposed = drafts.propose(ids, sampling.room(len(done.prompt)) - len(done.tokens) - 1).tokens
            stands = next((k for k, (x, y) in enumerate(zip(proposed, left)) if x != y), len(proposed))
            done.tokens += left[: stands + 1]
            ids += left[: stands + 1]
            done.passes, done.proposed, done.accepted = done.passes + 1, done.proposed + len(proposed), done.accepted + stands
            drafts.settle(ids, stands, len(proposed))
        over = [row for row in running if len(row[1].tokens) == len(row[0].tokens)]
        running = [row for row in running if len(row[1].tokens) < len(row[0].tokens)]
        for whole, done, _, _ in over:
            done.ended = whole.ended
            finished(done)
    return found


@torch.no_grad()
def token_logprobs(model: nn.Module, rollouts: Sequence[Rollout]) -> Float[Tensor, "B T"]:
    """Log-probability of every answer token in one teacher-forced pass, 0 where an answer has none: what a learner is
    given, and a function of the tokens alone."""
    batch = learner_inputs(rollouts)
    device = next(model.parameters()).device
    logits = model(input_ids=batch["ids"].to(device), attention_mask=batch["mask"].to(device), use_cache=False).logits
    scores = logits[:, :-1].float().log_softmax(-1).gather(-1, batch["ids"][:, 1:, None].to(device))[..., 0]
    return scores * batch["answer"][:, 1:].to(device)


def learner_inputs(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Padded token ids (B,T) of prompts and answers, which of them are tokens, and which are the answer's."""
    lengths = [len(r.prompt) + len(r.tokens) for r in rollouts]
    width = max(lengths, default=0)
    ids = torch.tensor([[*r.prompt, *r.tokens, *[0] * (width - n)] for r, n in zip(rollouts, lengths)])
    at = torch.arange(width)
    mask = at < torch.tensor(lengths)[:, None]
    return {"ids": ids, "mask": mask, "answer": mask & (at >= torch.tensor([len(r.prompt) for r in rollouts])[:, None])}
