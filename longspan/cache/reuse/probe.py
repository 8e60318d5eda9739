"""Stage I: which context tokens a question attends to, over caches that have not seen each other.

The question's tokens alone run through the layers. Their queries attend to the joined cache and causally to each other;
nothing of the context changes. In each layer

    imp[t] = 1 / (|Q| Hq)  sum over i in Q and heads h of  softmax over context keys (q_i^h . k_t / sqrt(d))

with the softmax over context keys only, prefix included (arXiv:2602.02579). Two passes over tiles of keys, log-sum-exp
first and then the sums, so that no |Q| x N matrix is held.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.cache.reuse.assemble import Assembled
from longspan.cache.reuse.stage import Enough, attend_at, forward, visible
from longspan.models.call import LayerCall

TILE = 512
"""Keys whose scores are held at once, for every row and head."""


def probe(model: nn.Module, context: Assembled, tokens: Int[Tensor, " n"] | Sequence[int], question: tuple[int, int],
          layers: Collection[int]) -> Float[Tensor, "layers N"]:
    """Importance of every context token to the question, one row for each of `layers` in ascending order (float32).

    Args:
        tokens: what follows the context. Those after the question's end can't matter and are not run.
        question: first and end of the question among `tokens`.
        layers: where to look; the forward stops after the highest.
    """
    start, stop = question
    stage = _Probe(context, start, frozenset(layers))
    positions = torch.arange(len(context), len(context) + stop)
    forward(model, stage, torch.as_tensor(tokens)[:stop], positions)
    return torch.stack(stage.found)


class _Probe:
    def __init__(self, context: Assembled, start: int, layers: frozenset[int]) -> None:
        self.context, self.start, self.layers = context, start, layers
        self.found: list[Tensor] = []

    def attend(self, call: LayerCall) -> Tensor:
        k, v = (t[call.layer][None] for t in (self.context.k, self.context.v))
        positions = call.positions[0]
        if call.layer in self.layers:
            rows = slice(self.start, None)
            self.found.append(importance(call.q[0, :, rows], k[0], positions[rows], call.scale, call.window, call.softcap))
            if call.layer == max(self.layers):
                raise Enough
        return attend_at(call, torch.cat([k, call.k], 2), torch.cat([v, call.v], 2), positions)


def importance(q: Float[Tensor, "Hq Q D"], k: Float[Tensor, "H N D"], positions: Int[Tensor, " Q"], scale: float,
               window: int | None = None, softcap: float | None = None) -> Float[Tensor, " N"]:
    """Mean over rows and heads of the softmax over context keys; sums to 1 (float32).

    A row of a layer with a sliding window has only the keys in its window; one that sees none of them adds nothing.
    """
    (Hq, Q, D), (H, N, _) = q.shape, k.shape
    rows = q.float().reshape(H, Hq // H * Q, D)

    def logits(start: int) -> tuple[Float[Tensor, "H G Q n"], Bool[Tensor, "Q n"]]:
        stop = min(N, start + TILE)
        found = (rows @ k[:, start:stop].float().mT * scale).view(H, Hq // H, Q, -1)
        found = found if softcap is None else softcap * torch.tanh(found / softcap)
        seen = visible(positions, start, stop, window)
        return found.masked_fill(~seen, -torch.inf), seen

    lse = torch.full((H, Hq // H, Q), -torch.inf, device=q.device)
    for start in range(0, N, TILE):
        lse = torch.logaddexp(lse, logits(start)[0].logsumexp(-1))
    sums = []
    for start in range(0, N, TILE):
        found, seen = logits(start)
        sums.append((found - lse[..., None]).exp().masked_fill(~seen, 0.0).sum((0, 1, 2)))
    return torch.cat(sums) / (Q * Hq)
