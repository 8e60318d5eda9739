"""What drafts and verifiers share: the target they work for, what they propose, how proposals are read.

A *draft* proposes the next tokens, a *verifier* reads them with the target model in one call and gives the logits after
each, and one loop (`speculative.write`) judges them and goes on. Methods are stateless; `begin` makes the object that
works for one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.decoding.law import Law
from longspan.decoding.noise import Noise
from longspan.decoding.plain import read
from longspan.decoding.verify import RULES
from longspan.registry import Method, knob, method

ADAPT = ("auto", "always")


@dataclass
class Target:
    """A model that has read one sequence (one row) into `cache`, and how its tokens are drawn."""

    model: nn.Module
    cache: Any
    ids: list[int]
    """Every token of the sequence so far. The cache has read all of them, or all but the last."""
    law: Law = field(default_factory=Law)
    noise: Noise = field(default_factory=Noise)
    tokenizer: Any = None
    attach: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    """Runs another model, such as a draft, under the empty recipe, so that its caches can be looked into."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True)
class Proposal:
    """Tokens proposed for the next places; nothing when the draft has no idea."""

    tokens: tuple[int, ...] = ()
    q: Float[Tensor, "g V"] | None = None
    """The laws they were drawn from; None where each was certain."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What verifiers may want to know of the draft, such as its queries."""


class Drafter:
    """Proposes for one sequence. Subclasses override `propose`, and the others where they hold state."""

    def propose(self, ids: Sequence[int], limit: int) -> Proposal:
        """Up to `limit` tokens to follow `ids`."""
        raise NotImplementedError

    def settle(self, ids: Sequence[int], accepted: int, proposed: int) -> None:
        """A round is over: the sequence is now `ids`; the first `accepted` of the `proposed` tokens stood, and one other
        followed. Take back what the draft has read of the rest."""

    def watch(self, layers: Sequence[int]) -> None:
        """Put the queries of these layers into the notes of every proposal. Drafts that are no models have none."""

    def close(self) -> None:
        """Writing is over; let go of what was held."""


class Checker:
    """Reads proposals of one sequence with the target. This one reads against the whole cache: exact."""

    draft_layers: Sequence[int] = ()
    """Layers of the draft whose queries it wants to see."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def check(self, last: int, proposal: Proposal) -> Float[Tensor, "g+1 V"]:
        """Logits after `last` (written, not yet read) and after each proposed token. The cache reads all of them."""
        ids = torch.tensor([[last, *proposal.tokens]], device=self.target.device)
        return read(self.target.model, ids, self.target.cache, last=ids.shape[1])[0]

    def keep(self, tokens: int, of: int) -> None:
        """Take back all but the first `tokens` of the `of` tokens just read."""
        if tokens < of:
            self.target.cache.crop(tokens - of)


@dataclass(frozen=True)
class Verifier(Method):
    """How proposed tokens are read."""

    def beside(self, draft: Draft) -> Verifier:
        """The verifier as it is found for this draft: settings of its own may depend on it."""
        return self

    def begin(self, target: Target, draft: Draft) -> Checker:
        """Start on a sequence whose prompt was read.

        Raises:
            Refused: target or draft don't fit.
        """
        raise NotImplementedError


@method("exact", kind="verifier", summary="Read proposals against everything the cache holds.", capabilities=("lossless",))
class Exact(Verifier):
    """The target's own law: what is written follows it exactly, whatever was proposed."""

    def begin(self, target: Target, draft: Draft) -> Checker:
        return Checker(target)


@dataclass(frozen=True)
class Draft(Method):
    """Where proposals come from."""

    verify: Verifier = knob(default_factory=Exact, help="how proposals are read", kind="verifier")  # noqa: RUF009
    rule: str = knob("match", "when a proposal stands: match, point-mass or reject", choices=RULES)
    adapt: str = knob("auto", "auto: stop proposing while it doesn't pay (under rule match); always: never stop", choices=ADAPT)

    def begin(self, target: Target) -> Drafter:
        """Start on a sequence whose prompt was read.

        Raises:
            Refused: the target doesn't fit.
        """
        raise NotImplementedError
