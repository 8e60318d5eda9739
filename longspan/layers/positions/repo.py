"""RePo: every token says by its content where it stands.

Tokens are not numbered. From some layer on, a small module reads the layer's input x and gives each token one real place
per key head (arXiv:2512.14391):

    r = silu(x W_g) * (x W_c),   z = r W_z        W_g, W_c: D -> d_p = D/8,  W_z: d_p -> heads, no biases

Queries and keys are turned to z as rotary positions turn them to the token's index; order stays what causality makes of it.
z is not bounded, need not grow along the text, and knows nothing of the index. A constant z is no position at all, and
``rho = 1`` in z <- (1 - rho) z + rho i is RoPE. Layers below the first such layer keep rotary positions.

A place belongs to a key head and is shared by its query heads, so that grouped queries stay grouped and keys are stored
turned; ``per_query_head`` repeats keys and values instead. With ``encoding="alibi"`` the places enter as -m (z_i - z_j).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Real
from torch import Tensor, nn

from longspan.layers.base import Position, PositionModule
from longspan.layers.context import Context
from longspan.layers.positions.alibi import AlibiModule
from longspan.layers.positions.base import inverse_frequencies
from longspan.layers.positions.rope import RopeModule
from longspan.registry import Refused, knob, method

LARGEST = 1e6
"""Places beyond this have angles that float32 no longer tells apart."""
STD = 0.02
"""Standard deviation of the first weights, which are cut off at three of them."""


class LearnedPlaces(nn.Module):
    """The three matrices of one layer; `layer` is named where its places can't be used."""

    def __init__(self, dim: int, d_p: int, n_places: int, layer: int, generator: torch.Generator | None = None):
        super().__init__()
        self.layer = layer
        self.gate, self.content, self.assign = (
            nn.utils.skip_init(nn.Linear, *shape, bias=False) for shape in ((dim, d_p), (dim, d_p), (d_p, n_places)))
        for matrix in (self.gate, self.content, self.assign):
            nn.init.trunc_normal_(matrix.weight, std=STD, a=-3 * STD, b=3 * STD, generator=generator)

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B N T"]:
        """One place per token and head, in float32 at least.

        Reads one number back from the device to look at their size: warns beyond `LARGEST`, and raises `Refused` where a
        place is not finite.
        """
        r = F.silu(self.gate(x)) * self.content(x)
        wide = torch.promote_types(r.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            z = F.linear(r.to(wide), self.assign.weight.to(wide)).transpose(1, 2)
        self._look_at(z.detach())
        return z

    def _look_at(self, z: Float[Tensor, "B N T"]) -> None:
        if not z.numel() or z.is_meta or torch.compiler.is_compiling():
            return
        most = float(z.abs().amax())
        if not math.isfinite(most):
            raise Refused(f"repo: layer {self.layer} gives a token the position {most}; expected finite ones, as a lower "
                          "learning rate or float32 gives.")
        if most > LARGEST:
            warnings.warn(f"repo: layer {self.layer} gives a token a position of size {most:.3g}, more than the {LARGEST:.0e} "
                          "that float32 angles resolve.", stacklevel=4)


def blend(z: Float[Tensor, "B N T"], positions: Real[Tensor, "B T"], rho: float) -> Float[Tensor, "B N T"]:
    """(1 - rho) z + rho i."""
    return z if rho == 0.0 else (1.0 - rho) * z + rho * positions[:, None].to(z.dtype)


def first_layer(start: int | None, n_layers: int, owner: Any) -> int:
    """The first layer with learned places: `start`, or a third of the layers, rounded down as in the published models
    (5 of 16, 10 of 32). `Refused` beyond the last."""
    if start is not None and start > n_layers:
        raise Refused(f"{owner}: the model has {n_layers} layers; expected start from 0 to {n_layers}.")
    return n_layers // 3 if start is None else start


def width_of(d_p: int | None, dim: int, owner: Any) -> int:
    """`d_p`, or an eighth of the model's width. `Refused` where that is no whole number."""
    if d_p is None and dim % 8:
        raise Refused(f"{owner}: a width of {dim} has no eighth; expected d_p given, such as d_p={max(1, round(dim / 8))}.")
    return dim // 8 if d_p is None else d_p


# ------------------------------------------------------------------------------------------------- the position scheme


class LearnedModule(PositionModule):
    """What both encodings share: the places come from `learned`."""

    learned: LearnedPlaces
    rho: float

    def places(self, x: Float[Tensor, "B T C"], ctx: Context) -> Real[Tensor, "B *heads T"]:
        """(B,N,T) with one place per key head (or query head); the index itself, (B,T), for ``rho = 1``."""
        return ctx.positions if self.rho == 1.0 else blend(self.learned(x), ctx.positions, self.rho)


class RepoRope(LearnedModule, RopeModule):
    """Rotation to learned places."""

    def __init__(self, inv_freq: Float[Tensor, " half"], learned: LearnedPlaces, rho: float, per_query_head: bool):
        super().__init__(inv_freq)
        self.learned, self.rho, self.per_query_head = learned, rho, per_query_head


class RepoAlibi(LearnedModule, AlibiModule):
    """ALiBi over learned places: a score gains -m (z_i - z_j). Keys need not be repeated for places of query heads."""

    def __init__(self, n_heads: int, learned: LearnedPlaces, rho: float):
        super().__init__(n_heads)
        self.learned, self.rho = learned, rho


@method("repo", kind="position", system="repo-position", paper="arXiv:2512.14391", capabilities=("trains",),
        summary="Positions read from the token's content: one real place per token and key head.")
class Repo(Position):
    """Learned places from layer `start` on; rotary positions (or ALiBi's) by index below it."""

    start: int | None = knob(None, "first layer with learned positions, from 0; None: a third of the layers", low=0)
    d_p: int | None = knob(None, "width of what positions are read from; None: an eighth of the model's", low=1)
    rho: float = knob(0.0, "share of the token's index in its position; 1 is plain rotary", low=0.0, high=1.0)
    theta: float = knob(10_000.0, "base of the rotary frequencies", low=1.0)
    per_query_head: bool = knob(False, "a position per query head, which repeats keys and values")
    encoding: str = knob("rope", "how positions enter the scores", choices=("rope", "alibi"))
    hooks = frozenset({"rotate"})

    def check(self) -> None:
        if self.encoding == "alibi":
            object.__setattr__(self, "hooks", AlibiModule.hooks)

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> PositionModule:
        learns = layer >= first_layer(self.start, n_layers, self)
        d_p, alibi = width_of(self.d_p, dim, self), self.encoding == "alibi"
        inv_freq = None if alibi else inverse_frequencies(head_dim, self.theta)
        if not learns:
            return AlibiModule(n_heads) if inv_freq is None else RopeModule(inv_freq)
        learned = LearnedPlaces(dim, d_p, n_heads if self.per_query_head else n_kv_heads, layer)
        if inv_freq is None:
            return RepoAlibi(n_heads, learned, self.rho)
        return RepoRope(inv_freq, learned, self.rho, self.per_query_head)


__all__ = ["LearnedPlaces", "Repo", "RepoAlibi", "RepoRope", "blend", "first_layer", "width_of"]
