"""Side paths: what runs beside the mixer of a layer."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.sidepaths.short_conv import ShortConv
    from longspan.layers.sidepaths.trsp import TRSP

__getattr__ = exports(__name__, {"ShortConv": "short_conv", "TRSP": "trsp"})
__all__ = ["TRSP", "ShortConv"]
