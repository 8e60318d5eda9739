"""What is done to a head's output to learn whether order judgements need its time code.

With mu the mean output, w the ridge weights, u = w/|w| and v = cov(o, tau):

    mean ablation        o <- mu
    orthogonal removal   o <- o - ((o - mu).u) u
    exact erasure        o <- o - v (w.(o - mu)) / (w.v)
    steering by s        o <- o + s d / (w.d), which decodes to a time later by s, along d = v or d = u

Exact erasure leaves cov(o, tau) = 0, so no linear read-out of time is left whatever the noise; orthogonal removal does that
for isotropic noise alone (arXiv:2306.03819 for erasure that leaves nothing linear). Steering along v moves the output as
time itself does; along u it changes one coordinate only. Functions take outputs (..., d) and return new ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.evaluation.order.information import TimeCode
from longspan.registry import Refused, nearest

Change = Callable[[Float[Tensor, "*shape d"]], Float[Tensor, "*shape d"]]
ALONG = ("code", "ridge")
STEPS = (-1.0, -0.5, 0.0, 0.5, 1.0)


def ablate(mean: Float[Tensor, " d"]) -> Change:
    """The mean in place of every output."""
    return lambda o: mean.to(o).expand_as(o).clone()


def remove_direction(u: Float[Tensor, " d"], mean: Float[Tensor, " d"]) -> Change:
    """The coordinate along the unit vector `u` set to its mean."""
    return _wide(lambda o: o - ((o - mean.to(o)) @ u.to(o))[..., None] * u.to(o))


def erase(v: Float[Tensor, " d"], w: Float[Tensor, " d"], mean: Float[Tensor, " d"]) -> Change:
    """Nothing linear about time left. `Refused` where w.v is 0: the weights don't see the code."""
    size = w @ v
    if not float(size):
        raise Refused("exact erasure: the weights and the covariance with time are orthogonal; expected a head that tells time.")
    return _wide(lambda o: o - ((o - mean.to(o)) @ w.to(o))[..., None] * (v / size).to(o))


def step_of(code: TimeCode, along: str = "code") -> Float[Tensor, " d"]:
    """What to add to an output so that it decodes to a time later by 1."""
    if along not in ALONG:
        raise Refused(nearest(along, ALONG, "direction to steer along"))
    d = code.v if along == "code" else code.u
    return d / (code.w @ d)


def steer(code: TimeCode, s: float | Float[Tensor, "*shape"], along: str = "code") -> Change:
    """Times later by `s`: one number, or one for every output."""
    step = step_of(code, along)
    by = s if isinstance(s, Tensor) else torch.tensor(float(s))
    return _wide(lambda o: o + by.to(o)[..., None] * step.to(o))


def random_directions(d: int, count: int = 20, seed: int = 0) -> Float[Tensor, "count d"]:
    """Unit vectors in all directions alike: the control of direction ablation."""
    drawn = torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / drawn.norm(dim=-1, keepdim=True)


def _wide(change: Change) -> Change:
    """In float32 at least, whatever the model computes in."""

    def widened(o: Tensor) -> Tensor:
        return change(o.to(torch.promote_types(o.dtype, torch.float32))).to(o.dtype)

    return widened
