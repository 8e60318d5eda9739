"""SALE: every query-key pair is looked at in 4 bits; key blocks with one strong pair are read (arXiv:2505.24179).

1. *Sink and local area.* Query block u (64 rows) with n causal key blocks (of 32) reads block 0 and the last few blocks
   whatever they hold: segments of 128 keys after the sink are skippable, ``n_seg = max(0, floor((n - 1 - w/32) / 4))`` of
   them, and what lies behind is local. Attention over sink and local area alone gives row maximum m_i and sum l_i, exactly.
2. *Relative attention score* of a pair: ``RAS[i,j] = exp(c E~[i,j] - m_i) / l_i`` with the low-bit estimate E~ of the scores
   (`longspan.kernels.low_bit`) and c = 1/sqrt(d). A middle block is important if any of its pairs has ``RAS > tau``:

       max_j E~[i,j] > m_i / c + ln(l_i tau) / c,      one limit for every row and no exponentials

   l_i lacks the middle, so a pair's true attention weight is below its RAS: what is dropped is below tau.
3. *Reading.* Sink, local area and important blocks, in one softmax.

Thresholds tau are found for every layer and query head once per model (`sale_calibration`); a head whose threshold is 0 is
read densely. Prompts up to `dense_until` tokens are read densely. A prompt read in pieces (T < S) is ours: query blocks
count from the piece's first row, n from the key block that row stands in. With padding on the left, the sink is the row's
first 32 tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels.block_sparse_cpu import plan_lse
from longspan.kernels.low_bit import GROUPS, LowBit, asked_blocks, important_blocks, largest_excess, quantise
from longspan.kernels.plan import ReadPlan, visible_blocks
from longspan.models import profiles
from longspan.prefill.base import ReadContext, Selector, check_context, dense_plan, in_blocks
from longspan.registry import Refused, knob, method

SEGMENT = 128
"""Keys of a segment: the middle is a whole number of them."""
DENSE_TAU = 1e-5
"""Heads with smaller thresholds are read densely."""
DENSE_BLOCK = 128
ESTIMATES = ("int4", "exact")


@method("sale", kind="selector", system="sale", paper="arXiv:2505.24179",
        capabilities=("block-plan", "all-queries", "profile", "trains"),
        summary="Read the key blocks in which a 4-bit estimate of some score is strong beside sink and local keys.")
class Sale(Selector):
    """Needs thresholds for the model, which `longspan profile "sale"` finds in minutes; those of the bundled model come with
    the package. With `tau` given, all heads have that one."""

    family: ClassVar[str] = "sale"
    trainer: ClassVar[str] = "longspan.prefill.sale_calibration"

    tau: float | None = knob(None, "relative attention score above which a pair makes its block important, for all heads; "
                             "None: thresholds found for the model", low=0)
    theta: float = knob(0.4, "error a token's output may have, summed over channels, when thresholds are found", low=0)
    q_block: int = knob(64, "query rows of a block", low=1)
    k_block: int = knob(32, "keys of a block", low=1)
    w: int = knob(128, "keys before a query block's end that are always read", low=1)
    groups: str = knob("per_thread", "rows that share a scale: as tensor cores hold them, or none", choices=GROUPS)
    estimate: str = knob("int4", "scores from 4-bit codes, or exact ones (slow, to compare with)", choices=ESTIMATES)
    dense_until: int = knob(1024, "prompts of up to so many tokens are read densely", low=0)  # type: ignore[assignment]
    thresholds: str = knob(profiles.AUTO, 'file of the thresholds; "auto" finds those of the model')

    def check(self) -> None:
        k = self.k_block
        if self.groups == "per_thread" and k % 8:
            raise Refused(f"{self}: expected key blocks of a multiple of 8 for scales per_thread; the nearest is {_near(k, 8)}.")
        for name, size, of in (("q_block", self.q_block, k), ("w", self.w, k), ("segment", SEGMENT, k)):
            if size % of:
                what = f"{name}={size} is" if name != "segment" else f"a segment of {SEGMENT} keys is"
                raise Refused(f"{self}: {what} no multiple of k_block={k}; the nearest k_block that divides it is "
                              f"{_divisor(size, of)}.")
        if self.w < self.q_block:
            raise Refused(f"{self}: expected a local window of at least the query block of {self.q_block}, so that what is "
                          f"skippable lies before all of its rows; the nearest is w={self.q_block}.")

    # -- thresholds

    def profile_settings(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("theta", "q_block", "k_block", "w", "groups", "estimate")}

    def profile_tensors(self) -> tuple[str, ...]:
        return ("tau",)

    def profile_recipe(self) -> str:
        own = {"theta": 0.4, "q_block": 64, "k_block": 32, "w": 128, "groups": "per_thread", "estimate": "int4"}
        changed = [f"{n}={v!r}".replace("'", '"') for n, v in self.profile_settings().items() if v != own[n]]
        return f"{self.card.name}({', '.join(changed)})" if changed else self.card.name

    def head_thresholds(self, x: ReadContext) -> Float[Tensor, " Hq"]:
        """tau of every query head of this layer.

        Raises:
            Refused: none were found for this model, with the command that finds them; or they are another model's.
        """
        if self.tau is not None:
            return torch.full((x.heads,), float(self.tau), device=x.q.device)
        if x.parts is None:
            raise Refused(f"{self.card.name} finds its thresholds by the model, and this call has none; give tau=0.004, or run "
                          "the model under the recipe.")
        found = profiles.find_trained(x.parts.model, self, self.thresholds).tensors["tau"]
        if found.ndim != 2 or x.layer >= len(found):
            raise Refused(f"thresholds of shape {tuple(found.shape)}: expected one for each of {x.n_layers} layers and "
                          f"{x.heads} heads; make them again with `longspan profile \"{self.profile_recipe()}\" --again`.")
        return found[x.layer].to(x.q.device)

    # -- the plan

    def plan(self, x: ReadContext) -> ReadPlan:
        """The pairs to compute for `x`.

        Raises ValueError for shapes that don't fit and for NaN or infinite queries or keys; Refused where there are no
        thresholds.
        """
        check_context(x)
        if x.k_len <= self.dense_until:
            return dense_plan(x, DENSE_BLOCK)
        return self.select(x)

    def select(self, x: ReadContext) -> ReadPlan:
        tau = check_thresholds(self.head_thresholds(x), x.heads)
        if bool((tau < DENSE_TAU).all()):
            return dense_plan(x, DENSE_BLOCK)
        return plan_of(x, tau, self.areas(x), groups=self.groups, estimate=self.estimate)

    def areas(self, x: ReadContext) -> Areas:
        return areas_of(x, self.q_block, self.k_block, self.w)


def _near(n: int, unit: int) -> int:
    return max(unit, round(n / unit) * unit)


def _divisor(size: int, wanted: int) -> int:
    """The divisor of `size` nearest to `wanted`."""
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - wanted), d))


def check_thresholds(tau: Float[Tensor, " H"], heads: int) -> Float[Tensor, " H"]:
    """Refuse thresholds that aren't one number of at least 0 for every query head."""
    if tau.shape != (heads,):
        raise Refused(f"thresholds of shape {tuple(tau.shape)}: expected one for each of {heads} query heads, ({heads},).")
    if bool((tau < 0).any()) or bool(tau.isnan().any()):
        raise Refused(f"a threshold of {float(tau.min())}: expected numbers of at least 0; 0 reads the head densely.")
    return tau


# --------------------------------------------------------------------------------------------------------------- areas


@dataclass(frozen=True, eq=False)
class Areas:
    """Which key blocks of a query block may be skipped, and which are always read."""

    q_block: int
    k_block: int
    begin: Int[Tensor, "B NQ"]
    """First block of the middle."""
    end: Int[Tensor, "B NQ"]
    """One past its last."""
    sink_local: Bool[Tensor, "B NQ NK"]

    @property
    def middle(self) -> Bool[Tensor, "B NQ NK"]:
        return asked_blocks(self.begin, self.end, self.sink_local.shape[-1])


def areas_of(x: ReadContext, q_block: int, k_block: int, w: int) -> Areas:
    """Sink, middle and local area of every query block. Blocks of padding belong to none of them, or to the middle."""
    device = x.q.device
    first = torch.zeros(1, dtype=torch.int64, device=device) if x.valid is None else x.valid.int().argmax(-1)
    rows = x.k_len - x.q_len + torch.arange(0, x.q_len, q_block, device=device)
    # Counted from the block of the first row, so that the middle ends before it wherever the row stands in that block.
    n = rows // k_block + q_block // k_block
    begin = -((-first - k_block) // k_block)[:, None]
    per_segment = SEGMENT // k_block
    segments = ((n - begin - w // k_block) // per_segment).clamp(min=0)
    begin, end = (t.expand(len(x.q), -1).contiguous() for t in (begin.expand_as(segments), begin + per_segment * segments))
    seen = visible_blocks(x.q_len, x.k_len, q_block, k_block, device=device)[None]
    if x.valid is not None:
        seen = seen & in_blocks(x.valid, k_block).any(-1)[:, None]
    return Areas(q_block, k_block, begin, end, seen & ~asked_blocks(begin, end, seen.shape[-1]))


# ----------------------------------------------------------------------------------------------------------- selection


def plan_of(x: ReadContext, tau: Float[Tensor, " Hq"], areas: Areas, *, groups: str = GROUPS[0], estimate: str = ESTIMATES[0]
            ) -> ReadPlan:
    """Sink, local area, and the middle blocks that are important under `tau`."""
    chosen = areas.sink_local[:, None]
    if bool((areas.begin < areas.end).any()):
        chosen = chosen | inspect(x, areas, groups=groups, estimate=estimate).important(tau)
    return _plan(x, chosen, areas)


def _plan(x: ReadContext, chosen: Bool[Tensor, "B H NQ NK"], areas: Areas) -> ReadPlan:
    return ReadPlan.from_mask(chosen, q_len=x.q_len, k_len=x.k_len, q_block=areas.q_block, k_block=areas.k_block)


@dataclass(frozen=True, eq=False)
class Inspection:
    """What selection knows of a layer: score estimates, and what they are compared with."""

    q: LowBit
    k: LowBit
    bias: Float[Tensor, "B Hq S"]
    """qm.Ks; -inf for padding."""
    level: Float[Tensor, "B Hq T"]
    """``(m_i + ln l_i) / c`` as a score E; inf for rows of padding, which ask for nothing."""
    scale: float
    areas: Areas

    def important(self, tau: Float[Tensor, " Hq"], backend: str | None = None) -> Bool[Tensor, "B Hq NQ NK"]:
        """Middle blocks with a pair whose relative attention score is above its head's threshold."""
        tau = tau[:, None]
        limit = torch.where(tau < DENSE_TAU, -torch.inf, self.level + tau.log() / self.scale)
        limit = limit.masked_fill(torch.isposinf(self.level), torch.inf)
        return important_blocks(self.q, self.k, self.bias, limit, self.areas.begin, self.areas.end,
                                q_block=self.areas.q_block, k_block=self.areas.k_block, backend=backend)

    def largest_ras(self) -> Float[Tensor, "B Hq NQ NK"]:
        """The largest relative attention score in each middle block, 0 elsewhere: what all thresholds are compared with."""
        areas = self.areas
        excess = largest_excess(self.q, self.k, self.bias, self.level, areas.begin, areas.end, areas.q_block, areas.k_block)
        return (excess * self.scale).exp()


def inspect(x: ReadContext, areas: Areas, *, groups: str = GROUPS[0], estimate: str = ESTIMATES[0]) -> Inspection:
    """Attend to sink and local area, and make the estimate of all scores."""
    B, heads, _, D = x.q.shape
    key_heads = x.k.shape[1]
    q_mean, k_mean = _mean(x.q, x.valid_queries), _mean(x.k, x.valid)
    each_k_mean = k_mean.repeat_interleave(heads // key_heads, 1)
    make = functools.partial(quantise, groups=groups) if estimate == "int4" else _exact
    q, q_dots = make(x.q, q_mean, each_k_mean[:, :, None], valid=x.valid_queries)
    k, k_dots = make(x.k, k_mean, q_mean.view(B, key_heads, -1, D), k_block=areas.k_block, valid=x.valid)
    bias = k_dots.flatten(1, 2)
    if x.valid is not None:
        bias = bias.masked_fill(~x.valid[:, None], -torch.inf)
    # In terms of E, which lacks the part of a score that is the same for all keys: q.km = Qs.km + qm.km.
    shared = q_dots[:, :, 0] + (q_mean * each_k_mean).sum(-1, keepdim=True)
    level = sink_local_lse(x, areas) / x.scale - shared
    if x.valid_queries is not None:
        level = level.masked_fill(~x.valid_queries[:, None], torch.inf)
    return Inspection(q, k, bias, level, x.scale, areas)


def sink_local_lse(x: ReadContext, areas: Areas) -> Float[Tensor, "B Hq T"]:
    """``m_i + ln l_i``: the log-sum-exp of every row over its sink and local keys, in the scores' natural units."""
    plan = _plan(x, areas.sink_local[:, None], areas)
    return plan_lse(x.q, x.k, plan, scale=x.scale, valid=x.valid)


def _mean(x: Float[Tensor, "B H L D"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B H D"]:
    """The mean over the sequence, padding apart, in float32."""
    if valid is None:
        return x.mean(2, dtype=torch.float32)
    total = x.masked_fill(~valid[:, None, :, None], 0.0).sum(2, dtype=torch.float32)
    return total / valid.sum(-1).clamp(min=1)[:, None, None]


def _exact(x: Tensor, mean: Tensor, weigh: Tensor, *, k_block: int | None = None, valid: Tensor | None = None
           ) -> tuple[LowBit, Tensor]:
    """A quantiser that does nothing: numbers stand for themselves."""
    rows = x.float() - mean[:, :, None]
    if valid is not None:
        rows = rows.masked_fill(~valid[:, None, :, None], 0.0)
    return LowBit(rows, rows.new_ones(rows.shape[:3]), "per_token"), weigh @ rows.mT


__all__ = ["Areas", "Inspection", "Sale", "areas_of", "check_thresholds", "inspect", "plan_of", "sink_local_lse"]
