"""RFA: attention as the estimate of a state from noisy observations of its past.

A token is an observation of a state that rotates, decays and is pushed around by noise: per head, with dh complex
channels, dx = (-mu + i w) x dt + noise (arXiv:2509.04154). Key j is carried forward to the time of query i and compared:

    E = e^{-mu (t_i - t_j)}                                what is left of it
    Sigma = s2 (1 - E^2) + eta2 E^2 + gamma2               how uncertain it has become (s2 dt where nothing decays)
    R2 = |q_i - e^{(-mu + i w)(t_i - t_j)} k_j|^2          how far it is off
    L = -log Sigma - (nu + 1) log(1 + R2 / (nu dh Sigma))  Student's t: one that is far off counts little, not against

    A = softmax_j(beta L),   out_i = e^{i w t_i} sum_j A_ij E_ij e^{-i w t_j} v_j - v_i

The rotation is that of RoPE, for values too; the decay and the growing variance do the work of ALiBi. RFA has RoPE's
frequencies in every head and decays fixed by the length trained at. SC-RFA deals one bank of frequencies out over the
heads, slow to fast, and lets a head decay in proportion to its fastest rotation, mu = b max w.

A head's real channels are the real parts followed by the imaginary ones: twice the `head_dim` that is asked for. Grouped
query heads share keys, values, decay and noise. What a layer's five scalars per head hold is inverted by softplus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.kernels import causal_mask
from longspan.layers.attention.base import AttentionModule, KVState, Visible
from longspan.layers.base import Mixer
from longspan.layers.context import Context
from longspan.layers.positions.base import inverse_frequencies, rotate
from longspan.registry import Refused, knob, method

STILL = 1e-5
"""A decay below this is none: the variance grows with the lag itself."""
LEAST_EXPONENT = -10.0
SLOWEST, FASTEST, STILL_SHARE = 0.01, 0.95, 0.25
"""RFA's decays over five times the length trained at, and the share of heads without one."""
ETA2_FLOOR = 1e-5
PAIRS = 1 << 22
"""Query-key pairs computed at once; longer calls are read in chunks of rows, which training computes twice."""
_SCALAR: Mapping[str, Any] = {"weight_decay": 0.0, "lr_scale": 0.5, "betas": (0.0, 0.999), "eps": 1e-7, "clip": 1e-4}


# ----------------------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True, eq=False)
class Noise:
    """Variances per complex channel; shapes broadcast against the pairs."""

    process: Float[Tensor, "*heads 1 1"]
    """s2, what the state's own noise adds up to; its growth per unit of time where nothing decays."""
    key: Float[Tensor, "*heads 1 1"]
    """eta2, of an observation that is looked back on."""
    query: Float[Tensor, "*heads 1 1"]
    """gamma2, of the query's own observation."""


def exponent(lag: Float[Tensor, "*b T S"], mu: Float[Tensor, "*heads 1 1"]) -> Float[Tensor, "*pairs T S"]:
    """log E = -mu dt, from -10 to 0."""
    return (-mu * lag).clamp(LEAST_EXPONENT, 0.0)


def variance(
    lag: Float[Tensor, "*b T S"], mu: Float[Tensor, "*heads 1 1"], noise: Noise
) -> Float[Tensor, "*pairs T S"]:
    """Sigma: the variance of a key carried over `lag` and of the query it is compared with."""
    log_e = exponent(lag, mu)
    growth = torch.where(mu < STILL, lag, -torch.expm1(2.0 * log_e))
    return noise.process * growth + noise.key * torch.exp(2.0 * log_e) + noise.query


def residual(
    q: Float[Tensor, "*bh T D"], k: Float[Tensor, "*bh S D"], k2: Float[Tensor, "*bh S"], e: Float[Tensor, "*pairs T S"]
) -> Float[Tensor, "*pairs T S"]:
    """R2 of rotated queries and keys, from the norms |k|^2 and one product of real channels."""
    apart = q.square().sum(-1)[..., None] + e * (e * k2[..., None, :] - 2.0 * (q @ k.mT))
    return apart.clamp(min=0.0)


def log_likelihood(
    r2: Float[Tensor, "*pairs T S"], sigma: Float[Tensor, "*pairs T S"], nu: Float[Tensor, "*heads 1 1"], dh: int,
    weight: str = "student",
) -> Float[Tensor, "*pairs T S"]:
    """L, up to a constant: Student's t over the dh complex channels divided by dh/2, or its exponential variant."""
    far = r2 / (nu * dh * sigma)
    return -sigma.log() - ((nu + 1.0) * far.log1p() if weight == "student" else far)


def robust_weights(
    q: Float[Tensor, "*bh T D"],
    k: Float[Tensor, "*bh S D"],
    k2: Float[Tensor, "*bh S"],
    lag: Float[Tensor, "*b T S"],
    mu: Float[Tensor, "*heads 1 1"],
    noise: Noise,
    nu: Float[Tensor, "*heads 1 1"],
    beta: Float[Tensor, "*heads 1 1"],
    mask: Bool[Tensor, "*b T S"],
    weight: str = "student",
) -> tuple[Float[Tensor, "*pairs T S"], Float[Tensor, "*pairs T S"]]:
    """A, whose rows sum to 1, and E; a query that sees nothing gets zeros. `mask` is True where a key may be seen."""
    e = exponent(lag, mu).exp()
    logits = log_likelihood(residual(q, k, k2, e), variance(lag, mu, noise), nu, q.shape[-1] // 2, weight)
    hidden = ~mask
    return (beta * logits).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1).masked_fill(hidden, 0.0), e


def spectrum(n_heads: int, head_dim: int, length: int, b: float | None) -> tuple[Tensor, Tensor]:
    """Rotations (G, 1, dh) in conjugate pairs and decays (G) of every key head, in float64.

    `Refused` for an odd number of complex channels.
    """
    if head_dim % 2:
        raise Refused(f"rfa: {head_dim} complex channels a head can't form conjugate pairs; expected an even number, such as "
                      f"{head_dim + 1}.")
    if b is None:
        still = int(STILL_SHARE * n_heads)
        spread = torch.linspace(math.log(SLOWEST), math.log(FASTEST), n_heads - still, dtype=torch.float64).exp()
        mu = torch.cat((spread.new_zeros(still), spread)) * 5.0 / max(length - 1, 1)
        bank = inverse_frequencies(head_dim).expand(n_heads, -1)
    else:
        bank = inverse_frequencies(n_heads * head_dim).flip(0).view(n_heads, -1)
        mu = b * bank.amax(-1)
    return torch.cat((bank, -bank), -1)[:, None], mu


def complex_normal_(weight: Float[Tensor, "*n"], parts: int, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
    """Fill a real matrix whose axis `parts` (of length 2) holds real and imaginary parts: |N(0, 1)| sqrt(2 / (fans)) long,
    in any direction."""
    size = [n for axis, n in enumerate(weight.shape) if axis != parts]
    length = torch.randn(size).abs() * (gain * math.sqrt(2.0 / (fan_in + fan_out)))
    phase = torch.rand(size) * (2.0 * math.pi)
    with torch.no_grad():
        weight.copy_(torch.stack((length * phase.cos(), length * phase.sin()), parts))


# -------------------------------------------------------------------------------------------------------------- module


class RobustFilterAttention(AttentionModule):
    """The filter over all tokens before a query and itself; holds rotated keys with their norms, rotated values and times."""

    keeps_places = True
    optimiser_settings = dict.fromkeys(("s2", "eta2", "gamma2", "nu", "beta"), _SCALAR)

    def __init__(self, knobs: RFA, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        super().__init__(dim, n_heads, n_kv_heads, 2 * head_dim)
        self.knobs, self.channels = knobs, head_dim
        # Float64, and out of reach of ``module.bfloat16()``.
        self._turns, self._mu = spectrum(n_kv_heads, head_dim, knobs.length, knobs.b)
        for proj, heads in ((self.q_proj, n_heads), (self.k_proj, n_kv_heads), (self.v_proj, n_kv_heads)):
            complex_normal_(proj.weight.view(heads, 2, head_dim, dim), 1, dim, heads * head_dim)
        complex_normal_(self.o_proj.weight.view(dim, n_heads, 2, head_dim), 2, n_heads * head_dim, dim, 0.5**0.5)
        self.s2, self.eta2, self.gamma2 = (_held(x, n_kv_heads) for x in (knobs.s2, 1.0, 1.0))
        self.nu, self.beta = _held(4.0, n_heads), _held(math.log(1.0 + math.e), n_heads)

    def turns(self, n_heads: int, device: torch.device) -> Float[Tensor, "H 1 dh"]:
        """w of every head; grouped query heads share them."""
        if self._turns.device != device:
            self._turns, self._mu = self._turns.to(device), self._mu.to(device)
        return self._turns.repeat_interleave(n_heads // self.n_kv_heads, 0)

    def noise(self, dtype: torch.dtype = torch.float32) -> Noise:
        """The variances learned, each (G,1,1,1)."""
        s2, eta2, gamma2 = (F.softplus(p.to(dtype)).view(-1, 1, 1, 1) for p in (self.s2, self.eta2, self.gamma2))
        return Noise(s2, eta2 + ETA2_FLOOR, gamma2 + self.knobs.gamma2_floor)

    def project(self, x: Float[Tensor, "B T C"], ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys followed by their squared norm, and values, all turned back by e^{-iwt}."""
        q, k, v = (rotate(t, ctx.positions, -self.turns(t.shape[1], t.device)) for t in super().project(x, ctx))
        norm = k.to(_wide(k)).square().sum(-1, keepdim=True).to(k.dtype)
        return q, torch.cat((k, norm), -1), v

    def read(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: KVState | None
    ) -> tuple[Float[Tensor, "B H T D"], KVState, Float[Tensor, "#B #H T S"] | None]:
        q, held, bias = super().read(x, ctx, state)
        if ctx.positions is not ctx.order:  # those count up
            _check_times(held)
        return q, held, bias

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        assert held.places is not None
        T, before, wide, G = visible.T, visible.S - visible.T, _wide(q), self.n_kv_heads
        places = held.places[:1] if held.places.stride(0) == 0 else held.places
        with torch.autocast(q.device.type, enabled=False):
            rows = q.to(wide).unflatten(1, (G, -1))
            k, k2, v = held.k[..., :-1].to(wide), held.k[..., -1].to(wide), held.v.to(wide)
            mu, noise = self._mu.to(wide).view(-1, 1, 1, 1), self.noise(wide)
            nu, beta = (F.softplus(p.to(wide)).view(G, -1, 1, 1) for p in (self.nu, self.beta))

            def chunk(start: int, stop: int) -> Tensor:
                """Innovations of the queries from `start` to `stop`, which see no key after their own."""
                end = before + stop
                mask = causal_mask(T, visible.S, q.device, start, stop)[None, None] if visible.mask is None else (
                    visible.mask[:, :, start:stop])
                lag = (places[:, before + start : end, None] - places[:, None, :end]).clamp(min=0).to(wide)[:, None, None]
                mask, own = mask[:, :, None, :, :end], v[:, :, None, before + start : end]
                a, e = robust_weights(rows[..., start:stop, :], k[:, :, None, :end], k2[:, :, None, :end], lag, mu, noise, nu,
                                      beta, mask, self.knobs.weight)
                return (a * e @ v[:, :, None, :end] - own).masked_fill(~mask.any(-1, keepdim=True), 0.0)

            step = max(1, PAIRS // max(1, q.shape[0] * q.shape[1] * visible.S))
            again = torch.is_grad_enabled() and step < T
            parts = [checkpoint(chunk, a, min(T, a + step), use_reentrant=False, preserve_rng_state=False) if again
                     else chunk(a, min(T, a + step)) for a in range(0, T, step)]
            out = torch.cat(parts, 3).flatten(1, 2)
            return rotate(out, places[:, before:], self.turns(self.n_heads, q.device)).to(q.dtype)


def _held(value: float, n: int) -> nn.Parameter:
    """n parameters whose softplus is `value`."""
    return nn.Parameter(torch.full((n,), math.log(math.expm1(value))))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check_times(held: KVState) -> None:
    """`Refused` where a token stands before an earlier one of its document."""
    assert held.places is not None
    times = held.places.double()
    if held.segments is not None:  # a later document starts again: lifted above all that came before
        times = times + held.segments * (times.max() - times.min() + 1.0)
    if held.valid is not None:
        times = times.masked_fill(~held.valid, -math.inf)
    back = times < times.cummax(-1).values
    back = back if held.valid is None else back & held.valid
    if bool(back.any()):
        row, token = back.nonzero()[0].tolist()
        raise Refused(f"rfa: token {token} of row {row} stands at {held.places[row, token].item()}, before an earlier one; "
                      "expected times that don't decrease within a document, and segments where documents share a row.")


@method("rfa", kind="mixer", system="rfa", paper="arXiv:2509.04154", capabilities=("trains",),
        summary="Attention as a robust filter: keys and values carried to the query's time, weighed by precision.")
class RFA(Mixer):
    """Robust filter attention, which knows positions as times. `head_dim` counts complex channels."""

    b: float | None = knob(None, "SC-RFA: decay over a head's fastest rotation, such as 0.05 or 5.0; None: RFA", low=0.0)
    weight: str = knob("student", "likelihood of a disagreement", choices=("student", "exponential"))
    length: int = knob(512, "tokens trained at, which RFA's decays are measured in", low=2)
    s2: float = knob(0.1, "variance of the state's own noise at the start", low=1e-6)
    gamma2_floor: float = knob(1e-2, "least variance of a pair")

    positions: ClassVar[frozenset[str]] = frozenset()

    def check(self) -> None:
        if self.gamma2_floor <= 0.0:
            raise Refused(f"rfa(gamma2_floor={self.gamma2_floor!r}): a pair without variance weighs infinitely much; expected "
                          "more than 0, such as 0.01.")

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> RobustFilterAttention:
        return RobustFilterAttention(self, dim, n_heads, n_kv_heads, head_dim)
