"""Memories: mixers whose state has a fixed size."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.memory.linear import LinearAttention, linear_chunked, linear_loop, linear_quadratic
    from longspan.layers.memory.performer import Performer

_NAMES = ("LinearAttention", "linear_chunked", "linear_loop", "linear_quadratic")
__getattr__ = exports(__name__, dict.fromkeys(_NAMES, "linear") | {"Performer": "performer"})
__all__ = ["LinearAttention", "Performer", "linear_chunked", "linear_loop", "linear_quadratic"]
