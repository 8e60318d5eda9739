"""Linear attention: a memory matrix that every token adds its key-value pair to, and every query reads.

Per key head, with features phi(k) in R^m, values v in R^e and a decay a_t in (0, 1] (1 unless gated),

    S_t = a_t S_{t-1} + v_t phi(k_t)^T,     o_t = S_t phi(q_t)

(Katharopoulos et al., arXiv:2006.16236; with a gate it is the scalar-decay form of Mamba-2, arXiv:2405.21060).
Unrolled, o_i = sum_{j<=i} (prod_{m=j+1..i} a_m) (phi(q_i).phi(k_j)) v_j. Three pure functions compute the same thing:
`linear_loop` token by token, `linear_quadratic` all pairs at once, `linear_chunked` pairs inside chunks and the matrix
between them. Normalised, the output is divided by sum_j of the same weights, kept as one more row of S for the value 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longspan.layers.base import Mixer, MixerModule
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import Refused, knob, method

FEATURES = {"elu": lambda x: F.elu(x) + 1.0, "relu": F.relu, "identity": lambda x: x}
EPS = 1e-6


def linear_loop(
    q: Float[Tensor, "B H T M"],
    k: Float[Tensor, "B G T M"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "B G T"] | None = None,
    memory: Float[Tensor, "B G E M"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B G E M"]]:
    """The recurrence as written, one token after the other: (outputs, memory after the last token).

    `starts` clears the memory before a token. Query head h reads the memory of key head h // (H/G).
    """
    memory = _fresh(k, v) if memory is None else memory
    outputs = []
    for t in range(q.shape[2]):
        if starts is not None:
            memory = memory.masked_fill(starts[:, t, None, None, None], 0.0)
        if log_decay is not None:
            memory = memory * log_decay[:, :, t, None, None].exp()
        memory = memory + v[:, :, t, :, None] * k[:, :, t, None, :]
        outputs.append(_read(q[:, :, t : t + 1], memory))
    return torch.cat(outputs, 2) if outputs else q.new_zeros(*q.shape[:3], v.shape[-1]), memory


def linear_quadratic(
    q: Float[Tensor, "B H T M"],
    k: Float[Tensor, "B G T M"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "B G T"] | None = None,
    memory: Float[Tensor, "B G E M"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B G E M"]]:
    """The same from all pairs (i, j) of the call at once, plus one read and one update of the memory."""
    B, G, T = k.shape[:3]
    memory = _fresh(k, v) if memory is None else memory
    if not T:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), memory
    decay = k.new_zeros(B, G, T) if log_decay is None else log_decay.cumsum(-1)
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()[None, None]
    if starts is not None:
        document = starts.cumsum(1)  # 0: still the document that the memory belongs to
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])
    # weight[i, j] = product of the decays after j up to i; masked before exp, which would explode above the diagonal.
    weight = (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen, -math.inf).exp()
    grouped = q.reshape(B, G, -1, T, q.shape[-1])
    own = ((grouped @ k[:, :, None].mT) * weight[:, :, None]) @ v[:, :, None]
    carried, kept, last = decay.exp(), weight[..., -1, :], decay[..., -1].exp()
    if starts is not None:
        carried = carried * (document == 0)[:, None]
        last = last * (document[:, -1] == 0)[:, None]
    past = (grouped @ memory[:, :, None].mT) * carried[:, :, None, :, None]
    memory = last[..., None, None] * memory + (v * kept[..., None]).mT @ k
    return (own + past).reshape(B, -1, T, v.shape[-1]), memory


def linear_chunked(
    q: Float[Tensor, "B H T M"],
    k: Float[Tensor, "B G T M"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "B G T"] | None = None,
    memory: Float[Tensor, "B G E M"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
    chunk: int = 64,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B G E M"]]:
    """The same in chunks of `chunk` tokens: quadratic inside, linear in the length; the last may be shorter."""
    memory = _fresh(k, v) if memory is None else memory
    outputs = []
    for a in range(0, q.shape[2], chunk):
        part = slice(a, a + chunk)
        out, memory = linear_quadratic(
            q[:, :, part],
            k[:, :, part],
            v[:, :, part],
            None if log_decay is None else log_decay[:, :, part],
            memory,
            None if starts is None else starts[:, part],
        )
        outputs.append(out)
    return torch.cat(outputs, 2) if outputs else q.new_zeros(*q.shape[:3], v.shape[-1]), memory


def _fresh(k: Tensor, v: Tensor) -> Tensor:
    return k.new_zeros(*k.shape[:2], v.shape[-1], k.shape[-1])


def _read(q: Tensor, memory: Tensor) -> Tensor:
    """(B,H,T,M) queries on (B,G,E,M) memories: (B,H,T,E)."""
    B, G = memory.shape[:2]
    grouped = q.reshape(B, G, -1, *q.shape[2:])
    return (grouped @ memory[:, :, None].mT).reshape(*q.shape[:3], -1)


@dataclass(eq=False)
class LinearState(MixerState):
    """The memory matrix; its size doesn't depend on how much was read."""

    memory: Float[Tensor, "B G E M"]


class LinearModule(MixerModule):
    """Projections, features, decay gate and output around the recurrence; the memory is float32 at least."""

    optimiser_settings = {"log_rate": {"weight_decay": 0.0}, "rate_bias": {"weight_decay": 0.0}}

    def __init__(self, knobs: LinearAttention, dim: int, n_heads: int, n_kv_heads: int, head_dim: int):
        super().__init__()
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise Refused(f"n_kv_heads={n_kv_heads}: expected a divisor of the {n_heads} query heads.")
        self.knobs, self.head_dim = knobs, head_dim
        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=False)
        if not knobs.normalise:
            self.norm_weight = nn.Parameter(torch.ones(head_dim))
        if knobs.gated:
            self.rate_proj = nn.Linear(dim, n_kv_heads, bias=False)
            # Time constants spread from 2 to 1,000 tokens over the heads, as log a = -exp(log_rate) softplus(W x + b).
            self.log_rate = nn.Parameter(torch.zeros(n_kv_heads))
            rates = torch.logspace(math.log10(0.5), -3.0, n_kv_heads)
            self.rate_bias = nn.Parameter(rates.expm1().log())

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], LinearState]:
        assert state is None or isinstance(state, LinearState)
        B, T = x.shape[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k, v = (p(x).view(B, T, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        rate = self.rate_proj(x) if self.knobs.gated else None
        with torch.autocast(x.device.type, enabled=False):
            phi = FEATURES[self.knobs.feature]
            q, k, v = phi(q.to(wide)) * self.head_dim**-0.5, phi(k.to(wide)), v.to(wide)
            if self.knobs.normalise:
                v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
            log_decay = None if rate is None else self._log_decay(rate.to(wide))
            if ctx.valid is not None:  # a padded token writes nothing and lets nothing fade
                k = k.masked_fill(~ctx.valid[:, None, :, None], 0.0)
                log_decay = None if log_decay is None else log_decay.masked_fill(~ctx.valid[:, None], 0.0)
            memory = None if state is None else state.memory
            if T == 1:
                out, memory = linear_loop(q, k, v, log_decay, memory, ctx.starts)
            else:
                out, memory = linear_chunked(q, k, v, log_decay, memory, ctx.starts, self.knobs.chunk)
            out = self._scaled(out)
            if ctx.valid is not None:
                out = out.masked_fill(~ctx.valid[:, None, :, None], 0.0)
        return self.o_proj(out.transpose(1, 2).flatten(2).to(x.dtype)), LinearState(memory)

    def _scaled(self, out: Float[Tensor, "B H T E"]) -> Float[Tensor, "B H T D"]:
        """Divided by the sum of the weights (the last row), or brought to unit root mean square."""
        if self.knobs.normalise:
            return out[..., :-1] / out[..., -1:].clamp(min=EPS)
        return F.rms_norm(out, (self.head_dim,), self.norm_weight.to(out.dtype), EPS)

    def _log_decay(self, rate: Float[Tensor, "B T G"]) -> Float[Tensor, "B G T"]:
        return (-self.log_rate.exp() * F.softplus(rate + self.rate_bias)).transpose(1, 2)


@method("linear-attention", kind="mixer", paper="arXiv:2006.16236", capabilities=("trains",),
        summary="A memory matrix per key head that every token adds to; constant memory at any length.")
class LinearAttention(Mixer):
    """Causal linear attention, with a data-dependent decay if gated; reads in any cut give the same result."""

    feature: str = knob("elu", "feature map of queries and keys (elu means elu + 1)", choices=tuple(FEATURES))
    normalise: bool = knob(True, "divide by the sum of the weights; otherwise RMS-normalise each head's output")
    gated: bool = knob(False, "let each token fade the memory by a learned factor")
    chunk: int = knob(64, "tokens read at once while training and prefilling", low=1)
    positions = frozenset()

    def check(self) -> None:
        if self.normalise and self.feature == "identity":
            raise Refused(
                "linear-attention(feature='identity', normalise=True): the weights may cancel, so their sum can't "
                "divide; expected normalise=False or feature='elu'."
            )

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> LinearModule:
        return LinearModule(self, dim, n_heads, n_kv_heads, head_dim)
