"""StreamingLLM: keep the first few tokens (attention sinks) and the newest ones."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext, Score, oldest, protect
from longspan.registry import knob, method


@method("streaming-llm", kind="score", paper="arXiv:2309.17453", capabilities=("content-free", "shares-heads"),
        summary="The first `n_sink` tokens and the newest ones, whatever they say.")
class StreamingLLM(Score):
    """Recency, with the attention sinks lifted above everything. Entries keep their original positions."""

    n_sink: int = knob(4, "first tokens that always stay", low=0)

    def protected(self, x: LayerContext) -> int:
        return self.n_sink

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return protect(x.positions.float(), oldest(x, self.n_sink))
