"""Next-token prediction: the mean negative log-likelihood of the labelled tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longspan.registry import knob, method
from longspan.training.base import IGNORE, Batch, Objective, Outcome


@method("next-token", kind="objective", summary="Cross-entropy of the labelled next tokens.")
class NextToken(Objective):
    """-log p(label) averaged over labels other than -100, in float32 at least; reports accuracy beside it."""

    z_loss: float = knob(0.0, "weight of log(Z)^2, which keeps the logits' normaliser near 1", low=0.0)

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        out = model(batch.ids, valid=batch.valid, segments=batch.segments, state=state)
        asked = batch.labels != IGNORE
        count = int(asked.sum())
        wide = torch.promote_types(out.logits.dtype, torch.float32)
        logits, labels = out.logits[asked].to(wide), batch.labels[asked]
        loss = F.cross_entropy(logits, labels, reduction="sum") / max(1, count)
        right = (logits.argmax(-1) == labels).sum().item()
        metrics = {"nll": loss.item(), "accuracy": right / max(1, count)}
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1).square().sum() / max(1, count)
        return Outcome(loss, float(count), metrics, out.state)
