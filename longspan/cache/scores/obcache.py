"""OBCache: an entry is worth what the attention output would lose without it.

1. The newest w query rows are the perturbation window. Row i has logits z_i, weights a_i = softmax(z_i) and the output
   o_i = sum_p a_ip v_p.
2. Pruning entry p zeroes its value v_p, its key k_p, or both. The squared error of the outputs, expanded to second order
   as in Optimal Brain Damage, gives closed forms

       V   sum_i a_ip^2 |v_p|^2
       K   sum_i (a_ip z_ip)^2 |v_p - o_i|^2
       VK  sum_i a_ip^2 |v_p + z_ip (v_p - o_i)|^2

   One more product, o_i . v_p, is all they need beyond attention weights; masked pairs count as z = 0.
3. Query heads that read one KV head add up, for the error is a sum over query heads.

Any policy that ranks by attention weights takes these instead: a window with pooling as SnapKV, one row shared by all
heads as TOVA, all rows accumulated as H2O.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score, newest, oldest
from longspan.cache.scores.snapkv import odd_kernel, smooth
from longspan.registry import Refused, knob, method

VARIANTS = ("K", "V", "VK", "attention", "vatp", "exact")
ROWS = 256
"""Query rows whose weights are held at once."""
NOTE = "obcache"


@method("obcache", kind="score", system="obcache", paper="arXiv:2510.07651",
        capabilities=("query-window", "all-queries", "values", "value-norm"),
        summary="How far the attention output moves when the entry's value, key or both are pruned.")
class OBCache(Score):
    """Second-order output error of pruning one entry, summed over query rows and over the query heads of a KV head.

    ``obcache`` alone is the SnapKV flavour. ``obcache(fullhist=True, kernel=1)`` is H2O's, and
    ``obcache(window=1, n_recent=0, kernel=1, shared=True)`` TOVA's. Besides ``V``, ``K`` and ``VK`` there are the plain
    ``attention`` weight, ``vatp`` (attention times the L1 norm of the value, arXiv:2406.12335) and ``exact``, the error
    of truly removing one entry, for reference.
    """

    variant: str = knob("K", "what is pruned: the key, the value, both; or a score to compare with", choices=VARIANTS)
    window: int = knob(16, "newest query rows over which the error is summed", low=1)
    n_recent: int | None = knob(None, "newest entries that always stay; None: as many as `window`", low=0)
    n_sink: int = knob(0, "first tokens that always stay", low=0)
    fullhist: bool = knob(False, "sum over all query rows so far; `window` then only says what stays")
    kernel: int = knob(7, "width of the pooling along the text, odd; 1: none", low=1)
    pool: str = knob("max", "how neighbours are pooled", choices=("max", "mean"))
    shared: bool = knob(False, "add up all heads of a layer and rank its entries once for all of them")

    def check(self) -> None:
        odd_kernel(self.kernel, "obcache")

    def can(self, capability: str) -> bool:
        """What this setting needs; the card names what any setting may need."""
        own = {"query-window": not self.fullhist, "all-queries": self.fullhist, "shares-heads": self.shared}
        return own.get(capability, super().can(capability))

    @property
    def recent(self) -> int:
        return self.window if self.n_recent is None else self.n_recent

    def window_rows(self) -> int:
        return 0 if self.fullhist else self.window

    def protected(self, x: LayerContext) -> int:
        return self.recent + self.n_sink

    def observe(self, x: LayerContext) -> None:
        """Add what the new query rows say about every live entry; new entries start with their own row."""
        added = output_error(x, self.variant).sum(2)
        before = x.per_key.get(NOTE)
        x.per_key[NOTE] = added if before is None else added + F.pad(before, (0, added.shape[-1] - before.shape[-1]))

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        error = x.per_key[NOTE][:, :, None] if self.fullhist else output_error(x, self.variant)
        error = error * value_factor(self.variant, x.v.float())[:, :, None]
        recent = newest(x, self.recent)
        # What stays anyway is left out of the pooling, as SnapKV leaves out its window.
        pooled = smooth(error.masked_fill((recent | ~x.valid)[:, :, None], 0.0), self.kernel, self.pool)
        scores = pooled.sum(2)
        if not bool(torch.isfinite(scores[x.valid]).all()):
            raise Refused(f"{self} gave NaN or infinity in layer {x.layer}; the model's keys, values or queries hold "
                          "such numbers, expected finite ones.")
        if self.shared:
            scores = _over_heads(scores, x)
        return _lifted(scores, recent | oldest(x, self.n_sink))


def output_error(x: LayerContext, variant: str) -> Float[Tensor, "B H G S"]:
    """The part of a score that depends on query rows, summed over those of `x`, per query head; float32.

    Outputs are those over the entries held now. With a softcap c on the logits, z stands for the capped logit's
    derivative along the key, z (1 - tanh^2(z/c)).
    """
    dtype = torch.float64 if variant == "exact" else torch.float32  # 1 - a needs the digits
    k = x.k.to(dtype).transpose(-1, -2)[:, :, None]
    # A padded value may be anything; weight zero alone would not keep NaN out of the outputs.
    v = x.v.to(dtype).masked_fill(~x.valid[..., None], 0.0)[:, :, None]
    total = torch.zeros(*x.k.shape[:2], x.group, x.k.shape[2], device=x.k.device)
    for start in range(0, x.q.shape[2], ROWS):
        part = slice(start, start + ROWS)
        q = x.q[:, :, part].to(dtype).unflatten(1, (-1, x.group))
        allowed = (x.positions[:, :, None, :] <= x.q_positions[:, None, part, None]) & x.valid[:, :, None, :]
        allowed = (allowed & x.q_valid[:, None, part, None])[:, :, None]
        weights, z = weights_and_logits(q @ k * x.scale, allowed, x.softcap)
        total += row_error(variant, weights, z, v, weights @ v).float()
    return total


def weights_and_logits(
    logits: Float[Tensor, "*h w S"], allowed: Bool[Tensor, "*h w S"], softcap: float | None = None
) -> tuple[Float[Tensor, "*h w S"], Float[Tensor, "*h w S"]]:
    """Attention weights and z, both 0 where nothing may be seen; a row that sees nothing is all 0."""
    z = logits
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits, z = softcap * bent, logits * (1 - bent.square())
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(~allowed, 0.0), z.masked_fill(~allowed, 0.0)


def row_error(
    variant: str, a: Float[Tensor, "*h w S"], z: Float[Tensor, "*h w S"], v: Float[Tensor, "*h S D"],
    o: Float[Tensor, "*h w D"]
) -> Float[Tensor, "*h S"]:
    """Sum over rows of a score's row-dependent part; times `value_factor` it is the score.

    Args:
        variant: one of `VARIANTS`.
        a, z: attention weights and logits.
        v: values.
        o: outputs, ``a @ v``.
    """
    if variant in ("attention", "vatp"):
        return a.sum(-2)
    if variant == "V":
        return a.square().sum(-2)
    value, output = v.square().sum(-1)[..., None, :], o.square().sum(-1)[..., None]
    cross = o @ v.transpose(-1, -2)
    if variant == "VK":  # |(1 + z) v - z o|^2, written out
        moved = (1 + z).square() * value - 2 * z * (1 + z) * cross + z.square() * output
        return (a.square() * moved.clamp(min=0)).sum(-2)
    distance = (value + output - 2 * cross).clamp(min=0)
    if variant == "K":
        return ((a * z).square() * distance).sum(-2)
    # A row whose whole weight lies on one entry has nothing to fall back on, and says nothing.
    rest = 1 - a
    odds = torch.where(rest > 1e-12, a / rest.clamp(min=1e-12), 0.0)
    return (odds.square() * distance).sum(-2)


def value_factor(variant: str, v: Float[Tensor, "*h S D"]) -> Float[Tensor, "*h S"]:
    """The part of a score that depends on the entry's value alone: 1 unless `variant` is ``V`` or ``vatp``."""
    if variant == "V":
        return v.square().sum(-1)
    return v.abs().sum(-1) if variant == "vatp" else torch.ones_like(v[..., 0])


def _over_heads(scores: Float[Tensor, "B H S"], x: LayerContext) -> Float[Tensor, "B H S"]:
    """Sum over the heads of a layer, position by position: after an eviction heads may hold different tokens."""
    place = x.positions.masked_fill(~x.valid, 0).long().flatten(1)
    total = scores.new_zeros(len(scores), int(place.max()) + 1)
    total.scatter_add_(1, place, scores.masked_fill(~x.valid, 0.0).flatten(1))
    return total.gather(1, place).view_as(scores)


def _lifted(scores: Float[Tensor, "B H S"], mask: Bool[Tensor, "B H S"]) -> Float[Tensor, "B H S"]:
    """Lift entries above all others. Scores are sums of squares of any size, where adding one may change nothing."""
    return torch.where(mask, 2 * scores.amax(-1, keepdim=True) + 1, scores)
