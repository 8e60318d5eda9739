"""CriticalKV: re-score another score by how much each value can change the layer's output.

The error of dropping entry t is bounded by its attention times the L1 norm of its value after the output projection
(Theorem 1). Half of the budget is kept by the base score alone, the other half by base score times that norm.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import LayerContext, Score, group_mean, protect, top_mask
from longspan.cache.scores.snapkv import SnapKV
from longspan.registry import Refused, knob, method


@method("criticalkv", kind="score", paper="arXiv:2502.03805",
        capabilities=("wraps-score", "values", "output-projection", "value-norm"),
        summary="Another score times the L1 norm of the projected value, after half the budget is fixed by that score.")
class CriticalKV(Score):
    """``criticalkv(base=snapkv()) @ adakv`` is the paper's CriticalAdaKV."""

    base: Score = knob(kind="score", default_factory=SnapKV,  # type: ignore[arg-type]
                       help="the score that is refined")
    fixed: float = knob(0.5, "share of the budget that the base score fixes alone", low=0.0, high=1.0)
    epsilon: float = knob(1e-4, "added to the base score before the norm", low=0.0)

    def check(self) -> None:
        if self.base.card.can("value-norm"):
            raise Refused(f"criticalkv(base={self.base}): {self.base.card.name} already weighs by the values; "
                          "expected a score of the keys alone, such as snapkv.")

    def window_rows(self) -> int:
        return self.base.window_rows()

    def observe(self, x: LayerContext) -> None:
        self.base.observe(x)

    def protected(self, x: LayerContext) -> int:
        return self.base.protected(x)

    def moves(self, x: LayerContext, keep: Bool[Tensor, "B H S"]) -> Int[Tensor, "B H S"] | None:
        return self.base.moves(x, keep)

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        base = self.base.score(x).float()
        assert x.budget is not None
        first = (x.budget * self.fixed).to(torch.int64).clamp(min=x.protected)
        fixed = top_mask(base.masked_fill(~x.valid, -torch.inf), first[:, None].expand(base.shape[:2]))
        # The bound needs weights: a score below zero, such as minus a norm, is lifted to start at zero.
        base = base - base.masked_fill(~x.valid, torch.inf).amin(-1, keepdim=True).clamp(max=0.0)
        return protect((base + self.epsilon) * projected_norm(x), fixed)


def projected_norm(x: LayerContext) -> Float[Tensor, "B H S"]:
    """||W_o^h v_t||_1, mean over the query heads h that read the KV head; products in the values' dtype, sums in float32."""
    weight = x.parts.o_proj(x.layer).to(x.v.dtype)
    H, D = x.v.shape[1], x.v.shape[3]
    per_head = weight.view(-1, H, x.group, D).permute(1, 2, 3, 0)
    norms = [(x.v @ per_head[:, g]).abs().sum(-1, dtype=torch.float32) for g in range(x.group)]
    return group_mean(torch.stack(norms, 2))
