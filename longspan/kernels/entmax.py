"""α-entmax: a softmax with exact zeros, its threshold from a histogram and one or two steps, and its derivative.

p = argmax_p p.s + H_α(p) over the simplex (Tsallis entropy H_α; Peters et al. 2019, arXiv:1905.05702) is

    p_j = [z_j - tau]_+^(1/(α-1)),   z = (α-1) s,   tau the root of f(tau) = sum_j [z_j - tau]_+^(1/(α-1)) - 1

with α = 2 sparsemax (arXiv:1602.02068) and α -> 1 softmax. AdaSplash-2 (arXiv:2604.15180) finds tau in passes over the row:

1. *Maximum* m. Only z > m - 1 can be in the support, since tau lies in [m - 1, m).
2. *Histogram* (α = 1.5 and 2) of y = z - (m - 1) in b bins of [0, 1). Every element counts at its bin's left edge, the
   maximum at its exact value 1. That sum is no more than the true one and f falls, so its root is a lower bound:
   tau_hist <= tau <= tau_hist + 1/b.
3. *Refinement* inside that bracket: Halley's step for α <= 1.5, Newton's for α <= 2, else secant or bisection.

Everything is computed relative to the row's maximum, x = z - m <= 0, where float32 is finest. The derivative needs no sort
and no tau: with u = p^(2-α) on the support, dL/ds = u (g - <u,g> / sum u).

`entmax` is defined by its `reference`, sorting (α = 1.5, 2) and bisection (others); the C version (`entmax.c`) does the
passes above in one call. `threshold` is passes 1 to 3 in PyTorch, with iterations counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.registry import Refused

BACKENDS = ("reference", "cpu")
STARTS = ("histogram", "quadratic", "middle")
STEPS = ("newton", "bisection")
BINS = 8
SLACK = 1e-5
"""How far outside its bracket a step may land: the bracket's own rounding."""
SMALLEST_DENOMINATOR = 1e-12


def entmax(scores: Float[Tensor, "*rows n"], alpha: float = 1.5, *, backend: str | None = None) -> Float[Tensor, "*rows n"]:
    """α-entmax along the last axis, differentiable once.

    A row whose scores are all -inf gives zeros, one with NaN or +inf gives NaN. Statistics are float32 (float64 for float64
    scores), the result has the dtype of `scores`.

    Args:
        scores: floating point, finite or -inf.
        alpha: above 1; 2 is sparsemax.
        backend: "reference" or "cpu" (the C kernel; α up to 2 and no float64); by default the fastest that applies on the device.

    Raises:
        Refused: alpha is not a finite number above 1.
        ValueError: scores that aren't floating point or have no axis; a backend that doesn't exist or doesn't apply.
    """
    check_alpha(alpha)
    if not scores.is_floating_point() or scores.ndim < 1:
        raise ValueError(f"entmax: expected floating-point scores (..., n), got {scores.dtype} {tuple(scores.shape)}")
    if not scores.numel():
        return scores.clone()
    return _Entmax.apply(scores, float(alpha), choose_backend(scores, alpha, backend))


def check_alpha(alpha: Any) -> None:
    """Raise `Refused` unless alpha is a finite number above 1."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha) or alpha <= 1:
        raise Refused(f"alpha={alpha!r}: expected a finite number above 1, such as 1.5; alpha=1 is what the mixer 'softmax' is.")


def choose_backend(scores: Tensor, alpha: float, backend: str | None) -> str:
    """The backend asked for, or the fastest that applies. Raises ValueError for one that can't be used."""
    applies = scores.device.type == "cpu" and scores.dtype != torch.float64 and alpha <= 2
    if backend is None:
        from longspan.kernels.entmax_cpu import rows_library

        return "cpu" if applies and rows_library() is not None else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "cpu" and not applies:
        raise ValueError(f"backend 'cpu' is for alpha up to 2 and numbers of up to 32 bits on a CPU, got alpha={alpha}, "
                         f"{scores.dtype} on {scores.device}; use backend 'reference'")
    return backend


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float, backend: str) -> Tensor:
        if backend == "cpu":
            from longspan.kernels.entmax_cpu import entmax_forward

            p = entmax_forward(scores, alpha)[0]
        else:
            p = reference(scores, alpha)
        ctx.save_for_backward(p)
        ctx.alpha, ctx.backend = alpha, backend
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (p,) = ctx.saved_tensors
        if ctx.backend == "cpu":
            from longspan.kernels.entmax_cpu import entmax_backward

            return entmax_backward(p, grad, ctx.alpha), None, None
        return jacobian_product(p, grad, ctx.alpha), None, None


def jacobian_product(p: Float[Tensor, "*rows n"], grad: Float[Tensor, "*rows n"], alpha: float) -> Float[Tensor, "*rows n"]:
    """The gradient of the scores from that of the probabilities `p` (symmetric, so this is either product)."""
    wide = statistics_dtype(p)
    u = torch.where(p > 0, p.to(wide) ** (2 - alpha), 0.0)
    total = u.sum(-1, keepdim=True)
    mean = (u * grad).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
    return (u * (grad.to(wide) - mean)).to(p.dtype)


# ----------------------------------------------------------------------------------------------------------- reference


def reference(scores: Float[Tensor, "*rows n"], alpha: float) -> Float[Tensor, "*rows n"]:
    """The definition: exact thresholds by sorting for α = 1.5 and 2, by bisection for others; not differentiable itself."""
    x, _ = below_top(scores.detach(), alpha)
    tau = by_sorting(x, alpha) if alpha in (1.5, 2.0) else by_bisection(x, alpha)
    p = (x - tau[..., None]).clamp(min=0) ** (1 / (alpha - 1))
    if alpha not in (1.5, 2.0):  # beyond α = 2 the sum is steep in tau: what rounding leaves is spread over the support
        total = p.sum(-1, keepdim=True)
        p = p / total.masked_fill(total == 0, 1.0)
    return p.to(scores.dtype)


def below_top(scores: Float[Tensor, "*rows n"], alpha: float) -> tuple[Float[Tensor, "*rows n"], Float[Tensor, "*rows"]]:
    """x = z - max z <= 0 and max z, for z = (α-1) scores; where all scores are -inf, x is -inf and the maximum 0."""
    wide = scores.to(statistics_dtype(scores))
    top = wide.amax(-1)
    top = top.masked_fill(torch.isneginf(top), 0.0)
    return (wide - top[..., None]) * (alpha - 1), top * (alpha - 1)


def by_sorting(x: Float[Tensor, "*rows n"], alpha: float) -> Float[Tensor, "*rows"]:
    """The threshold of sorted prefixes (arXiv:1905.05702, algorithm 2 for α = 1.5; arXiv:1602.02068, algorithm 1 for 2)."""
    # Below -1 nothing is in the support; -1 keeps sums over prefixes finite. Their differences want float64.
    ordered = x.sort(-1, descending=True).values.clamp(min=-1.0).double()
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=ordered.dtype)
    total = ordered.cumsum(-1)
    if alpha == 2.0:
        taus = (total - 1) / k
    else:
        mean = total / k
        spread = (ordered.square().cumsum(-1) - total * mean).clamp(min=0)  # k times the variance of the prefix
        taus = mean - ((1 - spread) / k).clamp(min=0).sqrt()
    size = (taus < ordered).sum(-1, keepdim=True).clamp(min=1)  # a prefix of the sorted row: its condition fails once for all
    return taus.gather(-1, size - 1)[..., 0].to(x.dtype)


def by_bisection(x: Float[Tensor, "*rows n"], alpha: float) -> Float[Tensor, "*rows"]:
    """The threshold by halving [-1, -n^(1-α)] until nothing is left to halve."""
    low = x.new_full(x.shape[:-1], -1.0)
    high = x.new_full(x.shape[:-1], -(float(x.shape[-1]) ** (1 - alpha)))
    for _ in range(54 if x.dtype == torch.float64 else 32):
        tau = (low + high) / 2
        more = ((x - tau[..., None]).clamp(min=0) ** (1 / (alpha - 1))).sum(-1) >= 1
        low, high = torch.where(more, tau, low), torch.where(more, high, tau)
    return low


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics are float32, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------------- threshold


@dataclass(frozen=True, eq=False)
class Threshold:
    """Where each row's support ends: z > top + tau, with z = (α-1) scores."""

    top: Float[Tensor, "*rows"]
    """max z"""
    tau: Float[Tensor, "*rows"]
    """Relative to `top`, in [-1, 0)."""
    iterations: Int[Tensor, "*rows"]
    """Steps taken."""
    low: Float[Tensor, "*rows"]
    high: Float[Tensor, "*rows"]
    """The bracket that the start gave, relative to `top`."""


@torch.no_grad()
def threshold(scores: Float[Tensor, "*rows n"], alpha: float = 1.5, *, start: str = "histogram", steps: str = "newton",
              bins: int = BINS, tolerance: float = 1e-6, most: int = 100) -> Threshold:
    """tau by passes over the row, and how many steps it took until \\|f\\| < `tolerance`.

    Args:
        start: "histogram": the middle of its bracket; "quadratic": the root of the parabola through f at the bracket's ends
            and middle, with counts at bin centres; "middle" of [m - 1, m], which is taken wherever α is not 1.5 or 2.
        steps: "newton": Halley's, Newton's, secant's step, whichever applies first, and bisection; or "bisection" alone.
        bins: b of the histogram.
        most: steps at most; rows also stop when float precision leaves nothing to move.

    Raises:
        Refused: alpha is not a finite number above 1.
        ValueError: a start or steps that don't exist, or fewer than one bin.
    """
    check_alpha(alpha)
    if start not in STARTS or steps not in STEPS or bins < 1:
        raise ValueError(f"expected a start of {', '.join(STARTS)}, steps of {', '.join(STEPS)} and bins of at least 1, "
                         f"got {start!r}, {steps!r}, {bins}")
    x, top = below_top(scores, alpha)
    if start == "middle" or alpha not in (1.5, 2.0):
        low = torch.full_like(top, -1.0)
        high = torch.zeros_like(top)
        t = (low + high) / 2
    else:
        counts = histogram(x, bins)
        low = histogram_root(counts, alpha).to(x.dtype)
        high = (low + 1 / bins).clamp(max=0.0)
        t = (low + high) / 2 if start == "histogram" else parabola_root(counts, low, high, alpha)
    tau, iterations = refine(x, alpha, t, low, high, steps=steps, tolerance=tolerance, most=most)
    return Threshold(top, tau, iterations, low, high)


def histogram(x: Float[Tensor, "*rows n"], bins: int) -> Int[Tensor, "*rows bins"]:
    """How many of y = x + 1 lie in each bin of [0, 1): the maximum (once) taken out of the last, negative ones in none."""
    y = x.clamp(min=-2.0) + 1
    index = torch.where(y >= 0, (y * bins).floor().clamp(max=bins - 1), bins).long()
    counts = torch.zeros(*x.shape[:-1], bins + 1, dtype=torch.long, device=x.device)
    counts.scatter_add_(-1, index, torch.ones_like(index))
    counts = counts[..., :bins].clone()
    counts[..., -1] -= 1
    return counts


def histogram_root(counts: Int[Tensor, "*rows bins"], alpha: float, *, place: float = 0.0) -> Float[Tensor, "*rows"]:
    """The root of f with every element at its bin's left edge and the maximum at 1, relative to the maximum; float64.

    `place` moves the elements within their bins (0.5: to the centres); only at 0 is the root a lower bound of the threshold.
    """
    bins = counts.shape[-1]
    s0 = s1 = s2 = torch.ones(counts.shape[:-1], dtype=torch.float64, device=counts.device)
    going = torch.ones_like(s0, dtype=torch.bool)
    for r in range(bins - 1, -1, -1):
        edge, c = (r + place) / bins, counts[..., r].double()
        n0, n1, n2 = s0 + c, s1 + c * edge, s2 + c * edge * edge
        below = n1 - n0 * edge if alpha == 2.0 else n0 * edge * edge - 2 * n1 * edge + n2
        going = going & (below < 1)
        s0, s1, s2 = (torch.where(going, new, old) for new, old in ((n0, s0), (n1, s1), (n2, s2)))
    if alpha == 2.0:
        return (s1 - 1) / s0 - 1
    return (s1 - (s1 * s1 - s0 * (s2 - 1)).clamp(min=0).sqrt()) / s0 - 1


def parabola_root(counts: Int[Tensor, "*rows bins"], low: Float[Tensor, "*rows"], high: Float[Tensor, "*rows"], alpha: float
                  ) -> Float[Tensor, "*rows"]:
    """Root of the parabola through f (elements at bin centres) at low, middle and high: the admissible one nearest to high,
    secant without one, always inside the bracket."""
    bins, half = counts.shape[-1], (high - low) / 2
    centres = (torch.arange(bins, device=low.device, dtype=low.dtype) + 0.5) / bins - 1

    def f(t: Tensor) -> Tensor:
        own = (-t) ** (1 / (alpha - 1))
        return (counts * (centres - t[..., None]).clamp(min=0) ** (1 / (alpha - 1))).sum(-1) + own - 1

    f0, f1, f2 = f(low), f(low + half), f(high)
    a, b = (f0 - 2 * f1 + f2) / 2, (f2 - f0) / 2  # in units of `half` around the middle: a w² + b w + f1
    inside = b * b - 4 * a * f1
    root = inside.clamp(min=0).sqrt()
    ways = torch.stack(((-b + root) / (2 * a), (-b - root) / (2 * a)))
    ways = torch.where(ways.isfinite() & (ways.abs() <= 1) & (inside >= 0), ways, -torch.inf)
    best = ways.amax(0)
    secant = (-1 - 2 * f0 / (f2 - f0)).nan_to_num(0.0, 0.0, 0.0)
    return low + half * (1 + torch.where(best.isfinite(), best, secant).clamp(-1, 1))


def refine(x: Float[Tensor, "*rows n"], alpha: float, t: Float[Tensor, "*rows"], low: Float[Tensor, "*rows"],
           high: Float[Tensor, "*rows"], *, steps: str = "newton", tolerance: float = 1e-6, most: int = 100
           ) -> tuple[Float[Tensor, "*rows"], Int[Tensor, "*rows"]]:
    """tau and the number of steps from `t` inside the bracket until \\|f(tau)\\| < `tolerance`."""
    power, tiny = 1 / (alpha - 1), torch.finfo(x.dtype).eps
    count = torch.zeros_like(t, dtype=torch.long)
    done: Bool[Tensor, "*rows"] = torch.isneginf(x).all(-1)
    t = t.masked_fill(done, 0.0)
    before: tuple[Tensor, Tensor] | None = None
    for step in range(most + 1):
        u = (x - t[..., None]).clamp(min=0)
        f = (u**power).sum(-1) - 1
        done = done | ~(f.abs() >= tolerance)  # NaN is done too
        if bool(done.all()) or step == most:
            break
        low, high = torch.where(f > 0, t, low), torch.where(f < 0, t, high)
        new = (low + high) / 2
        if steps == "newton":
            for try_ in reversed(_steps(u, f, t, power, before)):
                fine = try_.isfinite() & (try_ > low - SLACK) & (try_ < high + SLACK)
                new = torch.where(fine, try_, new)
        before = (t, f)
        stuck = (new - t).abs() <= tiny * t.abs()
        count += (~done).long()
        t = torch.where(done, t, new)
        done = done | stuck
    return t, count


def _steps(u: Tensor, f: Tensor, t: Tensor, power: float, before: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Where Halley's (α <= 1.5), Newton's (α <= 2) and, from the second step on, the secant's step go: NaN without a quotient."""
    def quotient(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(b.abs() > SMALLEST_DENOMINATOR, a / b, torch.nan)

    found = []
    if power >= 1:
        inside = u > 0
        slope = -power * torch.where(inside, u ** (power - 1), 0.0).sum(-1)
        if power >= 2:
            bend = power * (power - 1) * torch.where(inside, u ** (power - 2), 0.0).sum(-1)
            found.append(t - quotient(f * slope, slope * slope - f * bend / 2))
        found.append(t - quotient(f, slope))
    if before is not None:
        found.append(t - f * quotient(t - before[0], f - before[1]))
    return found
