"""RoPE-perturbed self-distillation: whatever the tokens' indices are said to be, the model should predict the same.

The tokens are read twice (arXiv:2604.14339): once as they stand, once with perturbed position indices. On the standard view
an objective is minimised as ever (L_CLM); from the perturbed view the model has to predict what it predicted on the
standard one, which is taken as a constant,

    L = L_CLM + lam L_KL,    L_KL = mean over i in [s, L-1] of KL( p(. | x_<=i; r') || sg p(. | x_<=i; r) )

with i over the positions whose own index moved and that have a label: those before the split can't differ, and are left
out. Gradient flows through the perturbed pass only. Each draw (one document of one row) counts as much as it has labels, so
that the mean doesn't depend on how sequences are batched. Both passes use the same dropout: the views differ in indices
alone. Inference is unchanged. A step costs a second forward and its backward, and holds the activations of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.registry import Refused, knob, method
from longspan.training.base import IGNORE, Batch, Objective, Outcome
from longspan.training.divergence import reverse_kl
from longspan.training.index_perturbations import PERTURBATIONS, View, per_document, perturbed, require_whole
from longspan.training.next_token import NextToken
from longspan.training.rotary import require_rotary


@method("self-distillation", kind="objective", system="rope-perturbed-self-distillation", paper="arXiv:2604.14339",
        summary="An objective plus the divergence of a view with perturbed position indices from the standard one.")
class SelfDistillation(Objective):
    """For models with rotary positions; reports ``kl`` beside the metrics of `clm`. ``lam=0`` is `clm` alone, bit for bit."""

    perturb: str = knob("skip", "how indices are moved", choices=PERTURBATIONS)
    Y: int | None = knob(None, "largest gap of skip; None: the document's length", low=1)
    lam: float = knob(1.0, "weight of the divergence", low=0.0)
    clm: Objective = knob(default_factory=NextToken, kind="objective",  # type: ignore[arg-type]
                          help="what is minimised on the standard view: next-token, longce, …")
    chunk: int = knob(1024, "positions whose divergence is computed at once", low=1)
    seed: int = knob(0, "seed of the draws", low=0)

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        if not self.lam:
            return self.clm(model, batch, state)
        require_whole(self, state)
        require_rotary(self, model)
        view = perturbed(self.perturb, batch, most=self.Y, seed=self.seed)
        standard = _Standard(model, batch)
        outcome = self.clm(standard, batch)  # type: ignore[arg-type]
        if standard.logits is None:
            raise Refused(f"self-distillation(clm={self.clm}): it doesn't read the batch as it stands; expected an objective "
                          "that does, such as next-token.")
        kl = self.divergence(model, batch, view, standard)
        loss = outcome.loss + self.lam * kl.to(outcome.loss.dtype)
        return Outcome(loss, outcome.weight, outcome.metrics | {"kl": kl.item()}, outcome.state)

    def divergence(self, model: nn.Module, batch: Batch, view: View, standard: _Standard) -> Float[Tensor, ""]:
        """L_KL of the perturbed `view`, read now with the dice of the standard one."""
        asked = batch.labels != IGNORE
        counted = view.moved & asked
        with _replayed(standard.dice, batch.ids.device):
            out = model(batch.ids, valid=batch.valid, segments=batch.segments, positions=view.positions)
        assert standard.logits is not None
        losses = reverse_kl(out.logits[counted], standard.logits[counted], self.chunk)
        labels, counts = (per_document(mask.long(), view.documents) for mask in (asked, counted))
        share = (labels / counts.clamp(min=1)).gather(1, view.documents)[counted]
        return (losses * share.to(losses.dtype)).sum() / labels.sum().clamp(min=1)


@dataclass(eq=False)
class _Standard:
    """A model that remembers what it answered to the batch as it stands, and the random state it began with."""

    model: nn.Module
    batch: Batch
    logits: Float[Tensor, "B T V"] | None = None
    dice: list[Tensor] = field(default_factory=list)

    def __call__(self, ids: Tensor, **given: Any) -> Any:
        as_it_stands = ids is self.batch.ids and given.get("positions") is None
        if as_it_stands:
            self.dice = _dice(ids.device)
        out = self.model(ids, **given)
        if as_it_stands:
            self.logits = out.logits.detach()
        return out


def _dice(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def _replayed(dice: list[Tensor], device: torch.device) -> Iterator[None]:
    """The random state `dice` within the block, the one before it afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(dice[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(dice[1], device)
        yield
