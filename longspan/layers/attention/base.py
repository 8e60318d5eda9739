"""What attention operators share: projections, the store of keys and values, who may see whom.

An operator overrides `AttentionModule.mix` alone: it gets rotated queries, all stored keys and values, the visibility
of keys, and the position bias. What else may differ is a method of its own: `project` (other channels), `turned` (norms
and further channels after the rotation) and `output` (gates). Everything about padding, packed documents, windows,
chunks and single tokens is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor, nn

from longspan.kernels import causal_mask
from longspan.layers.base import MixerModule
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import Refused


@dataclass(eq=False)
class KVState(MixerState):
    """Keys (already rotated) and values of the tokens read, and what is needed to tell who may see them."""

    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    places: Real[Tensor, "B *heads S"] | None = None
    """Where keys stand; kept only for position schemes with a bias and operators with `keeps_places`."""
    order: Int[Tensor, "B S"] | None = None
    """Index among the row's real tokens; kept only under a window."""
    valid: Bool[Tensor, "B S"] | None = None
    segments: Int[Tensor, "B S"] | None = None
    """Running number of the document of each key; None while rows hold one document."""

    @property
    def length(self) -> int:
        """Keys held, padding included."""
        return self.k.shape[2]

    def extend(self, new: KVState) -> KVState:
        """This state followed by `new`. What one of the two doesn't record is filled in: real tokens, document 0."""
        old, S, T = self, self.length, new.length
        return KVState(
            torch.cat((old.k, new.k), 2),
            torch.cat((old.v, new.v), 2),
            _join(old.places, new.places, S, T, 0),
            _join(old.order, new.order, S, T, 0),
            _join(old.valid, new.valid, S, T, 1),
            _join(old.segments, new.segments, S, T, 0),
        )

    def newest(self, window: int, total: Int[Tensor, " B"]) -> KVState:
        """The keys that a query after `total` tokens can still see under `window`: the last window - 1 of each row."""
        if self.valid is None:
            drop = max(0, self.length - (window - 1))
        else:
            assert self.order is not None
            needed = (self.valid & (self.order > (total - window)[:, None])).any(0)
            drop = int(needed.int().argmax()) if bool(needed.any()) else self.length
        if not drop:
            return self
        # Copies, since a view would keep everything that was dropped.
        kept = {name: getattr(self, name) for name in ("places", "order", "valid", "segments")}
        kept = {name: None if t is None else t[..., drop:].clone() for name, t in kept.items()}
        return KVState(self.k[:, :, drop:].clone(), self.v[:, :, drop:].clone(), **kept)


def _join(old: Tensor | None, new: Tensor | None, S: int, T: int, fill: int) -> Tensor | None:
    if old is None and new is None:
        return None
    if old is None:
        assert new is not None
        old = new.new_full((*new.shape[:-1], S), fill)
    if new is None:
        new = old.new_full((*old.shape[:-1], T), fill)
    return torch.cat((old, new), -1)


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys each query may look at. The queries are the last `T` of the `S` tokens held."""

    T: int
    S: int
    mask: Bool[Tensor, "#B 1 T S"] | None
    """None: a query sees the keys up to its own."""
    device: torch.device

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return self.mask is None and self.T == 1

    def full(self) -> Bool[Tensor, "#B 1 T S"]:
        """The mask, made if there is none."""
        return causal_mask(self.T, self.S, self.device)[None, None] if self.mask is None else self.mask


def who_sees_whom(state: KVState, T: int, window: int | None) -> Visible:
    """Causality, padding, documents and window for the last `T` tokens of `state`.

    A padded query sees nothing. Under a window w, a query sees itself and the w - 1 real tokens before it.
    """
    S, device = state.length, state.k.device
    window = None if window is not None and window >= S else window
    if state.valid is None and state.segments is None and window is None:
        return Visible(T, S, None, device)
    mask = causal_mask(T, S, device)[None]
    if state.valid is not None:
        mask = mask & state.valid[:, None, :] & state.valid[:, S - T :, None]
    if state.segments is not None:
        mask = mask & (state.segments[:, None, :] == state.segments[:, S - T :, None])
    if window is not None:
        assert state.order is not None
        mask = mask & (state.order[:, S - T :, None] - state.order[:, None, :] < window)
    return Visible(T, S, mask[:, None], device)


class AttentionModule(MixerModule):
    """Grouped-query causal self-attention; subclasses say in `mix` how scores become outputs.

    Raises `Refused` when the query heads are not a multiple of the key heads.
    """

    keeps_places: ClassVar[bool] = False
    """Whether `mix` needs ``held.places`` even without a position bias; those of the queries are the last T."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, window: int | None = None):
        super().__init__()
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise Refused(f"n_kv_heads={n_kv_heads}: expected a divisor of the {n_heads} query heads.")
        self.n_heads, self.n_kv_heads, self.head_dim, self.window = n_heads, n_kv_heads, head_dim, window
        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=False)

    def mix(
        self,
        q: Float[Tensor, "B H T D"],
        held: KVState,
        visible: Visible,
        bias: Float[Tensor, "#B #H T S"] | None,
    ) -> Float[Tensor, "B H T Dv"]:
        """The attention outputs over the keys and values `held`; a query that sees nothing gets 0."""
        raise NotImplementedError

    def output(self, out: Float[Tensor, "B H T Dv"], x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        """Heads joined and projected; `x` is the layer's input, for gates."""
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], KVState]:
        assert state is None or isinstance(state, KVState)
        q, held, bias = self.read(x, ctx, state)
        out = self.output(self.mix(q, held, who_sees_whom(held, x.shape[1], self.window), bias), x)
        if self.window is not None:
            assert ctx.after is not None
            held = held.newest(self.window, ctx.after.total)
        return out, held

    def read(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: KVState | None
    ) -> tuple[Float[Tensor, "B H T D"], KVState, Float[Tensor, "#B #H T S"] | None]:
        """Rotated queries of this call's tokens, all keys and values held with them, and the position bias."""
        position = ctx.position
        q, k, v = self.project(x, ctx)
        if position.per_query_head and self.n_kv_heads != self.n_heads:
            k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for t in (k, v))
        places = position.places(x, ctx)
        q, k = self.turned(*position.rotate(q, k, places), ctx)
        biased = "bias" in position.hooks
        order = ctx.order if self.window is not None else None
        new = KVState(k, v, places if biased or self.keeps_places else None, order, ctx.valid, ctx.segments)
        held = new if state is None else state.extend(new)
        return q, held, position.bias(places, held.places) if biased and held.places is not None else None

    def turned(
        self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], ctx: Context
    ) -> tuple[Float[Tensor, "B H T D2"], Float[Tensor, "B Hkv T D2"]]:
        """What is done to rotated queries and keys before keys are stored: norms, channels of their own."""
        return q, k

    def project(self, x: Float[Tensor, "B T C"], ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B,H,T,D), keys and values (B,Hkv,T,D) of the tokens of this call."""
        B, T = x.shape[:2]
        shape = (B, T, -1, self.head_dim)
        return tuple(p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))  # type: ignore[return-value]


def with_visibility(
    bias: Float[Tensor, "#B #H T S"], visible: Visible, dtype: torch.dtype
) -> Float[Tensor, "#B #H T S"]:
    """An additive mask: `bias` where a key is visible, -inf elsewhere, in `dtype`."""
    bias = bias.to(dtype)
    return bias if visible.everything else bias.masked_fill(~visible.full(), float("-inf"))
