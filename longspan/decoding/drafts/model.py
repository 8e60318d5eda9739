"""A model as a draft: it reads what stands with a cache of its own and proposes its next tokens one by one.

Under rule ``match`` it draws with the target's own noise, so that laws which are alike draw alike (their tokens then agree
with probability at least (1 - TV) / (1 + TV)); under the other rules with noise that the target never uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.decoding.base import Drafter, Proposal, Target
from longspan.decoding.law import pick
from longspan.decoding.plain import read
from longspan.models.call import LayerCall


class ModelDrafter(Drafter):
    """Proposes with `model`, which has read the first `seen` tokens of the sequence into `cache`.

    Args:
        inside: what must stay open while it works, such as a recipe on the model; closed with it.
    """

    def __init__(self, target: Target, model: nn.Module, cache: Any, *, gamma: int, rule: str,
                 inside: contextlib.ExitStack | None = None) -> None:
        self.target, self.model, self.cache, self.gamma, self.rule = target, model, cache, gamma, rule
        self.inside = inside or contextlib.ExitStack()
        self.noise = target.noise if rule == "match" else target.noise.of("draft")
        self.base = 0
        """Tokens that stood when the latest proposal was made."""
        self.watched: tuple[int, ...] = ()
        self.queries: dict[int, list[Tensor]] = {}

    def watch(self, layers: Sequence[int]) -> None:
        """Put the queries of these layers into the notes of every proposal, as ``queries[layer] (Hq, g, D)``: row i is
        that of the step which proposed token i. The draft's cache is there as ``cache``."""
        self.watched = tuple(layers)
        self.cache.reads = self._look if layers else None

    def propose(self, ids: Sequence[int], limit: int) -> Proposal:
        self.base = len(ids)
        self.queries = {layer: [] for layer in self.watched}
        law = self.target.law
        tokens: list[int] = []
        laws: list[Tensor] = []
        pending = list(ids[self.seen :])
        while len(tokens) < min(self.gamma, limit):
            logits = read(self.model, torch.tensor([pending], device=self.target.device), self.cache)[0]
            p = law.probabilities([*ids, *tokens], logits)[0]
            pending = [pick(p, self.noise, len(ids) + len(tokens))]
            tokens += pending
            laws.append(p)
        queries = {n: torch.cat(q, 1) for n, q in self.queries.items() if q}
        notes = {"queries": queries, "cache": self.cache} if self.watched else {}
        return Proposal(tuple(tokens), torch.stack(laws) if laws else None, notes)

    def settle(self, ids: Sequence[int], accepted: int, proposed: int) -> None:
        wrong = self.seen - min(self.base + accepted, len(ids) - 1)
        if wrong > 0:
            self.cache.crop(-wrong)

    def close(self) -> None:
        self.cache.reads = None
        self.inside.close()

    @property
    def seen(self) -> int:
        """Tokens in the draft's cache."""
        return self.cache.get_seq_length()

    def _look(self, call: LayerCall, q: Tensor, positions: Tensor, store: Any) -> None:
        if call.layer in self.queries:
            self.queries[call.layer].append(q[0, :, -1:])
