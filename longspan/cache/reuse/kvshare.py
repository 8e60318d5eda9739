"""KVShare, approximately: recompute the tokens whose keys and values deviate most, and look again while decoding.

The published method selects tokens of high deviation in two stages, in prefill and in decoding; its details are not
public. Here the deviation is CacheBlend's at layer 1, of keys and values together, and every `reselect` generated tokens
the ones that deviate most among those not yet recomputed are recomputed too. Results are marked approximate.
"""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from longspan.cache.reuse.base import Joint, Reuse
from longspan.registry import knob, method


@method("kvshare", kind="reuse", paper="arXiv:2503.16525",
        summary="Approximate: recompute the document tokens whose keys and values deviate most; again while decoding.")
class KVShare(Reuse):
    """b = floor(r x eligible) tokens by |dK| + |dV| at layer 1. Approximate: the paper's exact rule is not public."""

    r: float = knob(0.2, "share of the documents' tokens to recompute", low=0.0, high=1.0)
    reselect: int = knob(64, "generated tokens after which more are recomputed; 0: never", low=0)

    def steps_between(self) -> int:
        return self.reselect

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        count, layer = x.budget(self.r), min(1, x.n_layers - 1)
        if count == 0:
            return x.context.ids.new_empty(0)
        k, v = x.fresh(layer)
        changes = (k.float() - x.context.k[layer].float()).abs(), (v.float() - x.context.v[layer].float()).abs()
        return x.top(sum(change.sum((0, 2)) for change in changes), count)  # type: ignore[arg-type]
