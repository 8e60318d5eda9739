"""Token Sparse Attention: per head, gather the tokens that matter, attend among them, scatter the result back.

1. *Which layers.* Tokens change least in some layers: the drift R_l = mean_t |h_{l+1,t} - h_{l,t}| / |h_{l,t}| ranks
   them, and the share `delta` with the smallest drift is read sparsely. The drift is measured once per model
   (`token_sparse_calibration`); without a measurement these are the later half of the layers.
2. *Scores.* a[h,t] is the mean attention that the last `window` queries of the prompt pay to token t, over all keys
   normalised, smoothed over `pool` neighbours.
3. *How many.* Of the heads' mean, the tokens with the smallest scores that together hold a share `tau` are left out, but
   never so many that fewer than `min_tokens` stay. All heads of a layer keep the same number, so tensors stay regular.
4. *Which.* Every query head keeps its own best tokens, and the last `window` always.

Tokens left out get no attention update in this layer and may be chosen again in the next; the cache keeps all of them.
The choice has no gradient: a method for inference. In a batch of rows of one length, `choose` keeps for all of them what
the row that needs most does; `read_rows` asks row by row.
"""

from __future__ import annotations

import re
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longspan.models import profiles
from longspan.prefill.base import ReadContext, TokenSubset, check_context, keep_top_k
from longspan.registry import Refused, knob, method

LOGITS = 1 << 22
"""Query-key scores held at once."""
LATE, ALL = "late", "all"


@method("token-sparse-attention", kind="token-subset", system="token-sparse-attention", paper="arXiv:2602.03216",
        summary="In layers where tokens drift little, each head reads only the tokens its last queries attend to.",
        capabilities=("query-window", "profile", "trains"))
class TokenSparseAttention(TokenSubset):
    """Needs no profile to run, but chooses its layers by the model's measured drift once `longspan profile
    token-sparse-attention` was run; that of the bundled model comes with the package. Without it the later half is sparse."""

    family: ClassVar[str] = "layer-drift"
    trainer: ClassVar[str] = "longspan.prefill.token_sparse_calibration"

    tau: float = knob(0.005, "share of the attention that left-out tokens hold together, below 1", low=0, high=1)
    window: int = knob(128, "last tokens: their queries score the others, and they always stay", low=1)
    min_tokens: int = knob(1024, "least tokens that stay beside the window; shorter prompts are read densely", low=0)
    pool: int = knob(7, "neighbours that a score is smoothed over, an odd number", low=1)
    delta: float = knob(0.5, "share of the layers that are sparse", low=0, high=1)
    rule: str = knob("rank", "how that share is cut: by rank, or at a quantile of the drift", choices=("rank", "quantile"))
    layers: str = knob(profiles.AUTO, 'sparse layers: "auto" (by drift if it is known, else late), late, all, or such as '
                       '"14,15,20..37"')
    profile: str = knob(profiles.AUTO, 'file of the measured drift; "auto" finds that of the model')

    def check(self) -> None:
        if self.tau >= 1:
            raise Refused(f"{self}: expected tau from 0 to below 1, such as 0.005.")
        if self.pool % 2 == 0:
            raise Refused(f"{self}: expected an odd pool, so that it has a middle; the nearest is {self.pool + 1}.")
        if self.layers not in (profiles.AUTO, LATE, ALL):
            _listed(self.layers)

    # -- the profile

    def profile_settings(self) -> dict[str, object]:
        return {}

    def profile_tensors(self) -> tuple[str, ...]:
        return ("drift",)

    def profile_recipe(self) -> str:
        return self.card.name

    # -- layers

    def sparse_layers(self, x: ReadContext) -> list[int]:
        """The layers that are read sparsely on the model of `x`.

        Raises:
            Refused: a layer the model doesn't have, or a file that holds no drift of this model.
        """
        n = x.n_layers
        if self.layers == ALL:
            return list(range(n))
        if self.layers not in (LATE, profiles.AUTO):
            found = _listed(self.layers)
            if found[-1] >= n:
                raise Refused(f"{self}: this model has no layer {found[-1]}; expected layers of 0..{n - 1}.")
            return found
        drift = self._drift(x) if self.layers == profiles.AUTO else None
        return list(range(n // 2, n)) if drift is None else low_drift_layers(drift, self.delta, self.rule)

    def _drift(self, x: ReadContext) -> Float[Tensor, " N"] | None:
        """The measured drift; None where nobody has measured it."""
        if x.parts is None:
            return None
        if self.profile != profiles.AUTO:
            return profiles.find_trained(x.parts.model, self, self.profile).tensors["drift"]
        try:
            return profiles.find_trained(x.parts.model, self).tensors["drift"]
        except Refused:
            return None

    # -- tokens

    def scores(self, x: ReadContext) -> Float[Tensor, "B Hq M"]:
        """`recent_scores`, smoothed; beyond the first and the last of the M tokens zeros count in the mean.

        Raises:
            ValueError: scores that are NaN or infinite.
        """
        scores = F.avg_pool1d(recent_scores(x, self.window), self.pool, 1, self.pool // 2)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"{self.card.name}: attention scores of layer {x.layer} are NaN or infinite")
        return scores

    def choose(self, x: ReadContext) -> Int[Tensor, "B Hq N"] | None:
        """Slots that take part in this layer, ascending; None where all do. Padding never does.

        Raises:
            ValueError: T is not S (a prompt in pieces isn't defined), padding among the last `window` tokens, or scores
                that are NaN or infinite.
        """
        check_context(x)
        if x.q_len != x.k_len and x.q_len > 1:
            raise ValueError(f"{self.card.name} chooses among the tokens of a whole prompt, T = S; got T={x.q_len}, S={x.k_len}")
        longest = x.k_len if x.valid is None else int(x.valid.sum(-1).max())
        if x.q_len == 1 or longest <= self.min_tokens + self.window or self.tau == 0 or x.layer not in self.sparse_layers(x):
            return None
        M = x.k_len - self.window
        real = torch.ones(len(x.q), M, dtype=torch.bool, device=x.q.device) if x.valid is None else x.valid[:, :M]
        scores = self.scores(x).masked_fill(~real[:, None], 0.0)
        stay = tokens_that_stay(scores, self.tau, self.min_tokens, real)
        # Tensors are regular: as many for every row as one needs, but no more than the row with most padding has.
        k_keep = min(int(stay.max()), int(real.sum(-1).min()))
        return None if k_keep >= M else with_window(scores.masked_fill(~real[:, None], -1.0), k_keep, self.window)


# ------------------------------------------------------------------------------------------------------------- layers


def low_drift_layers(drift: Float[Tensor, " N"], delta: float, rule: str = "rank") -> list[int]:
    """The layers with the smallest drift: those whose rank is at most delta N, or (``rule="quantile"``) whose share of the
    drift is at most its quantile at delta, which for an odd number of layers keeps one more."""
    drift = drift.double()
    if rule == "quantile":
        share = drift / drift.sum()
        chosen = share <= torch.quantile(share, delta)
    else:
        rank = (drift[None] <= drift[:, None]).sum(-1)
        chosen = rank <= delta * len(drift) + 1e-9
    return chosen.nonzero()[:, 0].tolist()


def _listed(text: str) -> list[int]:
    """Layers written as ``14,15,20..37``, both ends included."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\.\.(\d{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise Refused(f'layers={text!r}: expected auto, late, all, or numbers and ranges such as "14,15,20..37".')
        found |= set(range(first, last + 1))
    return sorted(found)


# ------------------------------------------------------------------------------------------------------------- tokens


def recent_scores(x: ReadContext, window: int) -> Float[Tensor, "B Hq M"]:
    """Mean attention of the last `window` queries to each of the M = S - window tokens before them, float32.

    The softmax is over all S keys, causal among the last ones. Two passes over pieces of the keys (the largest logit and
    the sum, then the weights), so no window x S matrix is ever held. Padding gets 0.

    Raises ValueError for a window that leaves no tokens before it, or with padding in it.
    """
    (B, heads, T, _), S = x.q.shape, x.k_len
    if not 1 <= window < S or window > T:
        raise ValueError(f"window: expected 1..{min(S - 1, T)} of {S} tokens, got {window}")
    if x.valid is not None and not bool(x.valid[:, S - window :].all()):
        raise ValueError(f"padding among the last {window} tokens; expected padding on the left")
    piece = max(1, LOGITS // (B * heads * window))
    top = x.q.new_full((B, heads, window, 1), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(top)
    for start in range(0, S, piece):
        logits = _logits(x, window, start, min(start + piece, S))
        new = torch.maximum(top, logits.amax(-1, keepdim=True))
        level = new.masked_fill(torch.isneginf(new), 0.0)
        total = total * (top - level).exp() + (logits - level).exp().sum(-1, keepdim=True)
        top = new
    lse, M = top + total.log(), S - window
    means = [(_logits(x, window, start, min(start + piece, M)) - lse).exp().mean(2) for start in range(0, M, piece)]
    return torch.cat(means, -1)


def _logits(x: ReadContext, window: int, start: int, stop: int) -> Float[Tensor, "B Hq W n"]:
    """Scaled logits of the last `window` queries and the keys `start` to `stop`, -inf where a key isn't seen."""
    B, heads, _, D = x.q.shape
    q = x.q[:, :, x.q_len - window :].float().reshape(B, x.k.shape[1], -1, D) * x.scale
    logits = (q @ x.k[:, :, start:stop].float().mT).view(B, heads, window, stop - start)
    first = x.k_len - window
    if stop > first:
        slots = torch.arange(start, stop, device=x.q.device)
        own = torch.arange(first, x.k_len, device=x.q.device)
        logits = logits.masked_fill(slots > own[:, None], -torch.inf)
    return logits if x.valid is None else logits.masked_fill(~x.valid[:, None, None, start:stop], -torch.inf)


def tokens_that_stay(scores: Float[Tensor, "B H M"], tau: float, min_tokens: int, real: Tensor | None = None
                     ) -> Int[Tensor, " B"]:
    """k_keep of every row: all but the n tokens with the smallest mean score whose sum first reaches `tau`.

    If one token alone holds that much, nothing is left out. Tokens that are not `real` (padding) don't count.
    """
    mass = scores.mean(1)
    ranked = (mass / (mass.sum(-1, keepdim=True) + 1e-8)).sort(-1).values
    count = torch.full((len(mass),), mass.shape[-1], device=mass.device) if real is None else real.sum(-1)
    below = (ranked.cumsum(-1, dtype=torch.float32) < tau).sum(-1) - (mass.shape[-1] - count)
    left_out = torch.where(below > 0, below + 1, 0).clamp(max=count)
    return torch.minimum((count - left_out).clamp(min=min_tokens), count)


def with_window(scores: Float[Tensor, "B H M"], k_keep: int, window: int) -> Int[Tensor, "B H N"]:
    """The `k_keep` best of the M tokens (ties: the earlier one) and the `window` after them, ascending."""
    B, heads, M = scores.shape
    last = torch.arange(M, M + window, device=scores.device).expand(B, heads, window)
    if not k_keep:
        return last
    return torch.cat((keep_top_k(scores, k_keep).nonzero()[:, -1].view(B, heads, k_keep), last), -1)
