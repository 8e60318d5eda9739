"""Models that predict Gaussian sequences, and what the training loop needs for them.

The input of token t is x_(t-1), zeros for the first. It goes through Linear(D, d) and, with a learned table of positions
added, through a backbone; Linear(d, 2D) makes mu and log var of it. The loss is 1/2 sum over slots of
log var + (x - mu)^2 / var, averaged over batch and positions.

Which slots a token owns depends on its index, so a backbone without positions of its own needs the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.evaluation.lcube.plan import LCube
from longspan.evaluation.lcube.truth import Prediction, available
from longspan.models.decoder import Decoder
from longspan.registry import Refused
from longspan.training import Batch, Outcome, dice

LOG_VAR = (-6.0, 4.0)
"""The range that log var is clamped to."""
TABLE_STD = 0.3


@dataclass(frozen=True)
class GaussianBatches:
    """Sequences by number, from dice of their own; `ids` are the tokens' indices, `extra` the inputs and targets."""

    plan: LCube
    batch: int
    seed: int = 0
    split: str = "train"

    def sequences(self, index: int) -> Float[Tensor, "B L D"]:
        """The targets of batch `index`."""
        start = int(dice(self.seed, self.split, index).integers(2**62))
        return self.plan.sample(self.batch, torch.Generator().manual_seed(start))

    def __call__(self, index: int) -> Batch:
        x = self.sequences(index)
        ids = torch.arange(self.plan.length).expand(self.batch, -1)
        return Batch(ids, ids, extra={"before": shifted(x), "x": x}, index=index)


def shifted(x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """Each token's input: the token before it, zeros for the first."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


class Predicted(NamedTuple):
    """What a model says of each token's slots, and its state after the last one."""

    mu: Float[Tensor, "B T D"]
    log_var: Float[Tensor, "B T D"]
    state: Any = None


class GaussianModel(nn.Module):
    """Predicts each token's slots from the inputs up to it. A subclass or a backbone says how."""

    def forward(
        self, before: Float[Tensor, "B T D"], places: Int[Tensor, "B T"], state: Any = None
    ) -> Predicted:
        """`before` are the inputs of the tokens with indices `places`."""
        raise NotImplementedError

    @torch.no_grad()
    def predict(self, x: Float[Tensor, "B L D"], start: int = 0) -> Prediction:
        """The distribution of each token of ``x[:, start:]`` from those tokens alone: what `score` asks."""
        part = x[:, start:].to(next(self.parameters()).device)
        places = torch.arange(start, x.shape[1], device=part.device).expand(len(part), -1)
        was_training = self.training
        self.eval()
        try:
            mu, log_var, _ = self(shifted(part), places)
        finally:
            self.train(was_training)
        return Prediction(mu.to(x.device), log_var.exp().to(x.device))


class WithBackbone(GaussianModel):
    """Any backbone between two linear maps: a small decoder, or a causal module that maps (B,L,d) to (B,L,d).

    Raises `Refused` when the backbone gives another shape than it got.
    """

    def __init__(self, plan: LCube, backbone: nn.Module, width: int, table: bool = True):
        super().__init__()
        self.length, self.backbone = plan.length, backbone
        self.read, self.write = nn.Linear(plan.H, width), nn.Linear(width, 2 * plan.H)
        self.table = nn.Embedding(plan.length, width) if table else None
        if self.table is not None:
            nn.init.normal_(self.table.weight, std=TABLE_STD)

    def forward(
        self, before: Float[Tensor, "B T D"], places: Int[Tensor, "B T"], state: Any = None
    ) -> Predicted:
        x = self.read(before)
        if self.table is not None:
            x = x + self.table(places[:1])
        hidden, state = self._through(x, places, state)
        if hidden.shape != x.shape:
            raise Refused(f"l-cube: the backbone maps {tuple(x.shape)} to {tuple(hidden.shape)}; expected the same shape.")
        return Predicted(*split(self.write(hidden)), state)

    def _through(self, x: Tensor, places: Tensor, state: Any) -> tuple[Tensor, Any]:
        if not isinstance(self.backbone, Decoder):
            return self.backbone(x), None
        # A reading that starts inside the sequence stands where its tokens stand.
        given = places if state is None and int(places[0, 0]) else None
        out = self.backbone(embeds=x, positions=given, length=self.length, state=state, keep=0)
        return out.hidden, out.state


def split(out: Float[Tensor, "B T D2"]) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
    """mu and the clamped log var of a head's output, in float32 at least."""
    mu, log_var = out.to(torch.promote_types(out.dtype, torch.float32)).chunk(2, -1)
    return mu, log_var.clamp(*LOG_VAR)


@dataclass(frozen=True)
class GaussianNLL:
    """The objective: 1/2 sum over slots of log var + (x - mu)^2 / var, mean over batch and positions, in nats.

    It reports a noisy estimate of the utilisation beside it: how far the loss is from D/2, what knowing nothing costs,
    towards the least possible, as a share.
    """

    plan: LCube

    @cached_property
    def _available(self) -> Float[Tensor, " L"]:
        return available(self.plan)

    def __call__(self, model: Any, batch: Batch, state: Any = None) -> Outcome:
        mu, log_var, state = model(batch.extra["before"], batch.ids, state)
        x = batch.extra["x"]
        with torch.autocast(x.device.type, enabled=False):
            loss = 0.5 * (log_var + (x - mu).square() * (-log_var).exp()).sum(-1).mean()
        there = float(self._available[batch.ids[0].cpu()].mean())
        used = (0.5 * self.plan.H - loss.item()) / there if there else 0.0
        return Outcome(loss, float(batch.ids.numel()), {"utilisation": used}, state)
