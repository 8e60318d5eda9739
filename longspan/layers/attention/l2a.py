"""L2A, learning to attend: local attention for every token, full attention for those that a router lets through.

Each layer has two attentions, one after the other (arXiv:2603.17484). The first sees a sliding window. The second sees
everything, and has a norm and projections of its own:

    s = Local(norm(x));   x <- x + s
    u = norm_global(x);   z = w_r . u;   p = sigmoid(z / T);   m = 1[p >= theta]
    x <- x + o_global(m * a),   a = Global(u)

In training the gate m has the gradient of p (straight through), so that the router learns from the tokens that fire.
Queries with m = 0 are never computed (`attend_rows`); with probability `leak` a layer computes them all the same, which
changes no value but lets skipped tokens, too, tell the router whether they should have looked. Keys and values of the
second attention are kept for all tokens, since a later one may need them; those of the first only within the window.

As a mixer the module returns s + o_global(m * a), what both attentions add to the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longspan.kernels import attend_rows
from longspan.layers.attention.base import AttentionModule, KVState, who_sees_whom
from longspan.layers.attention.softmax import SoftmaxAttention
from longspan.layers.base import Mixer, MixerModule
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import Refused, knob, method

OPEN, FIRES = "l2a-open", "l2a-fires"
"""What each layer reports of its tokens (B,T): the soft gate p, and the hard gate m (padding 0)."""
IMPLEMENTATIONS = ("sparse", "dense")


@dataclass(eq=False)
class L2AState(MixerState):
    """The last window of the local attention, and all keys and values of the global one (None where it was pruned)."""

    local: KVState
    everything: KVState | None


# ------------------------------------------------------------------------------------------------------------- the gate


def threshold(temperature: float, theta: float) -> float:
    """The router logit at which a token fires: sigmoid(z/T) >= theta exactly where z >= T ln(theta / (1 - theta))."""
    return temperature * math.log(theta / (1.0 - theta))


@dataclass(frozen=True, eq=False)
class Gate:
    """The router's verdict on the tokens of a call; padding never fires."""

    p: Float[Tensor, "B T"]
    """The soft gate, float32 at least."""
    m: Bool[Tensor, "B T"]

    def straight_through(self) -> Float[Tensor, "B T"]:
        """m in value, p in gradient: the difference added to m is exactly 0."""
        return self.m.to(self.p.dtype) + (self.p - self.p.detach())


def open_gate(
    z: Float[Tensor, "B T"], temperature: float, theta: float, valid: Bool[Tensor, "B T"] | None = None
) -> Gate:
    """The gate of router logits `z`. Raises `Refused` when one is NaN, ValueError when shapes don't fit."""
    if valid is not None and valid.shape != z.shape:
        raise ValueError(f"router logits {tuple(z.shape)} don't fit the tokens {tuple(valid.shape)}")
    if bool(z.isnan().any()):
        raise Refused(f"{int(z.isnan().sum())} router logits are NaN; expected numbers: lower the learning rate, or load "
                      "weights that are whole.")
    m = z >= threshold(temperature, theta)
    return Gate((z / temperature).sigmoid(), m if valid is None else m & valid)


# ------------------------------------------------------------------------------------------------------------- modules


class GlobalAttention(AttentionModule):
    """Full causal attention of which only the tokens with an open gate take part as queries."""

    def gated(
        self, u: Float[Tensor, "B T C"], ctx: Context, state: KVState | None, gate: Gate, *, all_rows: bool, leak: bool
    ) -> tuple[Float[Tensor, "B T C"], KVState]:
        """o(m * a), and the keys and values held afterwards.

        With `all_rows` every query is computed; with `leak`, those of closed gates also send the router a gradient.
        Raises ValueError when the gate doesn't fit the tokens.
        """
        if gate.m.shape != u.shape[:2]:
            raise ValueError(f"the gate {tuple(gate.m.shape)} doesn't fit the tokens {tuple(u.shape[:2])}")
        q, held, bias = self.read(u, ctx, state)
        rows = torch.ones_like(gate.m) if all_rows else gate.m
        out = attend_rows(q, held.k, held.v, rows, mask=who_sees_whom(held, u.shape[1], None).mask, bias=bias)
        weight = gate.straight_through() if self.training else gate.m
        if all_rows and not leak:
            out = out.masked_fill(~gate.m[:, None, :, None], 0.0)
        return self.output(out * weight[:, None, :, None].to(out.dtype), u), held


class L2AModule(MixerModule):
    """Local attention and gated global attention of one layer, and the router between them."""

    def __init__(self, local: SoftmaxAttention, norm: nn.Module, everything: GlobalAttention, dim: int, method: Any):
        super().__init__()
        self.method = method
        self.local = local
        self.norm: nn.Module | None = norm
        self.everything: GlobalAttention | None = everything
        self.router: nn.Linear | None = nn.Linear(dim, 1, bias=False)
        nn.init.zeros_(self.router.weight)
        setattr(self.router, "optimiser_settings", {"weight": {"lr_scale": getattr(method, "router_lr", 1.0)}})  # noqa: B010

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], L2AState]:
        """`x` is the normalised input; the second attention reads ``ctx.residual`` plus what the first adds."""
        assert state is None or isinstance(state, L2AState)
        added, local = self.local(x, ctx, None if state is None else state.local)
        if self.everything is None:
            return added, L2AState(local, None)
        if ctx.residual is None:
            raise ValueError("l2a reads the residual stream; the layer should put it into ctx.residual")
        assert self.norm is not None
        u = self.norm(ctx.residual + added)
        gate = self.gate(u, ctx)
        leak = self.training and bool(torch.rand(()) < self.method.leak)
        held = None if state is None else state.everything
        dense = self.method.implementation == "dense"
        more, held = self.everything.gated(u, ctx, held, gate, all_rows=dense or leak, leak=leak)
        return added + more, L2AState(local, held)

    def gate(self, u: Float[Tensor, "B T C"], ctx: Context) -> Gate:
        """Whether each token looks back, from the second attention's normalised input; reported to the objective."""
        assert self.router is not None
        wide = torch.promote_types(u.dtype, torch.float32)
        z = (u.to(wide) * self.router.weight[0].to(wide)).sum(-1)
        gate = open_gate(z, self.method.temperature, self.method.theta, ctx.valid)
        ctx.report(OPEN, gate.p)
        ctx.report(FIRES, gate.m)
        return gate

    def prune(self) -> None:
        """Drop the global path: weights, and from now on its keys and values."""
        self.norm = self.everything = self.router = None


def prune(modules: Sequence[L2AModule], layers: Sequence[int], *, allow_local_only: bool = False) -> None:
    """Drop the global path of some of a model's layers.

    Raises `Refused` for a layer that isn't there, and when no layer would keep a global path unless `allow_local_only`.
    """
    for layer in layers:
        if not 0 <= layer < len(modules):
            raise Refused(f"layer {layer}: expected layers from 0 to {len(modules) - 1}.")
    left = [i for i, module in enumerate(modules) if module.everything is not None and i not in layers]
    if not left and not allow_local_only:
        raise Refused(f"pruning layers {sorted(layers)} leaves no layer with global attention; expected at least one, or "
                      "allow_local_only=True.")
    for layer in layers:
        modules[layer].prune()


@method("l2a", kind="mixer", system="l2a", paper="arXiv:2603.17484", capabilities=("trains",),
        summary="Sliding-window attention, then full attention for the tokens that a router lets through.")
class L2A(Mixer):
    """Two attentions a layer; train with ``--objective l2a-next-token`` so that most tokens learn to skip the second."""

    window: int = knob(128, "tokens the first attention sees, the query's included", low=1)
    temperature: float = knob(0.1, "T of the soft gate sigmoid(z/T)", low=0.0)
    theta: float = knob(0.5, "soft gate from which a token fires", low=0.0, high=1.0)
    leak: float = knob(0.1, "probability, per layer and step, that skipped tokens train the router too", low=0.0, high=1.0)
    implementation: str = knob("sparse", "compute the firing queries, or all and mask", choices=IMPLEMENTATIONS)
    router_lr: float = knob(1.0, "learning rate of the router, as a share of the others'", low=0.0)

    def check(self) -> None:
        check_gate(self.temperature, self.theta)

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> L2AModule:
        shape = (dim, n_heads, n_kv_heads, head_dim)
        return L2AModule(SoftmaxAttention(*shape, self.window), nn.RMSNorm(dim, eps=1e-6), GlobalAttention(*shape), dim, self)


def check_gate(temperature: float, theta: float) -> None:
    """Refuse what no gate can be made of."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise Refused(f"temperature={temperature}: expected a number above 0, such as 0.1.")
    if not 0.0 < theta < 1.0:
        raise Refused(f"theta={theta}: expected a share between 0 and 1, both excluded, such as 0.5.")
