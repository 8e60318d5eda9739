"""Answer-informed references: which prompt tokens does the *answer* attend to, whatever any method thinks?

1. The prompt is read densely. A reference answer is known: the model's own greedy one (`model-ref`), or the right one
   (`gt-ref`); it is read after the prompt, teacher forced, and every answer token's queries are looked at in every layer.
2. With p[i,l,h,t] the softmax over prompt tokens alone, no answer keys in it,

       r[t] = mean over answer tokens i of max over layers l and heads h of p[i,l,h,t],

   average-pooled along the text. Several right answers: the mean of their r.
How scores are compared with it: `longspan.evaluation.agreement`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan import grammar
from longspan.cache import AnyPolicy, CachePolicy, KeepPlan, LayerContext, OwnPolicy, Policy, fork, gatherer
from longspan.decoding import greedy, read
from longspan.evaluation.base import Example, answer_ids
from longspan.models import LayerCall, Loaded, Prompt, attached
from longspan.recipe import Recipe, Run
from longspan.registry import Card, Method, Refused, card, cards, knob, method, nearest

ROWS = 64
"""Answer rows whose attention is held at once."""


# --------------------------------------------------------------------------------------------------------- the references


@dataclass(frozen=True)
class Oracle(Method):
    """A reference ranking of prompt tokens, made from an answer."""

    kernel: int = knob(7, "width of the average pooling along the text, odd", low=1)
    W: int = knob(8, "newest ranked tokens left out of the comparison, or a score's window if that is longer", low=0)
    share: float = knob(0.1, "best tokens that Recall compares, as a share of those ranked", low=0.0, high=1.0)

    def check(self) -> None:
        if self.kernel % 2 == 0:
            raise Refused(f"{self.card.name}(kernel={self.kernel}): expected an odd width, such as {self.kernel + 1}.")

    def answers(self, example: Example, loaded: Loaded, write: Callable[[], list[int]]) -> list[list[int]]:
        """The answers to look at, as token ids; none where there is none.

        Args:
            write: the model's own greedy answer.
        """
        raise NotImplementedError(f"{type(self).__name__} must define answers().")


@method("model-ref", kind="oracle", system="claa", paper="arXiv:2602.16054",
        summary="Prompt tokens that the model's own greedy answer attends to.")
class ModelRef(Oracle):
    """What the answer of the uncompressed model looks at: there for any prompt, right or wrong."""

    def answers(self, example: Example, loaded: Loaded, write: Callable[[], list[int]]) -> list[list[int]]:
        own = write()
        return [own] if own else []


@method("gt-ref", kind="oracle", system="claa", paper="arXiv:2602.16054",
        summary="Prompt tokens that the right answer attends to; of several right ones, the mean.")
class GTRef(Oracle):
    """What the reference answer looks at, teacher forced after the prompt."""

    def answers(self, example: Example, loaded: Loaded, write: Callable[[], list[int]]) -> list[list[int]]:
        each = [example]
        if example.meta.get("answers_are") == "any" and not {"answer_text", "target"} & example.meta.keys():
            each = [replace(example, answers=(a,)) for a in example.answers]
        return [ids for e in each if (ids := answer_ids(e, loaded.tokenizer))]


def parse_oracle(text: str) -> Oracle:
    """An oracle as text: ``gt-ref``, with knobs in parentheses if wanted.

    Raises:
        Refused: no oracle of that name; the sentence names the nearest.
    """
    known = [c.name for c in cards(kind="oracle")]
    call, *more = grammar.parse(text)
    if more or call.at is not None or call.call.name not in known or card(call.call.name).kind != "oracle":
        raise Refused(f"--oracle: {nearest(text, known, 'oracle')}")
    made = grammar.build(call.call)
    assert isinstance(made, Oracle)
    return made


def answer_attention(q: Float[Tensor, "Hq m D"], k: Float[Tensor, "Hkv N D"], scale: float,
                     softcap: float | None = None, visible: Tensor | None = None) -> Float[Tensor, "Hq m N"]:
    """Attention of answer rows over prompt tokens alone, each row summing to one (float32).

    Args:
        visible: (m,N), False for tokens beyond a layer's window; a row that sees none gives zeros.
    """
    logits = q.float().view(k.shape[0], -1, *q.shape[1:]) @ k.float().mT[:, None] * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    attention = logits.flatten(0, 1).softmax(-1)
    return attention if visible is None else attention.masked_fill(~visible, 0.0)


def pooled(r: Float[Tensor, " N"], kernel: int) -> Float[Tensor, " N"]:
    """Average over `kernel` neighbours; zeros beyond both ends, which count."""
    return F.avg_pool1d(r[None, None], kernel, stride=1, padding=kernel // 2)[0, 0]


def reference(peaks: Sequence[Float[Tensor, "m N"]], kernel: int = 7) -> Float[Tensor, " N"]:
    """The ranking r from the largest attention over layers and heads of each answer's tokens; the mean over answers.

    Raises:
        Refused: no answer, or one without tokens; NaN in the attention.
    """
    if not peaks or not all(len(p) for p in peaks):
        raise Refused("the answer is empty; expected at least one token, which a reference ranking looks from.")
    r = torch.stack([pooled(p.mean(0), kernel) for p in peaks]).mean(0)
    if bool(torch.isnan(r).any()):
        raise Refused("the answer's attention is NaN; the model's keys or queries hold NaN.")
    return r


# ------------------------------------------------------------------------------------------------------ a dense reading


class DenseReading:
    """A prompt that was read densely, on which scores and answers may look. Make it with `dense_reading`."""

    def __init__(self, model: Any, run: _Watching, cache: Any, logits: Tensor, tokens: int) -> None:
        self.model, self.run, self.cache, self.logits, self.tokens = model, run, cache, logits, tokens

    def go_on(self, ids: Sequence[int]) -> None:
        """Read more of the prompt."""
        if ids:
            self.logits = read(self.model, _row(ids, self.model), self.cache)[:, 0]
            self.tokens += len(ids)

    def scores(self, policy: CachePolicy) -> dict[int, Float[Tensor, "H N"]]:
        """What a score says of all tokens read so far, by layer; empty where it always keeps them all."""
        ranker = _Ranker(policy)
        fork(self.cache, OwnPolicy(ranker))
        return ranker.found

    def write(self, most: int, ends: Sequence[int], stop: Sequence[str] = (), tokenizer: Any = None) -> list[int]:
        """The model's own greedy answer; the reading stays where it is."""
        point = self.cache.snapshot()
        done = greedy(self.model, self.cache, self.logits, most, ends, stop, tokenizer)
        self.cache.restore(point)
        return done.ids

    def peaks(self, answer: Sequence[int], chunk: int | None = None) -> Float[Tensor, "m N"]:
        """The largest attention over layers and heads that each token of an answer pays to each token of the prompt.

        Args:
            chunk: tokens of the answer read at a time; all at once when None.
        """
        watch = _Peaks(self.tokens)
        point, self.run.watch = self.cache.snapshot(), watch.see
        try:
            step = chunk or max(1, len(answer))
            for start in range(0, len(answer), step):
                read(self.model, _row(answer[start : start + step], self.model), self.cache)
        finally:
            self.run.watch = None
            self.cache.restore(point)
        if answer and not watch.found:
            raise Refused(f"every layer of {type(self.model).__name__} has a sliding window shorter than the prompt of "
                          f"{self.tokens} tokens; expected a shorter prompt.")
        rows = [watch.found[at] for at in sorted(watch.found)]
        return torch.cat(rows) if rows else torch.zeros(0, self.tokens)


@contextlib.contextmanager
def dense_reading(model: Any, ids: Sequence[int], scored: Sequence[AnyPolicy] = (), recipe: Recipe | None = None,
                  spans: dict[str, list[tuple[int, int]]] | None = None) -> Iterator[DenseReading]:
    """Read a prompt densely, so that `scored` may look at it when it ends, each in a `fork` of its cache.

    Args:
        recipe: its transforms of weights and positions are on meanwhile.
    """
    own = Recipe() if recipe is None else Recipe(weights=recipe.weights, positions=recipe.positions)
    with contextlib.ExitStack() as stack:
        if own.weights or own.positions:
            stack.enter_context(own.on(model))
        run = _Watching([Recipe(cache=gatherer(scored))])
        run.parts = stack.enter_context(attached(model, run))
        row = _row(ids, model)
        cache = run.new_cache(Prompt(row, len(ids), spans or {}))
        yield DenseReading(model, run, cache, read(model, row, cache)[:, 0], len(ids))


class _Watching(Run):
    """A run that shows every attention call, after it was answered, to whoever watches."""

    watch: Callable[[LayerCall], None] | None = None

    def attend(self, call: LayerCall) -> Float[Tensor, "B Hq T D"]:
        out = super().attend(call)
        if self.watch is not None and call.store is not None:
            self.watch(call)
        return out


@dataclass
class _Peaks:
    """The largest attention over layers and heads, by the position where an answer's rows start."""

    tokens: int
    found: dict[int, Float[Tensor, "m N"]] = field(default_factory=dict)

    def see(self, call: LayerCall) -> None:
        held = call.store.store.view()
        k, places = held.k[0, :, : self.tokens], held.positions[0, 0, : self.tokens]
        for start in range(0, call.q.shape[2], ROWS):
            rows = slice(start, start + ROWS)
            positions = call.positions[0, rows]
            visible = None if call.window is None else positions[:, None] - places < call.window
            peak = answer_attention(call.q[0, :, rows], k, call.scale, call.softcap, visible).amax(0)
            at = int(positions[0])
            self.found[at] = torch.maximum(self.found[at], peak) if at in self.found else peak


class _Ranker(Policy):
    """Notes what a score says of every entry, and evicts nothing. It has the name, and so the notes, of the score."""

    card = Card("ranker", "policy", "", "evaluation", "", "Evicts nothing.", __name__, "_Ranker")

    policy: CachePolicy
    found: dict[int, Tensor]

    def __init__(self, policy: CachePolicy) -> None:
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "found", {})

    def __str__(self) -> str:
        return str(self.policy.score)

    def window_rows(self) -> int:
        return self.policy.score.window_rows()

    def plan(self, x: LayerContext) -> KeepPlan:
        score, budget = self.policy.score, self.policy.budget
        least = max(1, score.protected(x))
        if int(x.seen[0]) > max(least, score.window_rows()):
            x.budget = torch.minimum(budget.tokens(x), x.seen - 1).clamp(min=least)
            x.protected, x.score = least, str(score)
            self.found[x.layer] = score.score(x)[0].float()
        return KeepPlan(x.valid)


def _row(ids: Sequence[int], model: Any) -> Tensor:
    return torch.tensor([list(ids)], device=model.device)


__all__ = ["DenseReading", "GTRef", "ModelRef", "Oracle", "answer_attention", "dense_reading", "parse_oracle", "pooled",
           "reference"]
