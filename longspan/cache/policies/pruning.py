"""Pruning a prompt in the middle of a model: the common part of CLAA and FastKV.

While the prompt is read, layers up to `l_p` compute all of it. Each of them scores the prompt's tokens by what the last
`W` of them attend to (`window_scores`) and keeps the best of its own keys and values in every KV head. At layer `l_p`
one importance per token, made from these scores, decides which tokens go on: the layers after it compute nothing else.
Tokens keep their positions, and decoding goes on at the prompt's end.

A ranking of one's own takes the place of all scores, in every layer, if it is laid down among the notes that layers
share: ``cache.across[REFERENCE] = r`` with r (N), before the prompt is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.amount import Amount
from longspan.cache.base import KeepPlan, LayerContext, Policy, newest, top_mask
from longspan.models.drop import PROMPT_ROWS
from longspan.registry import Refused, knob

REFERENCE = "reference ranking"
"""Note under which a ranking (N) or (B,N) of the prompt's tokens stands in for all scores."""
PAPER_LAYERS, PAPER_PRUNE_LAYER = 32, 15


@dataclass(frozen=True)
class PromptPruner(Policy):
    """A policy that keeps `rho` of the prompt: in every KV head up to layer `l_p`, and of the tokens computed after it."""

    rho: float = knob(0.2, "share of the prompt kept, in every KV head and of the tokens that go on after l_p", low=0.0, high=1.0)
    W: int = knob(8, "prompt queries that vote, and newest tokens that always stay", low=1)
    kernel: int = knob(7, "width of the average pooling along the text, odd", low=1)
    l_p: int | None = knob(None, "last layer that computes the whole prompt; 15 of 32 layers, in proportion, if left out", low=0)

    def check(self) -> None:
        if self.kernel % 2 == 0:
            raise Refused(f"{self.card.name}(kernel={self.kernel}): expected an odd width, such as {self.kernel + 1}.")

    def window_rows(self) -> int:
        return self.W

    def expected(self, context: int) -> float:
        return self.rho * context

    # -- what the two differ in

    def first_layer(self) -> int:
        """The first layer that compresses its keys and values."""
        return 0

    def importance(self, x: LayerContext, scores: Float[Tensor, "B H S"]) -> Float[Tensor, "B S"]:
        """What decides at layer `l_p`, from the scores of this layer and of those before it."""
        raise NotImplementedError(f"{type(self).__name__} must define importance().")

    def note(self, x: LayerContext, scores: Float[Tensor, "B H S"]) -> None:
        """Remember a layer's scores, where importance needs more than the last ones."""

    # -- choosing

    def prune_layer(self, n_layers: int) -> int:
        """The layer whose output is cut: `l_p`, or 15/32 of the layers."""
        if self.l_p is None:
            return min(round(PAPER_PRUNE_LAYER / PAPER_LAYERS * n_layers), n_layers - 1)
        if self.l_p >= n_layers:
            raise Refused(f"{self.card.name}(l_p={self.l_p}): the model has {n_layers} layers; expected at most {n_layers - 1}.")
        return self.l_p

    def counts(self, x: LayerContext) -> Int[Tensor, " B"]:
        """K = T = floor(rho N) for every row; N where there is nothing to prune: N <= W, or rho = 1.

        Raises:
            Refused: no more than the window would be left.
        """
        share = Amount(self.rho, "fraction")
        kept = torch.tensor([share.tokens(int(n), 1.0) for n in x.seen], device=x.k.device)
        whole = (x.seen <= self.W) | (kept >= x.seen)
        few = kept[~whole]
        if len(few) and int(few.min()) <= self.W:
            raise Refused(f"{self}: keeping {int(few.min())} of {int(x.seen[~whole].min())} tokens leaves no room beside the "
                          f"{self.W} newest, which always stay; raise rho, or lower W.")
        return torch.where(whole, x.seen, kept)

    def plan(self, x: LayerContext) -> KeepPlan:
        everything = KeepPlan(x.valid.clone())
        last = self.prune_layer(x.n_layers)
        counts = self.counts(x)
        if x.layer > last or bool((counts >= x.seen).all()):
            return everything
        scores = self._scores(x)
        self.note(x, scores)
        if x.layer == last:
            chosen = keep_best(self.importance(x, scores)[:, None], counts, x, self.W)[:, 0]
            x.across[PROMPT_ROWS] = chosen
        if x.layer < self.first_layer():
            return everything
        return KeepPlan(keep_best(scores, counts, x, self.W))

    def _scores(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        own = x.across.get(REFERENCE)
        if own is None:
            scores = window_scores(x, self.W, self.kernel)
        else:
            rows = own.to(x.k.device).float().expand(len(x.k), -1)
            if rows.shape[1] != x.k.shape[2]:
                raise ValueError(f"the ranking laid down has shape {tuple(own.shape)}, expected {x.k.shape[2]} tokens.")
            scores = rows[:, None].expand(x.valid.shape)
        if bool(torch.isnan(scores[x.valid]).any()):
            raise Refused(f"{self.card.name} gave NaN in layer {x.layer}; the model's keys or queries hold NaN.")
        return scores


def window_scores(x: LayerContext, W: int, kernel: int) -> Float[Tensor, "B H S"]:
    """Attention of the last `W` queries, causal inside the window: summed over them for every token before the window,
    average-pooled along the text (zeros beyond both ends, which count), summed over the query heads of a KV head.

    The window's own columns and padding give zeros.
    """
    rows = slice(max(0, x.q.shape[2] - W), None)
    own = replace(x, q=x.q[:, :, rows], q_valid=x.q_valid[:, rows], q_positions=x.q_positions[:, rows])
    recent = newest(x, W)
    votes = own.attention.sum(3).masked_fill(recent[:, :, None], 0.0)
    pooled = F.avg_pool1d(votes.flatten(0, 2)[:, None], kernel, stride=1, padding=kernel // 2).view(votes.shape)
    return pooled.sum(2).masked_fill(recent | ~x.valid, 0.0)


def keep_best(scores: Float[Tensor, "B H S"], counts: Int[Tensor, " B"], x: LayerContext, W: int) -> Bool[Tensor, "B H S"]:
    """The last `W` tokens and the best of those before them: `counts` in all, for every head."""
    valid, recent = x.valid[:, : scores.shape[1]], newest(x, W)[:, : scores.shape[1]]
    ranked = scores.masked_fill(~valid, -torch.inf).masked_fill(recent, torch.inf)
    return top_mask(ranked, counts[:, None].expand(scores.shape[:2])) & valid
