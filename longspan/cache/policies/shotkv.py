"""ShotKV: keep worked examples whole while the prompt is compressed, and single tokens while the answer grows.

1. *Prompt.* Every layer scores its shots (or sentences) by the attention that their tokens received on average and keeps
   the best ones that fit. What stands outside of shots stays. What was chosen is frozen.

       score(shot i) = 1/k_i * sum over its k_i tokens t and all query heads h of  alpha[t,h]

2. *Answer.* Generated tokens are a second cache with a limit of its own, ``B_d = max(W_d, ceil(r_d * generated))``: the
   newest ``W_d`` and those that later tokens attended to most.

Positions never change, and every query attends to both parts. The paper leaves open whose attention counts, what happens
to a shot that doesn't fit, and how the answer's attention adds up; the knobs and defaults here are our reading.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import KeepPlan, LayerContext, Policy, column_sums, top_mask
from longspan.registry import Refused, knob, method

Span = tuple[int, int]
RECEIVED, CHOSEN = "received", "chosen"
HAIR = 1e-9
"""So that 0.29 * 100 tokens are 29, and not 28 for want of the last bit."""


@method("shotkv", kind="policy", system="shotkv", paper="arXiv:2502.01941",
        capabilities=("all-queries", "units", "shares-heads"),
        summary="Whole shots (or sentences) of the prompt that attention went to; token by token only in the answer.")
class ShotKV(Policy):
    """Shots come from the prompt's spans: ``shots`` where a task marks them, else the ``sentences`` that
    `longspan.Context` finds. What stands outside of them (instructions, the question) and the last `W` prompt tokens always
    stay, and count. Heads of a layer share a choice; layers choose for themselves.

    All that comes after the prompt counts as generated: a question too, where the prompt is compressed before it is read.
    With ``r_d=1`` nothing of that is evicted and decoding costs nothing; below, a cut follows every token.
    """

    r_p: float = knob(0.3, "share of the prompt's tokens to keep, protected ones included", low=0.0, high=1.0)
    r_d: float = knob(1.0, "share of the generated tokens to keep; below 1 they are evicted one by one", low=0.0, high=1.0)
    rows: str = knob("all", "whose attention counts: every prompt token's, or that of the last W", choices=("all", "window"))
    W: int = knob(8, "last prompt tokens, which always stay", low=0)
    W_d: int = knob(8, "newest generated tokens, which always stay", low=1)
    stop_on_overflow: bool = knob(False, "stop at the first shot that doesn't fit instead of trying the next")
    force_one: bool = knob(False, "keep the best shot even where none fits the budget")

    @property
    def default_schedule(self) -> str | None:  # type: ignore[override]
        """A cut after every generated token, where any may be evicted; else one at the prompt's end."""
        return "every(steps=1)" if self.r_d < 1 else None

    def check(self) -> None:
        for name, ratio in (("r_p", self.r_p), ("r_d", self.r_d)):
            if ratio <= 0:
                raise Refused(f"shotkv({name}={ratio}): expected a share in (0, 1], such as 0.3.")
        if self.rows == "window" and self.W == 0:
            raise Refused('shotkv(rows="window", W=0): no token is left whose attention could count; expected W of at least 1.')

    def expected(self, context: int) -> float:
        return min(context, max(1, int(self.r_p * context + HAIR)))

    def observe(self, x: LayerContext) -> None:
        """Add what new rows attend to: prompt rows to all columns, rows of the answer to the answer's columns only."""
        end = x.seen if x.prompt is None else x.prompt
        answering, first = x.q_positions >= end[:, None], 0 if self.rows == "all" else (end - self.W)[:, None]
        counts = x.q_valid & (answering if self.r_d < 1 else torch.zeros_like(answering))
        if CHOSEN not in x.stats:
            counts = counts | (x.q_valid & ~answering & (x.q_positions >= first))
        if not bool(counts.any()):
            return
        received = torch.zeros_like(x.positions, dtype=torch.float32)
        generated = x.positions >= end[:, None, None]
        for rows, columns in ((counts & ~answering, None), (counts & answering, generated)):
            if bool(rows.any()):
                sums = received_from(x, rows)
                received += sums if columns is None else sums.masked_fill(~columns, 0.0)
        before = x.per_key.get(RECEIVED)
        if before is not None:
            received[..., : before.shape[-1]] += before
        x.per_key[RECEIVED] = received

    def plan(self, x: LayerContext) -> KeepPlan:
        """Whole shots once the prompt has ended; afterwards the generated tokens that exceed their limit go.

        Raises:
            Refused: nothing says where shots or sentences are, spans that aren't ordered ranges of the prompt, more
                protected than the budget, or NaN.
        """
        if x.early:
            return KeepPlan(x.valid)
        end = x.seen if x.prompt is None else x.prompt
        # Heads share everything, so the first one speaks for all.
        keep, generated = x.valid[:, 0], x.valid[:, 0] & (x.positions[:, 0] >= end[:, None])
        if CHOSEN not in x.stats:
            keep = keep & (generated | self._shots(x, end))
            x.stats[CHOSEN] = torch.ones_like(x.seen)
        keep = self._decoded(x, keep, generated, x.seen - end)
        return KeepPlan(x.valid if keep is x.valid[:, 0] else x.valid & keep[:, None])

    # -- the prompt

    def _shots(self, x: LayerContext, end: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Prompt entries that stay: whole units, and what is protected."""
        lengths = end.tolist()
        spans = units_of(x, min(lengths))
        positions, valid = x.positions[:, 0].cpu(), x.valid[:, 0].cpu()
        unit = unit_ids(positions, valid, spans)
        safe = valid & ((unit == len(spans)) | (positions >= end.cpu()[:, None] - self.W))
        means = self.scores(x, unit, len(spans))
        keep = safe
        for row, length in enumerate(lengths):
            whole = torch.bincount(unit[row], minlength=len(spans) + 1)[:-1]
            check_whole(whole.tolist(), spans, row)
            costs = torch.bincount(unit[row][~safe[row]], minlength=len(spans) + 1)[:-1].tolist()
            room = self._room(length, int((safe[row] & (positions[row] < length)).sum()))
            taken = take(means[row].tolist(), costs, room, self.stop_on_overflow, self.force_one)
            self._warn(costs, room, taken)
            chosen = torch.zeros(len(spans) + 1, dtype=torch.bool)
            chosen[taken] = True
            keep[row] |= chosen[unit[row]]
        return (keep & valid).to(x.k.device)

    def scores(self, x: LayerContext, unit: Int[Tensor, "B S"], n: int) -> Float[Tensor, "B n"]:
        """Mean attention of the prompt's units in this layer, all query heads added up (paper, shot-aware prefill)."""
        mass = torch.zeros(unit.shape) if RECEIVED not in x.per_key else x.per_key[RECEIVED].sum(1)
        mass = F.pad(mass, (0, unit.shape[1] - mass.shape[1])).cpu()
        if bool(torch.isnan(mass).any()):
            raise Refused(f"shotkv saw NaN attention in layer {x.layer}; the model's keys or queries hold NaN.")
        return unit_means(mass, unit, n)

    def _room(self, tokens: int, protected: int) -> int:
        """Tokens left for shots."""
        budget = int(self.r_p * tokens + HAIR)
        if protected > budget:
            least = math.ceil(100 * protected / tokens) / 100
            raise Refused(f"shotkv(r_p={self.r_p}): {protected} of the prompt's {tokens} tokens are protected (outside of shots, "
                          f"or among the last W={self.W}), but the budget is {budget}; expected r_p of at least {least:g}.")
        return budget - protected

    def _warn(self, costs: list[int], room: int, taken: list[int]) -> None:
        if costs and not taken:
            warnings.warn(f"shotkv(r_p={self.r_p}): no shot fits the {room} tokens left, so only what is protected stays; "
                          "force_one=True keeps the best one.", stacklevel=2)
        elif max(costs, default=0) > room and not self.force_one:
            warnings.warn(f"shotkv(r_p={self.r_p}): a shot of {max(costs)} tokens is longer than the {room} that shots may take; "
                          "it was left out.", stacklevel=2)

    # -- the answer

    def _decoded(self, x: LayerContext, keep: Bool[Tensor, "B S"], generated: Bool[Tensor, "B S"],
                 written: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """`keep` without the generated tokens that exceed their limit; `keep` itself where none does."""
        if self.r_d == 1:
            return keep
        limit = (self.r_d * written.double().cpu() - HAIR).ceil().long().clamp(min=self.W_d).to(keep.device)
        held = generated.sum(1)
        if bool((held <= limit).all()):
            return keep
        mass = x.per_key[RECEIVED].sum(1)
        return keep & (~generated | heaviest(mass, generated, torch.minimum(limit, held), self.W_d))


# ------------------------------------------------------------------------------------------------ units of the prompt


def units_of(x: LayerContext, tokens: int) -> list[Span]:
    """The prompt's shots, or its sentences where no shots are marked: checked.

    Raises:
        Refused: neither is known.
    """
    spans = x.spans.get("shots") or x.spans.get("sentences")
    if not spans:
        raise Refused("shotkv keeps whole shots or sentences, but nothing says where they are in this prompt; read it with "
                      "longspan.Context, which marks sentences, or use a task with shots, such as kvfunda-arithmetic.")
    return check_spans(spans, tokens)


def check_spans(spans: Sequence[Span], tokens: int) -> list[Span]:
    """Spans as they are, once they are known to be ordered, disjoint, not empty and within `tokens` tokens.

    Raises:
        Refused: they aren't, with the first span that is wrong.
    """
    last = 0
    for span in spans:
        if len(span) != 2 or not all(isinstance(edge, int) for edge in span):
            raise Refused(f"shotkv: {span!r} is no span; expected pairs (first, end) of token indices, the same for all rows of "
                          "a batch; read rows with other spans one by one.")
        first, end = span
        if end <= first:
            raise Refused(f"shotkv: the span ({first}, {end}) is empty; expected an end above the first token.")
        if first < 0 or end > tokens:
            raise Refused(f"shotkv: the span ({first}, {end}) lies outside of a prompt of {tokens} tokens; expected indices of "
                          "real tokens, without padding, that every row of the batch has.")
        if first < last:
            raise Refused(f"shotkv: the span ({first}, {end}) begins before the one before it ends, at {last}; expected disjoint "
                          "spans in ascending order.")
        last = end
    return [(first, end) for first, end in spans]


def check_whole(counts: Sequence[int], spans: Sequence[Span], row: int) -> None:
    """Refuse a row that doesn't hold all tokens of a span."""
    for (first, end), found in zip(spans, counts):
        if found != end - first:
            raise Refused(f"shotkv: the span ({first}, {end}) holds {found} real tokens in row {row}, expected {end - first}; "
                          "spans count real tokens, without padding.")


def unit_ids(positions: Int[Tensor, "B S"], valid: Bool[Tensor, "B S"], spans: Sequence[Span]) -> Int[Tensor, "B S"]:
    """Which span every entry belongs to; ``len(spans)`` for none."""
    firsts, ends = (torch.tensor(edges, device=positions.device) for edges in zip(*spans))
    found = torch.searchsorted(firsts, positions.long().contiguous(), right=True) - 1
    inside = valid & (found >= 0) & (positions < ends[found.clamp(min=0)])
    return torch.where(inside, found, len(spans))


def unit_means(mass: Float[Tensor, "B S"], unit: Int[Tensor, "B S"], n: int) -> Float[Tensor, "B n"]:
    """Mean of `mass` over the entries of each unit (float64, so that equal masses give equal means)."""
    sums = torch.zeros(len(mass), n + 1, dtype=torch.float64).scatter_add(1, unit, mass.double())
    counts = torch.zeros_like(sums).scatter_add(1, unit, torch.ones_like(mass, dtype=torch.float64))
    return (sums / counts.clamp(min=1))[:, :n]


def take(scores: Sequence[float], costs: Sequence[int], room: int, stop_on_overflow: bool = False,
         force_one: bool = False) -> list[int]:
    """Units in the order of their scores while they fit into `room` tokens; of equal ones the earlier comes first.

    Args:
        stop_on_overflow: stop at the first that doesn't fit; otherwise it is skipped.
        force_one: take the best even where none fits.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    taken = []
    for i in order:
        if costs[i] <= room:
            taken.append(i)
            room -= costs[i]
        elif stop_on_overflow:
            break
    return taken or order[: int(force_one)]


# ------------------------------------------------------------------------------------------------------------- tokens


def received_from(x: LayerContext, rows: Bool[Tensor, "B w"]) -> Float[Tensor, "B H S"]:
    """Attention that every entry receives from the marked query rows, the query heads of a KV head added up."""
    some = rows.any(0).nonzero()[:, 0]
    first, stop = int(some[0]), int(some[-1]) + 1
    part = replace(x, q=x.q[:, :, first:stop], q_positions=x.q_positions[:, first:stop], q_valid=rows[:, first:stop])
    return column_sums(part).sum(2)


def heaviest(mass: Float[Tensor, "B S"], among: Bool[Tensor, "B S"], limit: Int[Tensor, " B"],
             newest: int) -> Bool[Tensor, "B S"]:
    """`limit` of the entries in `among`: the `newest` ones, then those with most mass (of equal ones the earlier)."""
    recent = among & (among.flip(1).cumsum(1).flip(1) <= newest)
    scores = mass.masked_fill(recent, torch.inf).masked_fill(~among, -torch.inf)
    return among & top_mask(scores, limit)
