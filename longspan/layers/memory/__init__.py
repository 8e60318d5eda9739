"""Memories: mixers whose state has a fixed size."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.memory.linear import LinearAttention, linear_chunked, linear_loop, linear_quadratic

_NAMES = ("LinearAttention", "linear_chunked", "linear_loop", "linear_quadratic")
__getattr__ = exports(__name__, dict.fromkeys(_NAMES, "linear"))
__all__ = ["LinearAttention", "linear_chunked", "linear_loop", "linear_quadratic"]
