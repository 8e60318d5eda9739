"""Attention operators: mixers that keep keys and values."""

from typing import TYPE_CHECKING

from longspan.layers.attention.base import AttentionModule, KVState, Visible, who_sees_whom, with_visibility
from longspan.layers.lazy import exports

if TYPE_CHECKING:
    from longspan.layers.attention.differential import Differential
    from longspan.layers.attention.entmax import Entmax
    from longspan.layers.attention.gated import Gated
    from longspan.layers.attention.goat import Goat
    from longspan.layers.attention.l2a import L2A
    from longspan.layers.attention.plash import Plash
    from longspan.layers.attention.prototype_attention import prototype_attention, through_prototypes
    from longspan.layers.attention.rfa import RFA
    from longspan.layers.attention.selective import Selective
    from longspan.layers.attention.softmax import Softmax
    from longspan.layers.attention.softplus import Softplus

__getattr__ = exports(__name__, {
    "Differential": "differential", "Entmax": "entmax", "Gated": "gated", "Goat": "goat", "L2A": "l2a", "Plash": "plash",
    "RFA": "rfa", "Selective": "selective", "Softmax": "softmax", "Softplus": "softplus",
    "prototype_attention": "prototype_attention", "through_prototypes": "prototype_attention",
})  # fmt: skip
__all__ = [
    "Differential", "Entmax", "Gated", "Goat", "L2A", "Plash", "RFA", "Selective", "Softmax", "Softplus", "AttentionModule",
    "KVState", "Visible", "prototype_attention", "through_prototypes", "who_sees_whom", "with_visibility",
]  # fmt: skip
