"""LongCE: cross-entropy weighted by how much the long context helps with a token (arXiv:2410.23771).

    L = -1/n sum_i w_i log p(x_i | l_i),   w_i = min( p(x_i | l_i) / p(x_i | s_i), gamma )

with l_i all tokens before x_i, s_i a short context of the latest ones, both under the model being trained; the weights are
constants, no gradient flows through them. s_i comes from windows of 2K tokens that overlap by half: of each, the second
half is asked, so that s_i has K to 2K - 1 tokens. The first 2K tokens of a row have no longer context than that, and weight
1. So every step costs a forward more, without gradients, over nearly twice the tokens, in windows of 2K.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longspan.registry import Refused, knob, method
from longspan.training.base import IGNORE, Batch, Objective, Outcome


@method("longce", kind="objective", paper="arXiv:2410.23771",
        summary="Next-token cross-entropy weighted by how much the long context helps.")
class LongCE(Objective):
    """Reports the plain likelihood and the mean weight beside the loss."""

    K: int = knob(4096, "least tokens of short context that a token is compared with", low=1)
    gamma: float = knob(5.0, "largest weight of a token", low=1.0)

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        if state is not None:
            raise Refused("longce compares whole contexts with short ones; expected segments=1.")
        time = batch.ids.shape[1]
        if time <= 2 * self.K:
            raise Refused(f"longce(K={self.K}): rows of {time} tokens hold no context longer than 2K; expected a K such as "
                          f"{max(1, time // 8)}, and rows of at least 3 tokens.")
        short = self.short_likelihoods(model, batch)
        out = model(batch.ids, valid=batch.valid, segments=batch.segments)
        asked = batch.labels != IGNORE
        count = int(asked.sum())
        logits, labels = out.logits[asked].to(torch.promote_types(out.logits.dtype, torch.float32)), batch.labels[asked]
        losses = F.cross_entropy(logits, labels, reduction="none")
        weights = self.weights(-losses.detach(), short[asked].to(losses.dtype))
        right = (logits.argmax(-1) == labels).sum().item()
        metrics = {"nll": losses.sum().item(), "accuracy": right, "weight": weights.sum().item()}
        return Outcome((weights * losses).sum() / max(1, count), float(count),
                       {name: total / max(1, count) for name, total in metrics.items()}, out.state)

    def weights(self, long: Float[Tensor, " N"], short: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """min(p_long / p_short, gamma) of log-probabilities; 1 where there is no short one (NaN)."""
        return (long - short).exp().clamp(max=self.gamma).nan_to_num(nan=1.0)

    @torch.no_grad()
    def short_likelihoods(self, model: nn.Module, batch: Batch) -> Float[Tensor, "B T"]:
        """Log-probabilities of the labels under short contexts; NaN where no label is, or no longer context."""
        rows, time = batch.ids.shape
        found = torch.full((rows, time), torch.nan, device=batch.ids.device)
        for start in range(self.K, time - self.K, self.K):
            window = batch.map(lambda t, a=start: t[:, a : a + 2 * self.K])  # type: ignore[misc]
            logits = model(window.ids, valid=window.valid, segments=window.segments).logits[:, self.K :].float()
            labels = window.labels[:, self.K :]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
            found[:, start + self.K : start + 2 * self.K] = (-losses).masked_fill(labels == IGNORE, torch.nan)
        return found
