"""ProphetKV: recompute the tokens that this question attends to.

Tokens whose keys deviate most in general crowd out those that the question needs. So the question looks first: its tokens
run over the joined caches (`probe`), the attention that each context token receives is averaged over question tokens,
heads and layers, and the tokens that receive most are recomputed, one set for all layers (arXiv:2602.02579).
"""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from longspan.cache.reuse.base import Joint, Reuse
from longspan.registry import Refused, knob, method


@method("prophetkv", kind="reuse", system="prophetkv", paper="arXiv:2602.02579",
        summary="Recompute the document tokens that the question attends to most.")
class ProphetKV(Reuse):
    """b = floor(r x eligible) tokens by `Joint.importance`, mean over all layers or the probed ones."""

    r: float = knob(0.2, "share of the documents' tokens to recompute", low=0.0, high=1.0)
    probe_layers: str = knob("all", 'layers whose attention counts: "all", or numbers such as "4, 9, 14" (the probe stops there)')
    query: str = knob("question", "what asks: the question alone, or all that follows the documents",
                      choices=("question", "suffix"))

    def check(self) -> None:
        self._numbers()

    def _numbers(self) -> list[int] | None:
        if self.probe_layers == "all":
            return None
        words = [w.strip() for w in self.probe_layers.split(",")]
        if not all(w.isdecimal() for w in words):
            raise Refused(f"prophetkv(probe_layers={self.probe_layers!r}): expected \"all\" or layer numbers such as \"4, 9\".")
        return [int(w) for w in words]

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        count, layers = x.budget(self.r), self._numbers()
        if layers is not None and max(layers) >= x.n_layers:
            raise Refused(f"prophetkv(probe_layers={self.probe_layers!r}): the model has {x.n_layers} layers; expected numbers "
                          f"from 0 to {x.n_layers - 1}.")
        if count == 0:
            return x.context.ids.new_empty(0)
        return x.top(x.importance(layers, whole_suffix=self.query == "suffix"), count)
