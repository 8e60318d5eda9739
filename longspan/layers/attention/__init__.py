"""Attention operators: mixers that keep keys and values."""

from typing import TYPE_CHECKING

from longspan.layers.attention.base import AttentionModule, KVState, Visible, who_sees_whom, with_visibility
from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.attention.l2a import L2A
    from longspan.layers.attention.softmax import Softmax

__getattr__ = exports(__name__, {"L2A": "l2a", "Softmax": "softmax"})
__all__ = ["L2A", "AttentionModule", "KVState", "Softmax", "Visible", "who_sees_whom", "with_visibility"]
