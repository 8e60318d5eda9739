"""KeyDiff: keep the keys that differ most from the average direction of all keys."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score
from longspan.registry import method


@method("keydiff", kind="score", paper="arXiv:2504.15364", summary="Keys least similar to the mean key direction.")
class KeyDiff(Score):
    """Minus the cosine between a key and the anchor, the mean of the normalised keys of its head."""

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        directions = F.normalize(x.k.float(), dim=-1) * x.valid[..., None]
        anchor = directions.sum(2, keepdim=True) / x.valid.sum(-1)[..., None, None]
        return -F.cosine_similarity(x.k.float(), anchor, dim=-1)
