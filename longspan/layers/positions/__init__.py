"""Position schemes: how a mixer learns where tokens stand."""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports
from longspan.layers.positions.base import inverse_frequencies, rotate, slopes

if TYPE_CHECKING:
    from longspan.layers.positions.alibi import Alibi
    from longspan.layers.positions.none import NoPositions
    from longspan.layers.positions.repo import Repo
    from longspan.layers.positions.rope import Rope
    from longspan.layers.positions.scaled import Ntk, PositionInterpolation, Yarn

__getattr__ = exports(__name__, {"Alibi": "alibi", "NoPositions": "none", "Rope": "rope", "Ntk": "scaled",
                                  "PositionInterpolation": "scaled", "Repo": "repo", "Yarn": "scaled"})
__all__ = ["Alibi", "NoPositions", "Ntk", "PositionInterpolation", "Repo", "Rope", "Yarn", "inverse_frequencies", "rotate",
           "slopes"]
