"""How far attention through prototypes can be from softmax attention, for the very keys and queries it was given.

Write exact attention over pairs (j, m), which is possible for any P whose rows sum to 1:

    o_i = sum_jm pi_jm v_j,          pi_jm ~ P_jm exp(s_ij),            s_ij = q_i.k_j / sqrt(d)
    o~_i = sum_jm pi~_jm V_g[m],     pi~_jm ~ P_jm exp(g_im),           g_im = q_i.K_g[m] / sqrt(d)

since c_m = sum_j P_jm. Values first: sum_j P_jm v_j = c_m V_c[m], so V_c[m] may be put for v_j under pi~, and

    |o_i - o~_i| <= |sum_jm (pi - pi~)_jm v_j| + sum_m pi~_m |V_g[m] - V_c[m]|.

The first term doesn't change when a constant is taken from all v_j, so it is at most 2 TV(pi, pi~) R_V with R_V = max_j |v_j - a|
for any a. Weights last: s_ij - g_im lies in [-delta, delta] with

    delta_i = |q_i| / sqrt(d) max_m (rho_m + |K_g[m] - K_c[m]|),      rho_m = max over j with P_jm > 0 of |k_j - K_c[m]|,

and is exactly 0 for a key that is its own prototype. Let p be the share of pi~ on the others. For a set A, pi(A) - pi~(A) grows
with the ratio of weights on A and falls with the ratio elsewhere, and is monotone in how much of the exact keys A holds; so
the largest is reached with ratio e^delta on a part x of p and e^-delta on the rest of it, exact keys outside A; or mirrored.
Maximised over x in [0, p], both have a closed form (`total_variation`). With p = 1 it is tanh(delta/2). So

    |o_i - o~_i| <= 2 TV(delta_i, p_i) R_V + p_i max_m |V_g[m] - V_c[m]|                                  (`bound`)

In the causal form the exact keys are those of the window and the first ones of the document, everything else is pooled, and
nothing above changes: p_i is small wherever the window holds most of the weight. Means move from chunk to chunk. A key once at
most rho from the old mean is at most rho + |new mean - old mean| from the new one, which `drifted` carries along, so that no
key is looked at twice. R_V is carried in the same way, with the mean of all pooled values for a.

Without the log-mass (``mass=False``) the ratios also hold the factor c_m, so delta grows by max_m |log c_m|.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.layers.attention.prototypes import Prototypes


def total_variation(delta: Float[Tensor, "*B"], share: Float[Tensor, "*B"] | float = 1.0) -> Float[Tensor, "*B"]:
    """The most that two distributions can differ (half the sum of absolute differences) whose unnormalised log-ratio is within
    +-`delta` on outcomes that hold `share` of the second one, and 0 on the others. Both terms are reached."""
    share = torch.as_tensor(share, dtype=delta.dtype, device=delta.device)
    once, twice, fade = -torch.expm1(-delta), -torch.expm1(-2 * delta), torch.exp(-delta)
    least, rest = torch.finfo(delta.dtype).tiny, 1 - share
    safe = twice.clamp(min=least)
    # A part x has ratio e^delta, the rest of the share e^-delta; all divided by e^delta, differences by expm1.
    y = share * twice + rest * once
    root = (1 - y).clamp(min=0).sqrt()
    x = root * y / (1 + root) / safe
    whole = share * rest * once
    up = torch.where(x <= share, (y / (1 + root)).square() / safe, whole / (share + rest * fade).clamp(min=least))
    # Mirrored: the part has e^-delta, the rest of the share e^delta.
    root = (share + rest * fade).sqrt()
    less = share * twice + rest * fade * once
    step = less / (root + fade).clamp(min=least)
    x = root * step / safe
    down = torch.where(x <= share, step.square() / safe, whole / (share * fade + rest).clamp(min=least))
    return torch.maximum(up, down).masked_fill((delta <= 0) | (share <= 0), 0.0)


def spread(k: Float[Tensor, "*B N D"], P: Float[Tensor, "*B N M"], means: Float[Tensor, "*B M D"]) -> Float[Tensor, "*B M"]:
    """rho_m: the farthest of each prototype's keys from its mean; 0 without any."""
    # Not by |k|² - 2 k.m + |m|², whose rounding is as large as the distance between equal keys.
    far = torch.cdist(k.to(means.dtype), means, compute_mode="donot_use_mm_for_euclid_dist")
    return far.masked_fill(P <= 0, 0.0).amax(-2) if k.shape[-2] else torch.zeros_like(means[..., 0])


def drifted(before: Float[Tensor, "*B"], moved: Float[Tensor, "*B"], new: Float[Tensor, "*B"], held: Bool[Tensor, "*B"]
            ) -> Float[Tensor, "*B"]:
    """The largest distance from a mean that has `moved`: of keys pooled before (where any are `held`), and of new ones."""
    return torch.maximum((before + moved).masked_fill(~held, 0.0), new)


def deviation(rho: Float[Tensor, "*B M"], centre: Prototypes, read: Prototypes, mass: bool = True) -> Float[Tensor, "*B"]:
    """max_m (rho_m + |K_g[m] - K_c[m]|) over prototypes that hold a key."""
    off = rho + (read.k - centre.k).norm(dim=-1)
    return _largest(off, centre.mass)


def log_masses(centre: Prototypes) -> Float[Tensor, "*B"]:
    """max_m |log c_m|: what delta grows by where the log-mass is left out."""
    return _largest(torch.where(centre.mass > 0, centre.mass, torch.ones_like(centre.mass)).log().abs(), centre.mass)


def value_change(centre: Prototypes, read: Prototypes) -> Float[Tensor, "*B"]:
    """max_m |V_g[m] - V_c[m]| over prototypes that hold a key."""
    return _largest((read.v - centre.v).norm(dim=-1), centre.mass)


def bound(
    q: Float[Tensor, "B H T D"],
    off: Float[Tensor, "B G"],
    extra: Float[Tensor, "B G"] | float,
    values: Float[Tensor, "B H #T"],
    change: Float[Tensor, "B G"],
    share: Float[Tensor, "B H T"] | float = 1.0,
) -> Float[Tensor, "B H T"]:
    """The most that each output can be from softmax attention (norms).

    Args:
        off: the `deviation` of each key head's prototypes.
        extra: what delta grows by besides, `log_masses` or 0.
        values: R_V, the farthest value from a fixed point.
        change: `value_change`.
        share: part of each query's attention on prototypes that aren't exact keys.
    """
    group = q.shape[1] // off.shape[1]
    off, change = (t.repeat_interleave(group, 1)[..., None] for t in (off, change))
    if isinstance(extra, Tensor):
        extra = extra.repeat_interleave(group, 1)[..., None]
    delta = q.to(off.dtype).norm(dim=-1) * q.shape[-1] ** -0.5 * off + extra
    share = torch.as_tensor(share, dtype=delta.dtype, device=delta.device).clamp(max=1.0)
    return 2 * total_variation(delta, share) * values + share * change


def _largest(x: Tensor, mass: Tensor) -> Tensor:
    return x.masked_fill(mass <= 0, 0.0).amax(-1)
