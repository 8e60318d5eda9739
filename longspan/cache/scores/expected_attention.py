"""Expected Attention: keep what future queries are expected to look at, weighted by the size of the value.

1. Before rotary positions, the queries of a head are close to a Gaussian; its mean and covariance are estimated from
   the prompt's own queries (the first few, which behave differently, left out).
2. Future queries stand at positions N to N+n_future-1; on average they are turned by the mean of those rotations R.
3. E exp(q.k) for a Gaussian query is exp(mu'.k + k' S' k / 2): a softmax of the exponent over the keys estimates the
   attention they will get (Eq. 3-5). It is multiplied by the norm of the value.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.cache.base import LayerContext, Score, group_mean, oldest, protect
from longspan.registry import knob, method


@method("expected-attention", kind="score", paper="arXiv:2510.00636",
        capabilities=("all-queries", "pre-rope-queries", "values", "value-norm"),
        summary="Attention expected from future queries, a Gaussian fitted to the prompt's, times the value norm.")
class ExpectedAttention(Score):
    """Closed-form expectation; needs no query window and no question."""

    n_future: int = knob(512, "future positions averaged over", low=1)
    n_sink: int = knob(4, "first tokens that always stay and whose queries are left out", low=0)
    use_covariance: bool = knob(True, "use the queries' covariance, not only their mean")
    epsilon: float = knob(0.0, "added to the expected attention before the value norm", low=0.0)

    def protected(self, x: LayerContext) -> int:
        return self.n_sink

    def observe(self, x: LayerContext) -> None:
        """Add up count, sum and second moment of the new rows' unrotated queries."""
        q = x.parts.unrotate(x.q, *x.parts.rope(x.q_positions, x.layer)).float()
        use = (x.q_valid & (x.q_positions >= self.n_sink)).to(q.dtype)
        weighted = q * use[:, None, :, None]
        fresh = {"count": use.sum(1), "sum": weighted.sum(2)}
        if self.use_covariance:
            fresh["square"] = weighted.transpose(-1, -2) @ q
        for name, value in fresh.items():
            key = f"expected-{name}"
            x.stats[key] = x.stats[key] + value if key in x.stats else value

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        exponent = self.exponent(x)
        sink = oldest(x, self.n_sink)
        attention = exponent.masked_fill((sink | ~x.valid)[:, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        scores = (group_mean(attention) + self.epsilon) * x.v.float().norm(dim=-1)
        return protect(scores, sink)

    def exponent(self, x: LayerContext) -> Float[Tensor, "B H G S"]:
        """log E exp(scale * q.k) of a future query, for every key."""
        mean, covariance = self.future_queries(x)
        B, H, D = x.k.shape[0], x.k.shape[1], x.k.shape[3]
        k = x.k.float()
        out = x.scale * (mean.view(B, H, x.group, 1, D) @ k[:, :, None].transpose(-1, -2)).squeeze(3)
        if covariance is None:
            return out
        turned = k[:, :, None] @ covariance.view(B, H, x.group, D, D)
        return out + 0.5 * x.scale**2 * (turned * k[:, :, None]).sum(-1)

    def future_queries(self, x: LayerContext) -> tuple[Float[Tensor, "B Hq D"], Float[Tensor, "B Hq D D"] | None]:
        """Mean and covariance of the queries, turned to the average future position."""
        count = x.stats["expected-count"].clamp(min=1)[:, None, None]
        mean = x.stats["expected-sum"] / count
        cos, sin = self._mean_rotation(x)
        turned = x.parts.rotate(mean[:, :, None], cos, sin)[:, :, 0]
        if not self.use_covariance:
            return turned, None
        covariance = x.stats["expected-square"] / count[..., None] - mean[..., :, None] * mean[..., None, :]
        half = x.parts.rotate(covariance, cos, sin).transpose(-1, -2)
        return turned, x.parts.rotate(half, cos, sin).transpose(-1, -2)

    def _mean_rotation(self, x: LayerContext) -> tuple[Float[Tensor, "B 1 d"], Float[Tensor, "B 1 d"]]:
        """Rotation is linear in (cos, sin), so the mean rotation is the rotation by their means."""
        ahead: Int[Tensor, "B n"] = x.seen[:, None] + torch.arange(self.n_future, device=x.k.device)
        cos, sin = x.parts.rope(ahead, x.layer)
        return cos.float().mean(1, keepdim=True), sin.float().mean(1, keepdim=True)
