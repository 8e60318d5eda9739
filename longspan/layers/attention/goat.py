"""GOAT: softmax attention with a learned prior over positions, carried inside the dot product.

Attention of one query solves a transport problem, max_p <p,s> - KL(p || pi), whose answer is p = softmax(s + log pi)
(arXiv:2601.15380); plain softmax has the uniform prior. Here the log-prior of a key head is learned,

    K(i,j) = sum_r A_r cos(w_r (i-j)) + B_r sin(w_r (i-j)) + u(j)
    u(j)   = gain f(phi(j)) + bump [j = 0] + softplus(rho) j

with frequencies w_r from 1 down to 1e-4, a tiny network f of the key's place, a term for the first key (a sink that needs
no large-norm key) and a slope (the recency of ALiBi, up to a constant of the row). K(i,j) is a product of features of i
and of j, so 2R + 1 channels of every head carry it and any fused kernel applies:

    q^ = [ q / sqrt(d_c), A cos(w i) + B sin(w i), A sin(w i) - B cos(w i), 1 ],   k^ = [ k, cos(w j), sin(w j), u(j) ]

Content has the other d_c channels, and no rotary positions unless asked for. Values keep all channels. In half precision
the last lane, which grows with j, is carried as three numbers that add up to u(j) in full.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Real
from torch import Tensor, nn

from longspan.kernels import attend
from longspan.layers.attention.base import AttentionModule, KVState, Visible
from longspan.layers.base import Mixer
from longspan.layers.context import Context
from longspan.layers.positions.base import slopes
from longspan.registry import Refused, knob, method

BASE = 10_000.0
HIDDEN = 4
"""Width of the network of the key's place."""
SEEDED_STD, NETWORK_STD, FLAT_SLOPE = 1e-2, 1e-3, -30.0
GATE_SLOPE, GATE_OPEN = -10.0, 10.0
HALF = (torch.float16, torch.bfloat16)
PARTS, UNIT = 3, 256.0
"""In half precision u(j) is this many lanes, of u / UNIT: three times 8 bits and more, within float16 up to 16 million."""


def frequencies(n: int, device: torch.device | str | None = None) -> Float[Tensor, " n"]:
    """n frequencies from 1 down to 1e-4, in float64: BASE^(-r / max(n - 1, 1))."""
    steps = torch.arange(n, dtype=torch.float64, device=device)
    return BASE ** (-steps / max(n - 1, 1))


def waves(
    places: Real[Tensor, "*shape"], n: int, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "*shape n"], Float[Tensor, "*shape n"]]:
    """Cosine and sine of `n` frequencies at these places, with angles in float64."""
    angles = places.double()[..., None] * frequencies(n, places.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def split(x: Float[Tensor, "*shape"], dtype: torch.dtype, parts: int) -> Float[Tensor, "*shape parts"]:
    """Numbers of `dtype` that add up to `x`, the largest first; the gradient goes through the first."""
    found = []
    for _ in range(parts):
        found.append(x.to(dtype))
        x = x - found[-1].to(x.dtype)
    return torch.stack(found, -1)


class PositionPrior(nn.Module):
    """The log-prior K(i,j) of each key head, as lanes of queries and keys. Computed in float32, float64 for such weights."""

    optimiser_settings = {"cosine": {"weight_decay": 0.0}, "sine": {"weight_decay": 0.0}}

    def __init__(self, knobs: Goat, n_kv_heads: int):
        super().__init__()
        G, R, M = n_kv_heads, knobs.R, knobs.M
        self.R, self.M, self.length, self.key_term = R, M, knobs.length, knobs.key_term
        self.scale = 1.0
        """Multiplies u(j); not trained. Less than 1 while a model warms up."""
        self.cosine, self.sine = nn.Parameter(torch.zeros(G, R)), nn.Parameter(torch.zeros(G, R))
        if knobs.key_term:
            self.inner, self.outer = nn.Linear(2 * M + 2, HIDDEN), nn.Linear(HIDDEN, 1)
            self.gain, self.bump = nn.Parameter(torch.ones(G)), nn.Parameter(torch.zeros(G))
            self.slope = nn.Parameter(torch.full((G,), FLAT_SLOPE))
        self._initialise(knobs.init)

    @torch.no_grad()
    def _initialise(self, init: str) -> None:
        seeded = init == "seeded"
        if seeded:
            self.cosine.normal_(std=SEEDED_STD)
        if not self.key_term:
            return
        for layer in (self.inner, self.outer):
            layer.weight.normal_(std=NETWORK_STD)
            layer.bias.zero_()
        if seeded:
            self.slope.copy_(slopes(len(self.slope)).expm1().log())  # softplus of it is ALiBi's slope
        else:
            self.outer.weight.zero_()

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.cosine.dtype, torch.float32)

    def lanes(self, dtype: torch.dtype) -> int:
        """Channels of queries and keys of this dtype that carry the prior."""
        return 2 * self.R + (PARTS if dtype in HALF else 1) * self.key_term

    def of_keys(self, places: Real[Tensor, "B T"], dtype: torch.dtype) -> Float[Tensor, "B G T P"]:
        """cos(w j), sin(w j) and u(j)."""
        found = [t.to(dtype)[:, None].expand(-1, len(self.cosine), -1, -1) for t in waves(places, self.R)]
        if self.key_term:
            u = self.of_place(places)
            found.append(split(u / UNIT, dtype, PARTS) if dtype in HALF else u[..., None].to(dtype))
        return torch.cat(found, -1)

    def of_queries(
        self, places: Real[Tensor, "B T"], group: int, dtype: torch.dtype, gate: Float[Tensor, "B H T 1"] | None = None
    ) -> Float[Tensor, "B H T P"]:
        """A cos + B sin, A sin - B cos, and 1, of every query head, times `gate`; `group` of them share a key head."""
        cos, sin = (t[:, None] for t in waves(places, self.R, self.wide))
        a, b = (t.to(self.wide)[:, None] for t in (self.cosine, self.sine))
        found = [a * cos + b * sin, a * sin - b * cos]
        if self.key_term:
            one = cos.new_full((*found[0].shape[:3], PARTS), UNIT) if dtype in HALF else cos.new_ones(*found[0].shape[:3], 1)
            found.append(one)
        lanes = torch.cat(found, -1).repeat_interleave(group, 1)
        return (lanes if gate is None else lanes * gate).to(dtype)

    def of_place(self, places: Real[Tensor, "B T"]) -> Float[Tensor, "B G T"]:
        """u(j) of each key head."""
        wide, j = self.wide, places.to(self.wide)
        share = (j / self.length)[..., None], (j.log1p() / math.log1p(self.length))[..., None]
        features = torch.cat((*waves(places, self.M, wide), *share), -1)
        for layer in (self.inner, self.outer):  # in float32 even where the model's weights aren't
            features = F.linear(features, layer.weight.to(wide), layer.bias.to(wide))
            features = F.silu(features) if layer is self.inner else features
        gain, bump, slope = (t.to(wide)[:, None] for t in (self.gain, self.bump, F.softplus(self.slope.to(wide))))
        first = (places == 0).to(wide)
        return self.scale * (gain * features[:, None, :, 0] + bump * first[:, None] + slope * j[:, None])

    def log_prior(self, queries: Real[Tensor, "B T"], keys: Real[Tensor, "B S"]) -> Float[Tensor, "B G T S"]:
        """K(i,j) written out, pair by pair; what the factored form is compared with."""
        cos, sin = (t[:, None] for t in waves(queries[:, :, None] - keys[:, None, :], self.R, self.wide))
        relative = (self.cosine[:, None, None] * cos + self.sine[:, None, None] * sin).sum(-1)
        return relative + self.of_place(keys)[:, :, None] if self.key_term else relative


class GoatAttention(AttentionModule):
    """Softmax attention over [content, prior] channels with scale 1.

    The projections start like every other mixer's here.
    """

    def __init__(self, knobs: Goat, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        super().__init__(dim, n_heads, n_kv_heads, head_dim)
        self.content = knobs.content(head_dim)
        self.q_proj = nn.Linear(dim, n_heads * self.content, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.content, bias=False)
        self.prior = PositionPrior(knobs, n_kv_heads)
        self.gated = knobs.gate == "content"
        if self.gated:
            self.gate_slope = nn.Parameter(torch.full((n_heads,), GATE_SLOPE))
            self.gate_open = nn.Parameter(torch.full((n_heads,), GATE_OPEN))

    def read(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: KVState | None
    ) -> tuple[Float[Tensor, "B H T D"], KVState, Float[Tensor, "#B #H T S"] | None]:
        if state is not None:
            width = self.content + self.prior.lanes(state.k.dtype)
            heads = self.n_heads if ctx.position.per_query_head else self.n_kv_heads
            if (state.k.shape[1], state.k.shape[3]) != (heads, width):
                raise ValueError(f"keys held should be (B, {heads}, S, {width}), got {tuple(state.k.shape)}")
        return super().read(x, ctx, state)

    def project(self, x: Float[Tensor, "B T C"], ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        parts = ((self.q_proj, self.n_heads), (self.k_proj, self.n_kv_heads), (self.v_proj, self.n_kv_heads))
        q, k, v = (p(x).unflatten(-1, (n, -1)).transpose(1, 2) for p, n in parts)
        # Fused kernels want values as wide as keys, which have further lanes in half precision.
        return q, k, F.pad(v, (0, self.prior.lanes(v.dtype) - self.prior.lanes(torch.float32)))

    def turned(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], ctx: Context) -> tuple[Tensor, Tensor]:
        """Content followed by the prior's lanes."""
        # Rows that share their places are one line of lanes, spread over the batch.
        places = ctx.positions[:1] if ctx.positions.stride(0) == 0 else ctx.positions
        with torch.autocast(q.device.type, enabled=False):
            gate = self._gate(q) if self.gated else None
            of_queries = self.prior.of_queries(places, self.n_heads // self.n_kv_heads, q.dtype, gate)
            of_keys = self.prior.of_keys(places, k.dtype).repeat_interleave(k.shape[1] // self.n_kv_heads, 1)
        of_queries, of_keys = (t.expand(len(q), -1, -1, -1) for t in (of_queries, of_keys))
        return torch.cat((q * self.content**-0.5, of_queries), -1), torch.cat((k, of_keys), -1)

    def _gate(self, q: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T 1"]:
        """sigmoid(b - softplus(a) |q|): the prior fades where the content is strong."""
        wide = self.prior.wide
        slope, open_ = F.softplus(self.gate_slope.to(wide))[:, None, None], self.gate_open.to(wide)[:, None, None]
        return (open_ - slope * q.to(wide).norm(dim=-1, keepdim=True)).sigmoid()

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        out, _ = attend(q, held.k, held.v, scale=1.0, causal=visible.mask is None, mask=visible.mask, return_lse=False)
        return out[..., : self.head_dim]


@method("goat", kind="mixer", system="goat", paper="arXiv:2601.15380", capabilities=("trains",),
        summary="Softmax attention with a learned prior over positions inside the dot product.")
class Goat(Mixer):
    """A few channels of each head carry a trainable log-prior: waves of the distance, a sink and a slope."""

    R: int = knob(4, "frequencies of the distance; two channels each", low=0)
    M: int = knob(4, "frequencies of the key's place", low=0)
    key_term: bool = knob(True, "let the prior depend on the key's place too; one channel")
    init: str = knob("seeded", "start like ALiBi, or with a uniform prior", choices=("seeded", "uniform"))
    gate: str = knob("none", "let the prior fade where the query's content is strong", choices=("none", "content"))
    length: int = knob(2048, "tokens trained at: the unit in which the key's place is measured", low=1)

    positions: ClassVar[frozenset[str]] = frozenset({"rotate"})
    usual_position: ClassVar[str | None] = "nope"

    def content(self, head_dim: int) -> int:
        """Channels left for content. `Refused` when there are none."""
        needed = 2 * self.R + self.key_term
        if head_dim <= needed:
            most = (head_dim - 1 - self.key_term) // 2
            fits = f"R={most} or less" if most >= 0 else "wider heads"
            raise Refused(f"{self}: a head of {head_dim} channels is too small for a prior of {needed}; expected {fits}.")
        return head_dim - needed

    def rotated(self, head_dim: int) -> int:
        return self.content(head_dim) // 2 * 2

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> GoatAttention:
        return GoatAttention(self, dim, n_heads, n_kv_heads, head_dim)
