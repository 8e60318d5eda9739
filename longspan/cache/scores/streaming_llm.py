"""StreamingLLM: keep the first few tokens (attention sinks) and the newest ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import LayerContext, Score, oldest, protect
from longspan.registry import knob, method


@method("streaming-llm", kind="score", paper="arXiv:2309.17453", capabilities=("content-free", "shares-heads"),
        summary="The first `n_sink` tokens and the newest ones, whatever they say.")
class StreamingLLM(Score):
    """Recency, with the attention sinks lifted above everything.

    The paper numbers kept entries without gaps. New queries keep their original positions, so with ``rerotate`` the
    kept keys are turned instead, up to the newest one: distances come out the same. Without it nothing is turned.
    """

    n_sink: int = knob(4, "first tokens that always stay", low=0)
    rerotate: bool = knob(False, "turn kept keys so that no gap is left between the sinks and the newest tokens")

    def protected(self, x: LayerContext) -> int:
        return self.n_sink

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return protect(x.positions.masked_fill(~x.valid, 0).float(), oldest(x, self.n_sink))

    def moves(self, x: LayerContext, keep: Bool[Tensor, "B H S"]) -> Int[Tensor, "B H S"] | None:
        """From where a key stands now (its position and what it was moved before) to its place counted from the newest."""
        if not self.rerotate:
            return None
        before = x.per_key.get("moved")
        moved = x.positions.new_zeros(x.positions.shape) if before is None else F.pad(
            before, (0, keep.shape[-1] - before.shape[-1]))
        last = x.positions.masked_fill(~keep, -1).amax(-1, keepdim=True)
        wanted = last - (keep.flip(-1).cumsum(-1).flip(-1) - 1)
        shift = torch.where(keep, wanted - x.positions - moved, 0).to(torch.int32)
        x.per_key["moved"] = moved + shift
        return shift
