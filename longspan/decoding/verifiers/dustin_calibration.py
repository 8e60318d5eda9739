"""What Dustin finds offline, once per target and draft.

1. *Retrieval heads* (CompressKV, arXiv:2508.02401). On texts with a question whose answer stands at positions A,
   SRScore(l,h) = the attention that the rows which write the answer give to all of A. Per layer the four best heads count.
2. *Which layers.* ARR(S), the attention recovery rate: the share of their attention to the history that verified tokens give
   to the positions in S, mean over tokens, layers and heads of the target. The target layer is the one whose heads, alone,
   have the highest; draft layers are added one by one while it rises, four at most.
3. *The split.* The share of the free positions that the draft chooses, from a grid of nine.

Traces are teacher-forced: at some positions of a text, the draft reads the next tokens on top of what stands before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache import top_mask
from longspan.decoding.base import Target
from longspan.decoding.plain import read
from longspan.decoding.recent import reading
from longspan.decoding.sparse_verify import choose, head_scores
from longspan.decoding.verifiers.dustin import Heads, history_scores
from longspan.models.call import LayerCall
from longspan.registry import Refused

HEADS_PER_LAYER, DRAFT_LAYERS = 4, 4
SPLITS = tuple(i / 8 for i in range(9))
FIRST_SPLIT = 0.5
"""The share while draft layers are chosen."""


@dataclass(frozen=True)
class Needle:
    """A text that ends with a question and its answer."""

    ids: tuple[int, ...]
    answer: int
    """Tokens of the answer, at the end."""
    spans: tuple[tuple[int, int], ...]
    """Where the text says it, [start, stop)."""


class RowQueries:
    """Notes the queries of some positions while a cache reads them; changes nothing."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.wanted = sorted(set(positions))
        self.parts: dict[int, list[Tensor]] = {}

    def __call__(self, call: LayerCall, q: Tensor, positions: Tensor, store: Any) -> None:
        at = torch.isin(positions[0], torch.tensor(self.wanted, device=positions.device))
        if bool(at.any()):
            self.parts.setdefault(call.layer, []).append(q[:, :, at])

    def rows(self, positions: Sequence[int]) -> dict[int, Float[Tensor, "1 Hq n D"]]:
        """The queries of some of them, by layer."""
        at = [self.wanted.index(p) for p in positions]
        return {layer: torch.cat(parts, 2)[:, :, at] for layer, parts in self.parts.items()}


# ------------------------------------------------------------------------------------------------------ retrieval heads


def retrieval_scores(weights: Float[Tensor, "h s N"], spans: Sequence[tuple[int, int]]) -> Float[Tensor, " h"]:
    """SRScore: attention of the s answer steps to all positions of the answer in the text."""
    return sum((weights[:, :, a:b].sum((1, 2)) for a, b in spans), weights.new_zeros(len(weights)))


def answer_scores(cache: Any, queries: dict[int, Float[Tensor, "1 Hq s D"]], spans: Sequence[tuple[int, int]], history: int
                  ) -> dict[int, Float[Tensor, " Hq"]]:
    """SRScore of all heads of some layers."""
    every = {layer: _all_weights(cache, layer, q, history) for layer, q in queries.items()}
    return {layer: retrieval_scores(weights, spans) for layer, weights in every.items()}


def _all_weights(cache: Any, layer: int, q: Float[Tensor, "1 Hq s D"], history: int) -> Float[Tensor, "Hq s N"]:
    """Every head's and row's attention to the first `history` positions, each row by itself."""
    held = cache.layers[layer]
    k = held.store.tail.keys[:, :, :history]
    heads, steps = q.shape[1], q.shape[2]
    own = q[0].reshape(k.shape[1], -1, q.shape[-1]).flatten(0, 1)[None, :, None]  # (1, Hq*s, 1, D)
    keys = k[0].repeat_interleave(heads * steps // k.shape[1], 0)[None]
    seen = torch.ones(keys.shape[:3], dtype=torch.bool, device=k.device)
    return head_scores(own, keys, seen, scale=held.facts[0], softcap=held.facts[1])[0].view(heads, steps, history)


def best_heads(scores: dict[int, Float[Tensor, " Hq"]], n: int = HEADS_PER_LAYER) -> Heads:
    """The best `n` heads of every layer, in ascending order; of equal ones the first."""
    return {layer: tuple(top_mask(s, torch.tensor(min(n, len(s)), device=s.device)).nonzero()[:, 0].tolist())
            for layer, s in scores.items()}


# ---------------------------------------------------------------------------------------------------------------- traces


@dataclass(frozen=True, eq=False)
class Trace:
    """One verified proposal: what each candidate signal says of the N positions, and where the target really looked."""

    mass: Float[Tensor, " N"]
    """Share of the attention to the history that each position gets: mean over verified tokens, layers and heads; sums to 1."""
    target: dict[int, Float[Tensor, " N"]]
    """s_T by layer."""
    draft: dict[int, Float[Tensor, " N"]]
    """s_D by layer."""

    def draft_score(self, layers: Sequence[int]) -> Float[Tensor, " N"] | None:
        """s_D of several layers together; None without any. Layers count alike, as they have the same number of heads."""
        return torch.stack([self.draft[layer] for layer in layers]).mean(0) if layers else None


def recovery(mass: Float[Tensor, " N"], kept: Bool[Tensor, " N"]) -> float:
    """ARR(S) of one trace."""
    return float(mass[kept].sum())


def oracle(mass: Float[Tensor, " N"], k: int) -> Bool[Tensor, " N"]:
    """The k positions with the most attention: no shared set of this size recovers more."""
    return top_mask(mass, torch.tensor(min(k, len(mass)), device=mass.device))


def chosen(trace: Trace, layer: int | None, draft: Sequence[int], *, k: int, m: int, n_sink: int, n_recent: int
           ) -> Bool[Tensor, " N"]:
    """S of a trace by a target layer (None: nothing but ties) and draft layers."""
    s_T = torch.zeros_like(trace.mass) if layer is None else trace.target[layer]
    s_D = trace.draft_score(draft)
    lengths = torch.tensor([len(s_T)], device=s_T.device)
    return choose(s_T[None], None if s_D is None else s_D[None], lengths, k=k, m=m, n_sink=n_sink, n_recent=n_recent)[0]


@dataclass(frozen=True)
class Fit:
    """What was found, with its attention recovery rate on the traces."""

    layer: int
    draft: tuple[int, ...]
    split: float
    recovery: float


def fit(traces: Sequence[Trace], *, k: int, n_sink: int, n_recent: int) -> Fit:
    """Choose the target layer, the draft layers and the split on some traces.

    Raises:
        Refused: no trace is longer than k, so that there is nothing to choose.
    """
    traces = [t for t in traces if len(t.mass) > k]
    if not traces:
        raise Refused(f"no calibration text is longer than the {k} positions that are read, so there is nothing to choose; "
                      "ask for longer ones.")
    free = k - n_sink - n_recent

    def rate(layer: int, draft: Sequence[int], split: float) -> float:
        found = [recovery(t.mass, chosen(t, layer, draft, k=k, m=round(split * free), n_sink=n_sink, n_recent=n_recent))
                 for t in traces]
        return sum(found) / len(found)

    layer = max(traces[0].target, key=lambda one: rate(one, (), 0.0))
    draft: tuple[int, ...] = ()
    best = 0.0
    while len(draft) < DRAFT_LAYERS:
        rates = {one: rate(layer, (*draft, one), FIRST_SPLIT) for one in traces[0].draft if one not in draft}
        one = max(rates, key=rates.__getitem__, default=None)
        if one is None or rates[one] <= best:
            break
        draft, best = (*draft, one), rates[one]
    by_split = {split: rate(layer, draft, split) for split in SPLITS}
    split = max(SPLITS, key=by_split.__getitem__)
    return Fit(layer, tuple(sorted(draft)), split, by_split[split])


# --------------------------------------------------------------------------------------------------- running the two models


def read_noting(target: Target, rows: Sequence[int]) -> RowQueries:
    """Read the target's text into its empty cache, and note the queries of some positions."""
    noted = RowQueries(rows)
    with reading(target.cache, noted):
        read(target.model, torch.tensor([target.ids], device=target.device), target.cache)
    return noted


def draft_rows(drafter: Any, ids: Sequence[int], history: int, steps: int) -> dict[int, Float[Tensor, "1 Hq s D"]]:
    """Queries of the draft's `steps` rows after the first `history` tokens, teacher-forced; its cache then holds more than
    the history by these rows. Ask for longer histories first: what was read beyond is taken back."""
    if drafter.seen > history:
        drafter.cache.crop(history - drafter.seen)
    elif drafter.seen < history:
        read(drafter.model, torch.tensor([list(ids[drafter.seen : history])], device=drafter.target.device), drafter.cache)
    positions = range(history, history + steps)
    noted = RowQueries(positions)
    with reading(drafter.cache, noted):
        read(drafter.model, torch.tensor([list(ids[history : history + steps])], device=drafter.target.device), drafter.cache)
    return noted.rows(positions)


def needle_scores(target: Target, draft: Any, needle: Needle) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """SRScore of every head of target and draft on one needle; `target` is one whose cache is empty."""
    first = len(needle.ids) - needle.answer - 1
    rows = range(first, first + needle.answer)
    own = answer_scores(target.cache, read_noting(target, rows).rows(rows), needle.spans, first)
    drafter = draft.begin(target)
    try:
        other = answer_scores(drafter.cache, draft_rows(drafter, target.ids, first, needle.answer), needle.spans, first)
    finally:
        drafter.close()
    return own, other


def traces(target: Target, draft: Any, histories: Sequence[int], gamma: int, own: Heads, other: Heads,
           progress: Callable[[], None] = lambda: None) -> list[Trace]:
    """Traces at some lengths of history of the target's text; `target` is one whose cache is empty."""
    rows = [range(n - 1, n + gamma + 1) for n in histories]
    noted = read_noting(target, [r for each in rows for r in each])
    drafter = draft.begin(target)
    found = []
    try:
        for history in sorted(histories, reverse=True):
            last, verified = noted.rows([history - 1]), noted.rows(range(history, history + gamma + 1))
            proposed = draft_rows(drafter, target.ids, history, gamma)
            found.append(Trace(
                mass_of(target.cache, verified, history),
                {n: history_scores(target.cache, last, {n: heads}, history)[0] for n, heads in own.items()},
                {n: history_scores(drafter.cache, proposed, {n: heads}, history)[0] for n, heads in other.items()}))
            progress()
    finally:
        drafter.close()
    return found[::-1]


def mass_of(cache: Any, verified: dict[int, Float[Tensor, "1 Hq n D"]], history: int) -> Float[Tensor, " N"]:
    """Where verified tokens look: their attention to the history as shares, mean over tokens, layers and heads."""
    total = torch.zeros(history, device=next(iter(verified.values())).device)
    for layer, q in verified.items():
        held = cache.layers[layer]
        k: Tensor = held.store.tail.keys[:, :, :history]
        grouped = q.reshape(1, k.shape[1], -1, q.shape[-1])
        seen: Int[Tensor, "1 H N"] = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
        total += head_scores(grouped, k, seen, scale=held.facts[0], softcap=held.facts[1]).mean((0, 1))
    return total / len(verified)
