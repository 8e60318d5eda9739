"""EPIC (LegoLink): recompute the first tokens of every document.

A document read alone puts much of its attention on its own first tokens, which are no beginning any more once it stands
behind others. Recomputing the first k tokens of each document takes that away (arXiv:2410.15332). A document that begins
the context is exact as it is.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from longspan.cache.reuse.base import Joint, Reuse
from longspan.registry import Refused, knob, method


@method("epic", kind="reuse", paper="arXiv:2410.15332", summary="Recompute the first tokens of every document.")
class Epic(Reuse):
    """The first `k` tokens of each document, or as many as make the same cost as a share `r`."""

    k: int = knob(16, "first tokens of a document to recompute", low=0)
    r: float | None = knob(None, "share of the documents' tokens to recompute, spread evenly, instead of k", low=0.0, high=1.0)

    def check(self) -> None:
        if self.r is not None and self.k != 16:
            raise Refused(f"epic(k={self.k}, r={self.r}): k and r exclude each other; give one of them.")

    def choose(self, x: Joint) -> Int[Tensor, " m"]:
        documents = [(a, b) for a, b in x.context.documents if a > 0]
        k = self.k if self.r is None else x.budget(self.r) // max(1, len(documents))
        chosen = torch.zeros_like(x.context.eligible)
        for start, stop in documents:
            chosen[start : min(start + k, stop)] = True
        return (chosen & x.context.eligible).nonzero()[:, 0]
