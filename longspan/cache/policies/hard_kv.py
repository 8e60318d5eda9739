"""HARD-KV: every head keeps the entries that its own attention needs, in rounds while a long answer is written.

A round looks at the newest W queries of a layer. Each row's attention says how many entries it needs (the size k* of its
Top-p set); a metric such as SnapKV's pooling says which; a temperature per head makes the metric's sets as large as
attention's. What any row wants is kept, within a lower and an upper bound, beside the first and the newest entries.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import KeepPlan, LayerContext, Policy, newest, oldest, top_mask
from longspan.cache.top_p import calibrate, less_redundant, pooled, probabilities, top_p_sets, top_p_sizes
from longspan.registry import Refused, knob, method

TEMPERATURE = "temperature"
"""Name of the temperatures (B,H) among a layer's statistics; NaN for heads that had no round yet."""


@method("hard-kv", kind="policy", system="hard-kv", paper="arXiv:2606.28831", capabilities=("query-window", "ragged"),
        summary="Calibrated Top-p sets of the newest queries, a different number per head, in rounds while decoding.")
class HardKV(Policy):
    """A head shorter than B_lo + W keeps everything. The temperatures are found in a head's first round and used again;
    with `per_row` every row gets its own in every round. The schedule's first round is at the prompt's end; write
    ``schedule=every(steps=128, at_prompt=False)`` for rounds that count generated tokens only."""

    default_store: ClassVar[str | None] = "tiered"
    default_schedule: ClassVar[str | None] = "every(steps=128)"

    p: float = knob(0.9, "attention mass that each query row's set must hold", low=0.0, high=1.0)
    W: int = knob(32, "newest queries that choose, and newest entries that always stay", low=1)
    sink: int = knob(1, "first tokens that always stay", low=0)
    B_lo: int = knob(1024, "least entries a head keeps, on top of W", low=1)
    B_up: int | None = knob(None, "most entries a head keeps, on top of W; twice B_lo if not given", low=1)
    kernel: int = knob(7, "width of snapkv's pooling along the text, odd", low=1)
    metric: str = knob("snapkv", "what ranks the entries", choices=("vanilla", "snapkv", "rkv"))
    calibrate: bool = knob(True, "choose temperatures that make the sets as large as attention's own")
    per_row: bool = knob(False, "a temperature for every query row, instead of one a head")

    def check(self) -> None:
        if self.p == 0:
            raise Refused("hard-kv(p=0): expected a mass in (0, 1], such as 0.9.")
        if self.B_lo <= self.W + self.sink:
            raise Refused(f"hard-kv(B_lo={self.B_lo}): expected more than the W + sink = {self.W + self.sink} entries that "
                          f"always stay, such as {self.W + self.sink + 1}.")
        if self.B_up is not None and self.B_up < self.B_lo:
            raise Refused(f"hard-kv(B_up={self.B_up}): expected at least B_lo={self.B_lo}.")
        if self.kernel % 2 == 0:
            raise Refused(f"hard-kv(kernel={self.kernel}): expected an odd width, such as {self.kernel + 1}.")

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most entries of a head after a round, W included."""
        return self.B_lo + self.W, (2 * self.B_lo if self.B_up is None else self.B_up) + self.W

    def window_rows(self) -> int:
        return self.W

    def expected(self, context: int) -> float:
        """At most this many: how many the heads really need is only known once the text is read."""
        return min(context, self.bounds[1])

    def plan(self, x: LayerContext) -> KeepPlan:
        """Steps 1 to 6 of a round.

        Raises:
            Refused: keys or queries hold NaN.
            ValueError: query heads that don't divide among the KV heads, or a head without any entry.
        """
        if x.q.shape[1] % x.k.shape[1]:
            raise ValueError(f"{x.q.shape[1]} query heads don't divide among {x.k.shape[1]} KV heads")
        if bool((x.lengths == 0).any()):
            raise ValueError(f"layer {x.layer}: a head of a row holds no entry at all, lengths {x.lengths.tolist()}")
        low, high = self.bounds
        if bool((x.lengths < low).all()):
            return KeepPlan(x.valid.clone())
        z = self.logits(x)
        g = self.metric_logits(z, x)
        T = self.temperatures(g, z, x)
        wanted = top_p_sets(g, self.p, T).any(2)
        weight = mean_rows(probabilities(g, T), z)
        keep = bounded(wanted, oldest(x, self.sink) | newest(x, self.W), weight, x.valid, low, high)
        return KeepPlan(torch.where(x.lengths[..., None] < low, x.valid, keep))

    def logits(self, x: LayerContext) -> Float[Tensor, "B H W S"]:
        """z: the largest scaled product of a row's query heads that share a key head; -inf where nothing may be seen."""
        rows = slice(max(0, x.q.shape[2] - self.W), None)
        q, q_positions, q_valid = x.q[:, :, rows].float(), x.q_positions[:, rows], x.q_valid[:, rows]
        z = (q.view(*x.k.shape[:2], x.group, *q.shape[2:]) @ x.k.float().mT[:, :, None] * x.scale).amax(2)
        if x.softcap is not None:  # keeps the order, so the largest stays the largest
            z = x.softcap * torch.tanh(z / x.softcap)
        seen = (x.positions[:, :, None] <= q_positions[:, None, :, None]) & x.valid[:, :, None] & q_valid[:, None, :, None]
        z = z.masked_fill(~seen, -torch.inf)
        if bool(z.isnan().any()):
            raise Refused(f"hard-kv met NaN in layer {x.layer}; the model's keys or queries hold NaN.")
        return z

    def metric_logits(self, z: Float[Tensor, "B H W S"], x: LayerContext) -> Float[Tensor, "B H W S"]:
        """g = phi(z)."""
        if self.metric == "snapkv":
            return pooled(z, self.kernel)
        return less_redundant(z, x.k, x.valid) if self.metric == "rkv" else z

    def temperatures(self, g: Float[Tensor, "B H W S"], z: Float[Tensor, "B H W S"],
                     x: LayerContext) -> Float[Tensor, "B H W|1 1"] | float:
        """T of every head (noted in `x.stats`), or of every row; 1 without calibration."""
        if not self.calibrate:
            return 1.0
        if self.per_row:
            return calibrate(g, top_p_sizes(z, self.p), self.p)[..., None]
        due, known = x.lengths >= self.bounds[0], x.stats.get(TEMPERATURE)
        if known is None:
            known = torch.full_like(z[..., 0, 0], torch.nan)
        if bool((due & known.isnan()).any()):
            found = calibrate(g, top_p_sizes(z, self.p), self.p, shared=True)
            known = torch.where(due & known.isnan(), found, known)
        x.stats[TEMPERATURE] = known
        return torch.where(known.isnan(), 1.0, known)[..., None, None]


def mean_rows(probs: Float[Tensor, "B H W S"], z: Float[Tensor, "B H W S"]) -> Float[Tensor, "B H S"]:
    """Mean over the query rows that are real."""
    real = (z > -torch.inf).any(-1).sum(-1).clamp(min=1)
    return probs.sum(2) / real[..., None]


def bounded(wanted: Bool[Tensor, "B H S"], always: Bool[Tensor, "B H S"], weight: Float[Tensor, "B H S"],
            valid: Bool[Tensor, "B H S"], low: int, high: int) -> Bool[Tensor, "B H S"]:
    """`always` and `wanted`, filled up to `low` with the heaviest others, or cut to `high` by dropping the lightest wanted.

    Only valid entries are kept, and all of them where there are fewer than `low`. Weights lie in [0, 1].
    """
    counts: Int[Tensor, "B H"] = ((wanted | always) & valid).sum(-1).clamp(low, high)
    rank = weight + 2.0 * wanted + 4.0 * always
    return top_mask(rank.masked_fill(~valid, -torch.inf), counts) & valid
