"""A-shape: the first tokens and a sliding window, for every head and whatever the content.

Models put much attention on their first tokens ("sinks") and on recent ones; keeping just these keeps generation
stable over any length (StreamingLLM, arXiv:2309.17453). As a prefill mask, a pair is read if ``j < sink`` or
``i - j < window`` (MInference's A-shape head, arXiv:2407.02490). Read in blocks here, the plan is the smallest one that
holds all those pairs.
"""

from __future__ import annotations

import torch

from longspan.kernels.plan import ReadPlan
from longspan.prefill.base import ReadContext, Selector, plan_from_blocks
from longspan.registry import knob, method


@method("a-shape", kind="selector", system="baselines", paper="arXiv:2309.17453",
        summary="Read the first tokens and a sliding window.", capabilities=("block-plan", "content-free"))
class AShape(Selector):
    """Sink and local window at block resolution."""

    sink: int = knob(100, "first tokens that every query reads", low=0)
    window: int = knob(800, "latest tokens each query reads, its own included", low=1)
    block: int = knob(64, "tokens per query and key block", low=1)

    def select(self, x: ReadContext) -> ReadPlan:
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=x.q.device)
        return plan_from_blocks(x, nothing, self.block, sink=self.sink, window=self.window)
