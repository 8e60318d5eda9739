"""Reusing caches of documents: the base of all methods, and the one engine they share.

Documents are read alone, once. For a question their caches are joined (`assemble`), a method chooses which context tokens
to recompute, those are repaired in one forward that also reads the question (`repair`), and decoding goes on. Methods
differ in the set they choose and in nothing else: at equal sets they give equal answers.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.cache.base import top_mask
from longspan.cache.reuse.assemble import Assembled
from longspan.cache.reuse.probe import probe
from longspan.cache.reuse.repair import Fused, Narrow, deviations, repair
from longspan.models.load import context_window
from longspan.registry import Method, Refused, knob


class Joint:
    """A joined context and the tokens that follow it, as methods see them. Whatever they ask for is computed once."""

    def __init__(self, model: nn.Module, context: Assembled, suffix: Sequence[int], question: tuple[int, int] | None) -> None:
        self.model, self.context, self.suffix = model, context, tuple(suffix)
        self.question = question
        self._probed: dict[tuple[tuple[int, int], frozenset[int]], Tensor] = {}

    @property
    def n_layers(self) -> int:
        return len(self.context.k)

    @functools.cached_property
    def n_eligible(self) -> int:
        return int(self.context.eligible.sum())

    def budget(self, r: float) -> int:
        """floor(r x eligible tokens); a product that only rounding keeps below a whole number counts as that number."""
        return math.floor(r * self.n_eligible + 1e-9)

    def importance(self, layers: Collection[int] | None = None, *, whole_suffix: bool = False) -> Float[Tensor, " N"]:
        """Attention of the question to every context token, mean over `layers` (all by default); see `probe`.

        Args:
            whole_suffix: all that follows the context asks, not the question alone.

        Raises:
            Refused: there is no question.
        """
        asked = (0, len(self.suffix)) if whole_suffix else self.question
        if asked is None or asked[1] <= asked[0]:
            raise Refused("there is no question to choose by; expected some tokens after the documents, as --compress "
                          "before-question leaves them, or a method that looks at documents only, such as cacheblend.")
        wanted = frozenset(range(self.n_layers) if layers is None else layers)
        if (asked, wanted) not in self._probed:
            self._probed[asked, wanted] = probe(self.model, self.context, self.suffix, asked, wanted).mean(0)
        return self._probed[asked, wanted]

    def fresh(self, layer: int) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N D"]]:
        """Keys and values of all context tokens in `layer` if everything up to there were recomputed."""
        return deviations(self.model, self.context, layer)

    def top(self, scores: Float[Tensor, " N"], count: int) -> Int[Tensor, " count"]:
        """The `count` eligible positions of the highest scores, ascending; of equal scores the earlier position wins.

        Raises:
            Refused: a score is not finite.
        """
        eligible = self.context.eligible
        if not bool(torch.isfinite(scores[eligible]).all()):
            raise Refused("scores of context tokens are not finite; the model's numbers overflow, load it in float32.")
        scores = scores.masked_fill(~eligible, -torch.inf)
        return top_mask(scores, torch.tensor(count, device=scores.device)).nonzero()[:, 0]


@dataclass(frozen=True)
class Reuse(Method):
    """How caches of documents read alone are joined: which of their tokens are recomputed. Subclasses give `choose`."""

    chunk: int = knob(256, "tokens of a document, where the text doesn't say what its documents are", low=1)
    library: str = knob("", 'folder that keeps documents\' caches between runs; "cache": the user\'s cache folder; none if empty')

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        """Context positions to recompute, ascending, all of them eligible."""
        raise NotImplementedError(f"{type(self).__name__} must define choose().")

    def narrow(self, x: Joint, chosen: Int[Tensor, " m"]) -> Narrow | None:
        """What drops chosen tokens again in higher layers; None, as nearly always: nothing does."""
        return None

    def steps_between(self) -> int:
        """Generated tokens after which the method chooses once more; 0, as nearly always: never."""
        return 0


@dataclass(eq=False)
class Joined:
    """A repaired prompt, and what it took."""

    fused: Fused
    chosen: Int[Tensor, " m"]
    """What the method chose, ascending; `fused.recomputed` also has what had to be recomputed anyway."""
    choosing_s: float
    repair_s: float

    @property
    def recomputed(self) -> float:
        """Context tokens recomputed, mean over layers."""
        counts = self.fused.layer_counts
        return sum(counts) / len(counts)


def join(model: nn.Module, context: Assembled, suffix: Sequence[int], method: Reuse, *,
         question: tuple[int, int] | None = None, last: int = 1) -> Joined:
    """Choose, repair, and read what follows the context.

    Args:
        suffix: tokens after the context: the question and what opens the answer. Where there are none the context's last
            token is read again, for its logits.
        question: first and end of the question in `suffix`; all of it if None.
        last: tokens at the end whose logits are wanted.

    Raises:
        Refused: an empty question or one outside the suffix, or a prompt longer than the model's window.
    """
    if not len(suffix):
        return join(model, _without_last(context), context.ids[-1:].tolist(), method, question=(0, 0), last=last)
    question = (0, len(suffix)) if question is None else question
    if not 0 <= question[0] <= question[1] <= len(suffix):
        raise Refused(f"the question's tokens {question} lie outside the {len(suffix)} that follow the context; expected a "
                      "range within them.")
    if (total := len(context) + len(suffix)) > (window := context_window(model)):
        raise Refused(f"documents and question have {total} tokens together, but the model reads at most {window}; leave out "
                      "a document.")
    start = time.perf_counter()
    x = Joint(model, context, suffix, question)
    chosen = context.ids.new_empty(0)
    if x.n_eligible:
        chosen = method.choose(x)
        if not bool(context.eligible[chosen].all()):
            raise ValueError(f"{method.card.name} chose tokens that are not eligible")
    middle = time.perf_counter()
    rows = torch.cat([chosen, context.stale.nonzero()[:, 0]]).sort().values
    fused = repair(model, context, rows, suffix, last=last, narrow=_kept_in(method.narrow(x, chosen), rows, context.eligible))
    return Joined(fused, chosen, middle - start, time.perf_counter() - middle)


def _kept_in(narrow: Narrow | None, rows: Int[Tensor, " m"], eligible: Bool[Tensor, " N"]) -> Narrow | None:
    """`narrow` for the chosen tokens among `rows`; the others are always recomputed."""
    if narrow is None:
        return None
    own = eligible[rows]

    def over_rows(layer: int, change: Tensor, active: Tensor) -> Tensor:
        stays = torch.ones_like(active)
        stays[own] = narrow(layer, change[own], active[own])
        return stays

    return over_rows


def _without_last(context: Assembled) -> Assembled:
    """The context without its last token."""
    n = len(context) - 1
    if n < 1:
        raise Refused("a single token and no question leave nothing to read; expected a longer document, or a question.")
    documents = tuple((a, min(b, n)) for a, b in context.documents if a < n)
    return Assembled(context.ids[:n], context.k[:, :, :n], context.v[:, :, :n], min(context.prefix, n), documents,
                     context.eligible[:n], context.stale[:n], context.rotary)
