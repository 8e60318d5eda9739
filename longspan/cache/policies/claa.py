"""CLAA: prune a prompt by what several layers in a row look at, so that no single layer can ruin the choice.

How well one layer's attention ranks the prompt's tokens goes up and down from layer to layer. Cross-layer attention
aggregation keeps the scores of the last `n` layers and takes, for every token, the largest that any of their KV heads
gives:

    imp[t] = max over the n layers and their heads of s[l,h,t]

A token that one layer finds important goes on, even if the pruning layer itself overlooks it. Compression of keys and
values, by each layer's own scores, starts when n layers have been seen.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.cache.base import LayerContext
from longspan.cache.policies.pruning import PAPER_LAYERS, PromptPruner
from longspan.registry import Refused, knob, method

BUFFER = "claa scores"


@method("claa", kind="policy", system="claa", paper="arXiv:2602.16054",
        capabilities=("query-window", "drops-tokens", "across-layers", "layer-budgets"),
        summary="From a middle layer on only prompt tokens that some head of the last n layers attended to go on.")
class CLAA(PromptPruner):
    """Cross-layer attention aggregation: the maximum over `n` layers and their heads ranks the tokens that go on."""

    n: int = knob(4, "layers, the pruning one the last, whose scores are put together", low=1)
    fold: str = knob("max", "how scores of layers and heads are put together", choices=("max", "mean"))

    def check(self) -> None:
        super().check()
        if self.l_p is not None:
            self._check_depth(self.l_p)

    def _check_depth(self, last: int) -> None:
        if self.n > last + 1:
            raise Refused(f"claa(n={self.n}): only {last + 1} layers have been read when layer {last} prunes; expected n of at "
                          f"most {last + 1}, or a later l_p.")

    def prune_layer(self, n_layers: int) -> int:
        last = super().prune_layer(n_layers)
        self._check_depth(last)
        return last

    def expected(self, context: int) -> float:
        # The first n - 1 layers keep all; of how many layers, only the model knows: the paper's have 32.
        return (self.rho + (1 - self.rho) * min(1.0, (self.n - 1) / PAPER_LAYERS)) * context

    def first_layer(self) -> int:
        return self.n - 1

    def note(self, x: LayerContext, scores: Float[Tensor, "B H S"]) -> None:
        before = x.across.get(BUFFER, ()) if x.layer else ()
        x.across[BUFFER] = (*before, scores)[-self.n :]

    def importance(self, x: LayerContext, scores: Float[Tensor, "B H S"]) -> Float[Tensor, "B S"]:
        return fold(x.across.pop(BUFFER), self.fold)


def fold(layers: tuple[Float[Tensor, "B H S"], ...], how: str = "max") -> Float[Tensor, "B S"]:
    """One importance per token from the scores of several layers: the maximum, or the mean, over layers and heads."""
    both = torch.cat([s.to(layers[-1].device) for s in layers], 1)
    return both.amax(1) if how == "max" else both.mean(1)
