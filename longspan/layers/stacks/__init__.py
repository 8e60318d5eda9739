"""Stacks: how layers are composed into a network."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.stacks.context_lm import ContextLM
    from longspan.layers.stacks.plain import Plain

__getattr__ = exports(__name__, {"ContextLM": "context_lm", "Plain": "plain"})
__all__ = ["ContextLM", "Plain"]
