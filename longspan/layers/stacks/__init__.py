"""Stacks: how layers are composed into a network."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.stacks.plain import Plain

__getattr__ = exports(__name__, {"Plain": "plain"})
__all__ = ["Plain"]
