"""The contracts of everything a decoder is made of: mixers, position schemes, side paths and stacks.

One pre-norm layer of a decoder computes, on the residual stream x,

    x <- x + Mixer(norm(x)) + SidePath(norm(x))
    x <- x + MLP(norm(x))

and a stack says how such layers are composed. Each of the four is a registered *method* (a frozen dataclass of knobs)
whose ``build`` makes a *module* (weights) for one layer. Modules speak one language:

    y, state = module(x, ctx, state)

``ctx`` (`Context`) says which tokens are real, where they stand, and which documents they belong to; ``state``
(`MixerState`) is what was remembered from earlier calls, None at the start. One module serves whole sequences, chunks
and single tokens, and gives the same result however the sequence is cut. Two rules hold for all of them: a padded token
is as if it weren't there (its own output is 0), and a document never sees another one packed into the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float, Real
from torch import Tensor, nn

from longspan.registry import Method

if TYPE_CHECKING:
    from longspan.layers.context import Context
    from longspan.layers.state import MixerState

# ------------------------------------------------------------------------------------------------------------ modules


class LayerModule(nn.Module):
    """What the modules share: a way to ask for optimiser settings of their own."""

    optimiser_settings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Per parameter name (of this module itself), what the training loop sets otherwise than for the rest:
    ``weight_decay``, ``lr_scale`` (times the learning rate), ``betas``, ``eps``, ``clip`` (norm of its own)."""


class MixerModule(LayerModule):
    """Mixes information between tokens: attention or a recurrent memory."""

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], MixerState]:
        """`x` is the normalised input of the layer. Returns what is added to the residual stream, and the new state.

        Whole sequences, chunks of them and single tokens give the same rows, and padding or other documents change
        nothing. A method that depends on the total length reads it from ``ctx.length``.
        """
        raise NotImplementedError


class SidePathModule(LayerModule):
    """Runs beside the mixer; its output is added to the residual stream together with the mixer's."""

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], MixerState | None]:
        """`x` is the normalised input of the layer; the un-normalised one is ``ctx.residual``."""
        raise NotImplementedError


class StackModule(LayerModule):
    """Composes layers into a network."""

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], MixerState]:
        """From embeddings to the residual stream that the final norm reads."""
        raise NotImplementedError


class PositionModule(LayerModule):
    """Tells a mixer where tokens stand. This base class tells nothing: no rotation, no bias.

    A mixer asks in this order: `places` for the new tokens, `rotate` for their queries and keys, and `bias` between
    the new queries and every key it holds. Keys are stored rotated; their places are stored only for `bias`.
    """

    hooks: ClassVar[frozenset[str]] = frozenset()
    """Which of ``"rotate"`` and ``"bias"`` do something."""
    per_query_head: bool = False
    """Whether keys must be repeated to one per query head before `rotate` (places of their own for each)."""

    def places(self, x: Float[Tensor, "B T C"], ctx: Context) -> Real[Tensor, "B *heads T"]:
        """Where the tokens of this call stand: (B,T), or (B,Hkv,T) when heads differ; whole or real numbers."""
        return ctx.positions

    def rotate(
        self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hkv T D"], places: Real[Tensor, "B *heads T"]
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B Hkv T D"]]:
        """Queries and keys turned to their places."""
        return q, k

    def bias(
        self, q_places: Real[Tensor, "B *heads T"], k_places: Real[Tensor, "B *heads S"]
    ) -> Float[Tensor, "#B #H #T S"] | None:
        """What is added to the scaled scores (a log-prior over keys), None for nothing."""
        return None


# ------------------------------------------------------------------------------------------------------------ methods


class _Part(Method):
    """What mixers, position schemes and side paths share as methods."""

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> Any:
        """The module of layer `layer` (from 0) of `n_layers`, for a residual stream of width `dim`."""
        raise NotImplementedError

    def tie(self, modules: Sequence[Any]) -> None:
        """Called once with the modules of all layers, in order, so that they can share parameters."""


class Mixer(_Part):
    """A method of kind ``mixer``; ``build`` makes a `MixerModule`."""

    positions: ClassVar[frozenset[str]] = frozenset({"rotate", "bias"})
    """Which hooks of a position scheme the mixer calls; a scheme that needs another one is refused."""
    usual_position: ClassVar[str | None] = None
    """The scheme it has if none is asked for; None: ``rope`` where it rotates queries and keys, else ``nope``."""

    def rotated(self, head_dim: int) -> int:
        """Channels of the queries and keys that a position scheme turns; fewer where the mixer needs some for itself."""
        return head_dim


class Position(_Part):
    """A method of kind ``position``; ``build`` makes a `PositionModule`."""

    hooks: ClassVar[frozenset[str]] = frozenset()
    """Which hooks its modules use: ``"rotate"``, ``"bias"``, both or none."""


class SidePath(_Part):
    """A method of kind ``side-path``; ``build`` makes a `SidePathModule`."""


class Stack(Method):
    """A method of kind ``stack``; ``build`` makes a `StackModule` out of layers."""

    def build(self, make_layer: Callable[[int], nn.Module], n_layers: int, dim: int) -> StackModule:
        """Compose a network from ``make_layer(index)``, which makes layer `index` (from 0) of `n_layers`.

        A layer is called like a mixer, ``x, state = layer(x, ctx, state)``, and includes the residual connections.
        It may be made more than `n_layers` times (a predictor of its own) or fewer (one layer in a loop).
        """
        raise NotImplementedError
