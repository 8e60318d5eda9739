"""Position schemes: how a mixer learns where tokens stand."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports
from longspan.layers.positions.base import inverse_frequencies, rotate, slopes

if TYPE_CHECKING:
    from longspan.layers.positions.alibi import Alibi
    from longspan.layers.positions.none import NoPositions
    from longspan.layers.positions.rope import Rope

__getattr__ = exports(__name__, {"Alibi": "alibi", "NoPositions": "none", "Rope": "rope"})
__all__ = ["Alibi", "NoPositions", "Rope", "inverse_frequencies", "rotate", "slopes"]
