"""Next-token prediction on perturbed position indices, which shows a model distances beyond the length it reads.

PoSE (arXiv:2309.10400) trains on short windows whose indices jump, so that the relative positions of a longer context
occur. Here it is the baseline of self-distillation: one forward on one perturbed view, and no other loss.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from longspan.registry import knob, method
from longspan.training.base import Batch, Objective, Outcome
from longspan.training.index_perturbations import PERTURBATIONS, perturbed, require_whole
from longspan.training.next_token import NextToken
from longspan.training.rotary import require_rotary


@method("pose", kind="objective", paper="arXiv:2309.10400",
        summary="Next-token cross-entropy on perturbed position indices.")
class Pose(Objective):
    """For models with rotary positions. Indices are drawn anew for every document and batch."""

    perturb: str = knob("skip", "how indices are moved", choices=PERTURBATIONS)
    Y: int | None = knob(None, "largest gap of skip; None: the document's length", low=1)
    seed: int = knob(0, "seed of the draws", low=0)

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        require_whole(self, state)
        require_rotary(self, model)
        view = perturbed(self.perturb, batch, most=self.Y, seed=self.seed)
        moved: Any = functools.partial(model, positions=view.positions)
        return NextToken()(moved, batch)  # type: ignore[call-arg]
