"""Head enhancement: the heads best suited to far look-ups listen more to low rotary frequencies.

The query rows of both members of pair m are multiplied by g_m, so pair m's share of the head's scores grows by g_m and
its energy by g_m^2. Profiles g are the published ones for 64 pairs; other head sizes read them at the same relative
frequency.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.models import find_parts
from longspan.models.frequency_kernels import DISTANCE, RANKS, best_heads, head_scores, rotary_pairs
from longspan.registry import Refused, knob, method
from longspan.weights.base import WeightTransform
from longspan.weights.heads import scaled_queries

PROFILES: dict[str, list[tuple[float, float, int, bool]]] = {
    "llama": [(0.8, 1.0, 40, False), (1.0, 1.2, 8, True), (1.2, 1.0, 8, True), (1.0, 1.0, 8, True)],
    "qwen3": [(1.0, 1.0, 8, True), (1.0, 0.2, 24, True), (0.2, 1.0, 16, True), (1.0, 1.4, 8, True), (1.4, 1.0, 8, True)],
}
"""Straight pieces (from, to, points, whether the end is reached), highest frequency first; 64 points in all."""


@method("head-enhancement", kind="weight-transform", system="long-context-heads", paper="ICML 2026, poster 65465",
        summary="The heads best suited to far look-ups, known from their weights, listen more to low frequencies.")
class HeadEnhancement(WeightTransform):
    """Scale the queries of the best `heads` heads by a profile over rotary frequencies. No data, no training."""

    heads: int = knob(10, "how many of the best heads are changed", low=1)
    profile: str = knob("llama", "how much each frequency is multiplied by", choices=tuple(PROFILES))
    score: str = knob("rps", "which score of the weights ranks the heads", choices=RANKS)
    distance: int = knob(DISTANCE, "key position minus query position at which heads are scored")

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Change the query weights of the best heads until the block ends."""
        parts = find_parts(model)
        if self.heads > parts.n_layers * parts.n_heads:
            raise Refused(f"head-enhancement(heads={self.heads}): the model has {parts.n_layers * parts.n_heads} query "
                          "heads; expected at most that many.")
        best = best_heads(head_scores(parts, self.distance).by(self.score))[: self.heads]
        gains = {(layer, head): multipliers(self.profile, rotary_pairs(parts, layer)) for layer, head in best}
        with scaled_queries(parts, gains):
            yield


def multipliers(profile: str, pairs: int) -> Float[Tensor, pairs]:
    """A profile's number for every rotated pair; between the published points it is interpolated."""
    pieces = [torch.linspace(a, b, n if end else n + 1, dtype=torch.float64)[:n] for a, b, n, end in PROFILES[profile]]
    points = torch.cat(pieces)
    at = torch.arange(pairs, dtype=torch.float64) * len(points) / pairs
    low = at.long()
    high = (low + 1).clamp(max=len(points) - 1)
    return (points[low] + (at - low) * (points[high] - points[low])).float()
