"""GOAT: softmax attention with a learned prior over positions, carried inside the dot product.

Attention of one query solves a transport problem, max_p <p,s> - KL(p || pi), whose answer is p = softmax(s + log pi)
(arXiv:2601.15380); plain softmax has the uniform prior. Here the log-prior of a key head is learned,

    K(i,j) = sum_r A_r cos(w_r (i-j)) + B_r sin(w_r (i-j)) + u(j)
    u(j)   = gain f(phi(j)) + bump [j = 0] + softplus(rho) j

with frequencies w_r from 1 down to 1e-4, a tiny network f of the key's place, a term for the first key (a sink that needs
no large-norm key) and a slope (the recency of ALiBi, up to a constant of the row). K(i,j) is a product of features of i
and of j, so 2R + 1 channels of every head carry it and any fused kernel applies:

    q^ = [ q / sqrt(d_c), A cos(w i) + B sin(w i), A sin(w i) - B cos(w i), 1 ],   k^ = [ k, cos(w j), sin(w j), u(j) ]

Content has the other d_c channels, and no rotary positions unless asked for. Values keep all channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Real
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
_NO_DECAY: Mapping[str, Any] = {"weight_decay": 0.0}


def frequencies(n: int, device: torch.device | str | None = None) -> Float[Tensor, " n"]:
    """n frequencies from 1 down to 1e-4, in float64: BASE^(-r / max(n - 1, 1))."""
    steps = torch.arange(n, dtype=torch.float64, device=device)
    return BASE ** (-steps / max(n - 1, 1))


def waves(places: Real[Tensor, "*shape"], n: int) -> tuple[Float[Tensor, "*shape n"], Float[Tensor, "*shape n"]]:
    """Cosine and sine of `n` frequencies at these places, in float32, with angles in float64."""
    angles = places.double()[..., None] * frequencies(n, places.device)
    return angles.cos().float(), angles.sin().float()


class PositionPrior(nn.Module):
    """The log-prior K(i,j) of each key head, as features of queries and keys. Weights and results are float32."""

    def __init__(self, knobs: Goat, n_kv_heads: int):
        super().__init__()
        G, R, M = n_kv_heads, knobs.R, knobs.M
        self.R, self.M, self.length = R, M, knobs.length
        self.cosine, self.sine = nn.Parameter(torch.zeros(G, R)), nn.Parameter(torch.zeros(G, R))
        if knobs.key_term:
            self.network = nn.Sequential(nn.Linear(2 * M + 2, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))
            self.gain, self.bump = nn.Parameter(torch.ones(G)), nn.Parameter(torch.zeros(G))
            self.slope = nn.Parameter(torch.full((G,), FLAT_SLOPE))
        self.key_term = knobs.key_term
        self._initialise(knobs.init, G)

    @torch.no_grad()
    def _initialise(self, init: str, n_heads: int) -> None:
        if init == "seeded":
            self.cosine.normal_(std=SEEDED_STD)
        if not self.key_term:
            return
        for layer in (self.network[0], self.network[2]):
            layer.weight.normal_(std=NETWORK_STD)  # type: ignore[operator, union-attr]
            layer.bias.zero_()  # type: ignore[operator, union-attr]
        if init == "seeded":
            self.slope.copy_(slopes(n_heads).expm1().log())  # softplus of it is ALiBi's slope
        else:
            self.network[2].weight.zero_()  # type: ignore[operator]

    def of_keys(self, places: Int[Tensor, "B T"], *, centred: bool = False) -> Float[Tensor, "B G T P"]:
        """cos(w j), sin(w j) and u(j). `centred` takes slope * length from u, a constant of every row of scores, so that u
        stays small where few digits are left."""
        cos, sin = (t[:, None].expand(-1, len(self.cosine), -1, -1) for t in waves(places, self.R))
        if not self.key_term:
            return torch.cat((cos, sin), -1)
        return torch.cat((cos, sin, self.of_place(places, centred)[..., None]), -1)

    def of_place(self, places: Int[Tensor, "B T"], centred: bool = False) -> Float[Tensor, "B G T"]:
        """u(j) of each key head."""
        j = places.float()
        cos, sin = waves(places, self.M)
        share = (j / self.length)[..., None], (j.log1p() / math.log1p(self.length))[..., None]
        learned = self.network(torch.cat((cos, sin, *share), -1))[..., 0]
        first, along = (places == 0).float(), j - self.length if centred else j
        gain, bump, slope = (t[:, None] for t in (self.gain, self.bump, F.softplus(self.slope)))
        return gain * learned[:, None] + bump * first[:, None] + slope * along[:, None]

    def of_queries(self, places: Int[Tensor, "B T"], group: int) -> Float[Tensor, "B H T P"]:
        """A cos + B sin, A sin - B cos, and 1, of every query head; `group` of them share a key head."""
        cos, sin = (t[:, None] for t in waves(places, self.R))
        a, b = self.cosine[:, None], self.sine[:, None]
        lanes = [a * cos + b * sin, a * sin - b * cos]
        if self.key_term:
            lanes.append(torch.ones_like(lanes[0][..., :1]) if self.R else cos.new_ones(*cos.shape[:1], len(a), cos.shape[2], 1))
        return torch.cat(lanes, -1).repeat_interleave(group, 1)

    def log_prior(self, queries: Int[Tensor, "B T"], keys: Int[Tensor, "B S"]) -> Float[Tensor, "B G T S"]:
        """K(i,j) written out, pair by pair; what the factored form is compared with."""
        lag = (queries[:, :, None] - keys[:, None, :])
        cos, sin = waves(lag, self.R)
        relative = (self.cosine[:, None, None] * cos[:, None] + self.sine[:, None, None] * sin[:, None]).sum(-1)
        return relative + self.of_place(keys)[:, :, None] if self.key_term else relative


class GoatAttention(AttentionModule):
    """Softmax attention over [content, prior] channels with scale 1."""

    optimiser_settings = {"gate_slope": _NO_DECAY, "gate_open": _NO_DECAY}

    def __init__(self, knobs: Goat, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        super().__init__(dim, n_heads, n_kv_heads, head_dim)
        self.content = knobs.content(head_dim)
        self.q_proj = nn.Linear(dim, n_heads * self.content, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.content, bias=False)
        self.prior = PositionPrior(knobs, n_kv_heads)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(layer.weight)
        if knobs.gate == "content":
            self.gate_slope = nn.Parameter(torch.full((n_heads,), GATE_SLOPE))
            self.gate_open = nn.Parameter(torch.full((n_heads,), GATE_OPEN))
        self.gated = knobs.gate == "content"

    def project(self, x: Float[Tensor, "B T C"], ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        heads = [p(x).unflatten(-1, (n, -1)).transpose(1, 2) for p, n in (
            (self.q_proj, self.n_heads), (self.k_proj, self.n_kv_heads), (self.v_proj, self.n_kv_heads))]
        return heads[0], heads[1], heads[2]

    def turned(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], ctx: Context) -> tuple[Tensor, Tensor]:
        """Content followed by the prior's channels."""
        with torch.autocast(q.device.type, enabled=False):
            places, half = ctx.positions, q.dtype in (torch.float16, torch.bfloat16)
            of_queries = self.prior.of_queries(places, self.n_heads // self.n_kv_heads)
            if self.gated:
                norm = q.float().norm(dim=-1, keepdim=True)
                slope, open_ = F.softplus(self.gate_slope)[:, None, None], self.gate_open[:, None, None]
                of_queries = of_queries * (open_ - slope * norm).sigmoid()
            of_keys = self.prior.of_keys(places, centred=half)
        # Rows that share their places are one line of features, spread over the batch.
        of_queries, of_keys = (t.to(q.dtype).expand(len(q), -1, -1, -1) for t in (of_queries, of_keys))
        return torch.cat((q * self.content**-0.5, of_queries), -1), torch.cat((k, of_keys), -1)

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        return attend(q, held.k, held.v, scale=1.0, causal=visible.mask is None, mask=visible.mask, return_lse=False)[0]


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
