"""What models are made of: mixers, position schemes, side paths and stacks, as modules and pure functions.

`Mixer`, `Position`, `SidePath` and `Stack` are the methods (knobs); their ``build`` makes the modules. Every module is
called ``y, state = module(x, ctx, state)`` with a `Context` and a `MixerState`; see `longspan.layers.base`. The methods
themselves are read when they are first asked for.
"""

from typing import TYPE_CHECKING

from longspan.layers.attention import AttentionModule, KVState, Visible, who_sees_whom, with_visibility
from longspan.layers.base import (
    Mixer,
    MixerModule,
    Position,
    PositionModule,
    SidePath,
    SidePathModule,
    Stack,
    StackModule,
)
from longspan.layers.context import Context, Cursor
from longspan.layers.lazy import exports
from longspan.layers.naming import choose, to_json
from longspan.layers.positions import inverse_frequencies, rotate, slopes
from longspan.layers.state import MixerState

if TYPE_CHECKING:
    from longspan.layers.attention import (
        L2A,
        RFA,
        Differential,
        Entmax,
        Gated,
        Goat,
        Plash,
        Selective,
        Softmax,
        Softplus,
        prototype_attention,
        through_prototypes,
    )
    from longspan.layers.memory import LinearAttention, Performer, linear_chunked, linear_loop, linear_quadratic
    from longspan.layers.positions import Alibi, NoPositions, Ntk, PositionInterpolation, Repo, Rope, Yarn
    from longspan.layers.sidepaths import TRSP, ShortConv
    from longspan.layers.stacks import ContextLM, Plain

__getattr__ = exports(
    __name__,
    {
        "Alibi": "positions.alibi",
        "ContextLM": "stacks.context_lm",
        "Differential": "attention.differential",
        "Entmax": "attention.entmax",
        "Gated": "attention.gated",
        "Goat": "attention.goat",
        "L2A": "attention.l2a",
        "LinearAttention": "memory.linear",
        "NoPositions": "positions.none",
        "Ntk": "positions.scaled",
        "Performer": "memory.performer",
        "Plain": "stacks.plain",
        "Plash": "attention.plash",
        "PositionInterpolation": "positions.scaled",
        "RFA": "attention.rfa",
        "Repo": "positions.repo",
        "Rope": "positions.rope",
        "Selective": "attention.selective",
        "ShortConv": "sidepaths.short_conv",
        "Softmax": "attention.softmax",
        "Softplus": "attention.softplus",
        "TRSP": "sidepaths.trsp",
        "Yarn": "positions.scaled",
        "linear_chunked": "memory.linear",
        "linear_loop": "memory.linear",
        "linear_quadratic": "memory.linear",
        "prototype_attention": "attention.prototype_attention",
        "through_prototypes": "attention.prototype_attention",
    },
)

__all__ = [
    "Yarn",
    "Softplus",
    "Selective",
    "PositionInterpolation",
    "Performer",
    "Ntk",
    "Gated",
    "Entmax",
    "Differential",
    "Alibi",
    "AttentionModule",
    "Context",
    "ContextLM",
    "Cursor",
    "Goat",
    "KVState",
    "L2A",
    "LinearAttention",
    "Mixer",
    "MixerModule",
    "MixerState",
    "NoPositions",
    "Plain",
    "Plash",
    "Position",
    "PositionModule",
    "RFA",
    "Repo",
    "Rope",
    "ShortConv",
    "SidePath",
    "SidePathModule",
    "Softmax",
    "Stack",
    "StackModule",
    "TRSP",
    "Visible",
    "choose",
    "inverse_frequencies",
    "linear_chunked",
    "linear_loop",
    "linear_quadratic",
    "prototype_attention",
    "rotate",
    "slopes",
    "through_prototypes",
    "to_json",
    "who_sees_whom",
    "with_visibility",
]
