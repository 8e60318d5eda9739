"""TriForce: a small draft proposes to the target on a part of its cache, which proposes to the target on all of it.

1. *Retrieval cache*. The prompt is cut into chunks of 8 tokens. A chunk's mean key times the prompt's last query ranks it in
   every key head; the best chunks stay, the first always. What is written later stays on top.
2. *Inner level*. A small draft with a streaming cache (first tokens and newest ones) proposes one token at a time. The target
   on the retrieval cache judges it: if it stands, the judge adds one of its own; if not, it writes another. This goes on
   until `gamma` tokens stand.
3. *Outer level*. The target on the full cache judges these, with the laws of the retrieval cache as their q.

Both levels use the same exact rules, so a token that the inner level writes follows the law of the retrieval cache, which is
what the outer level takes for its q. (The released code draws a rejected token anew from that law instead of from the
residual; what it proposes then follows another law than the q it states, and the text is no longer the target's.)
arXiv:2404.11912.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache import KeepPlan, LayerContext, OwnPolicy, Policy, RecipeCache, top_mask
from longspan.decoding.base import Draft, Drafter, Proposal, Target
from longspan.decoding.drafts.layer_skip import LayerSkip
from longspan.decoding.plain import read
from longspan.decoding.recent import check_whole, compressed_twin
from longspan.decoding.verify import verify
from longspan.registry import Card, Refused, knob, method


class Chunks(Policy):
    """Keeps the chunks of the prompt whose mean key the last query likes best, in every key head."""

    card = Card("retrieval-chunks", "policy", "", "decoding", "", "The best chunks for the last query.", __name__, "Chunks")

    def __init__(self, budget: int, chunk: int) -> None:
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "chunk", chunk)

    def __str__(self) -> str:
        return f"the best chunks of {self.chunk} tokens"  # type: ignore[attr-defined]

    def window_rows(self) -> int:
        return 1

    def plan(self, x: LayerContext) -> KeepPlan:
        n = x.k.shape[2]
        size, budget = self.chunk, self.budget  # type: ignore[attr-defined]
        if n <= budget:
            return KeepPlan(x.valid.clone())
        return KeepPlan(best_chunks(chunk_scores(x.q[:, :, -1], x.k, size), n, size, budget) & x.valid)


def chunk_scores(q: Float[Tensor, "B Hq D"], k: Float[Tensor, "B H S D"], size: int) -> Float[Tensor, "B H C"]:
    """Each chunk's mean key times the query, mean over the query heads that share a key head; the last may be shorter."""
    B, H, S, D = k.shape
    whole = S // size * size
    means = [k[:, :, :whole].float().view(B, H, -1, size, D).mean(3)]
    if whole < S:
        means.append(k[:, :, whole:].float().mean(2, keepdim=True))
    return (torch.cat(means, 2) @ q.float().view(B, H, -1, D).mean(2)[..., None])[..., 0]


def best_chunks(scores: Float[Tensor, "B H C"], length: int, size: int, budget: int) -> Bool[Tensor, "B H S"]:
    """Entries of the best ``budget // size`` chunks; the first and the last chunk are always among them."""
    scores = scores.clone()
    scores[..., 0] = scores[..., -1] = torch.inf
    count: Int[Tensor, "B H"] = torch.full(scores.shape[:2], max(2, budget // size), device=scores.device)
    return top_mask(scores, count).repeat_interleave(size, -1)[..., :length]


@dataclass
class Streaming:
    """What the small draft's cache is cut to after every round: the first `n_sink` entries and the newest, `budget` in all.

    Another model that reads the prompt itself reads it whole, before the first cut.
    """

    n_sink: int
    budget: int

    def cut(self, cache: Any) -> None:
        for layer in cache.policy_layers:
            if layer.seen and layer.store.width() > self.budget:
                held = layer.store.view()
                newest = torch.arange(held.k.shape[2], device=held.k.device) >= held.k.shape[2] - (self.budget - self.n_sink)
                layer.store.keep(held.valid & (newest | (held.positions < self.n_sink)))


class TriForceDrafter(Drafter):
    """Both lower levels of one sequence."""

    def __init__(self, target: Target, draft: TriForce, small: Any, cache: RecipeCache) -> None:
        self.target, self.draft, self.small, self.cache = target, draft, small, cache
        self.streaming = Streaming(draft.n_sink, draft.small_budget - draft.room)
        self.streaming.cut(small.cache)
        self.noise = target.noise if draft.rule == "match" else target.noise.of("retrieval")
        self.base = 0
        self.steps = self.stood = 0
        """Tokens that the small draft proposed, and how many of them stood."""

    def propose(self, ids: Sequence[int], limit: int) -> Proposal:
        self.base = len(ids)
        wanted = min(limit, self.draft.gamma)
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < wanted:
            so_far = [*ids, *tokens]
            proposal = self.small.propose(so_far, 1)
            p = self._judge(so_far, proposal.tokens)
            verdict = verify(p, proposal.tokens, self.noise, len(so_far), rule=self.draft.rule, q=proposal.q)
            if not verdict.accepted:
                self.cache.crop(-1)
            tokens += verdict.tokens
            laws += list(p[: len(verdict.tokens)])
            self.steps, self.stood = self.steps + 1, self.stood + verdict.accepted
            self.small.settle([*ids, *tokens], verdict.accepted, 1)
        return Proposal(tuple(tokens[:wanted]), torch.stack(laws[:wanted]) if wanted else None)

    def _judge(self, ids: Sequence[int], proposed: Sequence[int]) -> Float[Tensor, "2 V"]:
        """The laws of the retrieval cache after `ids`, and after the proposed token."""
        pending = [*ids[self.cache.get_seq_length() :], *proposed]
        logits = read(self.target.model, torch.tensor([pending], device=self.target.device), self.cache, last=len(proposed) + 1)
        return self.target.law.probabilities(ids, logits[0], proposed)

    def settle(self, ids: Sequence[int], accepted: int, proposed: int) -> None:
        stands = min(self.base + accepted, len(ids) - 1)
        for cache in (self.cache, self.small.cache):
            wrong = cache.get_seq_length() - stands
            if wrong > 0:
                cache.crop(-wrong)
        self.streaming.cut(self.small.cache)

    def close(self) -> None:
        self.small.close()


@method("triforce", kind="draft", paper="arXiv:2404.11912", capabilities=(),
        summary="A small draft proposes to the target on retrieved chunks, which proposes to the target on everything.")
class TriForce(Draft):
    """Two levels of speculation, both exact."""

    rule: str = knob("reject", "when a proposal stands, at both levels: match or reject", choices=("match", "reject"))
    gamma: int = knob(6, "tokens that the retrieval cache proposes at once", low=1)
    draft: Draft = knob(default_factory=LayerSkip, kind="draft",  # type: ignore[arg-type]
                        help="the small draft: layer-skip, or another model as in draft-model(model=...)")
    budget: int = knob(4096, "entries a head of the retrieval cache", low=16)
    chunk: int = knob(8, "tokens of a chunk", low=1)
    small_budget: int = knob(256, "entries a head of the small draft's cache", low=16)
    n_sink: int = knob(4, "first tokens that always stay in it", low=0)

    def check(self) -> None:
        if not self.draft.card.can("draft-model"):
            raise Refused(f"{self}: {self.draft.card.name} is no model; expected a draft that is one, such as layer-skip.")
        if self.budget < 2 * self.chunk:
            raise Refused(f"{self}: expected a budget of at least two chunks, {2 * self.chunk}.")
        if self.small_budget <= self.n_sink + self.room:
            raise Refused(f"{self}: expected small_budget of more than n_sink and a round's tokens, {self.n_sink} + {self.room}.")

    @property
    def room(self) -> int:
        """Entries left free for a round, so that the small draft's budget holds at all times."""
        return self.gamma + 2

    def begin(self, target: Target) -> TriForceDrafter:
        check_whole(target, self)
        retrieved = compressed_twin(target, OwnPolicy(Chunks(self.budget, self.chunk)))
        small = replace(self.draft, rule=self.rule).begin(target)  # type: ignore[type-var]
        if not isinstance(getattr(small, "cache", None), RecipeCache):
            small.close()
            raise Refused(f"{self}: {self.draft.card.name} keeps a cache that can't be cut here; expected a target with attach=, "
                          "which runs a draft under the empty recipe.")
        return TriForceDrafter(target, self, small, retrieved)
