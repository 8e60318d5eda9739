"""Reading a few positions of a whole cache: how they are scored, chosen and attended to. Functions on tensors alone.

The history is what the cache held before the tokens that are being verified: slots 0 to N-1, slot = position. A score says
how much some heads look at each of its positions; `choose` takes one set S of K positions for all layers and heads;
`attend_selected` attends to S and to the new tokens, causally among those, at their true positions (Dustin,
arXiv:2606.24957).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache import top_mask
from longspan.kernels import attend
from longspan.kernels.attend import softmax_and_lse


def head_scores(q: Float[Tensor, "B h g D"], k: Float[Tensor, "B h S D"], seen: Bool[Tensor, "B h S"], *, scale: float,
                softcap: float | None = None) -> Float[Tensor, "B h S"]:
    """Attention over the seen entries by itself (softmax over those alone), mean over the g query rows; float32.

    Each head's weights sum to 1 over the entries in `seen`; where a head sees nothing they are 0.

    Raises:
        ValueError: shapes that don't fit, or scores that are NaN.
    """
    if q.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or seen.shape != k.shape[:3]:
        raise ValueError(f"expected q (B,h,g,D), k (B,h,S,D) and seen (B,h,S), got {tuple(q.shape)}, {tuple(k.shape)} and "
                         f"{tuple(seen.shape)}")
    logits = q.float() @ k.float().mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = softmax_and_lse(logits.masked_fill(~seen[:, :, None], -torch.inf), -1)[0].mean(2)
    if bool(torch.isnan(weights).any()):
        raise ValueError("attention scores of the history are NaN: queries or keys hold NaN")
    return weights


def choose(target: Float[Tensor, "B N"], draft: Float[Tensor, "B N"] | None, lengths: Int[Tensor, " B"], *, k: int, m: int,
           n_sink: int, n_recent: int) -> Bool[Tensor, "B N"]:
    """The set S of each row: min(k, its length) of its first `lengths` positions.

    The first `n_sink` and last `n_recent` positions are in it; then the `m` best others by the draft's scores, then the best
    by the target's that are left. Of equal scores the earlier position wins.

    Args:
        target, draft: scores of the history; None where the draft says nothing, which is m = 0.
        m: positions that the draft chooses, from 0 to k - n_sink - n_recent.

    Raises:
        ValueError: shapes or sizes that don't fit, or scores that are NaN.
    """
    _check_sizes(target, draft, lengths, k, m, n_sink, n_recent)
    at = torch.arange(target.shape[1], device=target.device)
    real = at < lengths[:, None]
    taken = real & ((at < n_sink) | (at >= lengths[:, None] - n_recent))
    room = k - taken.sum(-1)
    for scores, most in ((draft, m), (target, k)):
        if scores is not None:
            free = real & ~taken
            best = top_mask(scores.masked_fill(~free, -torch.inf), room.clamp(max=most))
            taken = taken | (best & free)
            room = k - taken.sum(-1)
    return torch.where((lengths <= k)[:, None], real, taken)


def _check_sizes(target: Tensor, draft: Tensor | None, lengths: Tensor, k: int, m: int, n_sink: int, n_recent: int) -> None:
    if target.ndim != 2 or lengths.shape != target.shape[:1] or (draft is not None and draft.shape != target.shape):
        raise ValueError(f"expected scores (B,N) of target and draft and lengths (B), got {tuple(target.shape)}, "
                         f"{None if draft is None else tuple(draft.shape)} and {tuple(lengths.shape)}")
    if k < n_sink + n_recent + 1 or not 0 <= m <= k - n_sink - n_recent:
        raise ValueError(f"k={k}, m={m}: expected k of at least {n_sink + n_recent + 1} and m from 0 to k - "
                         f"{n_sink + n_recent}")
    for name, scores in (("target", target), ("draft", draft)):
        if scores is not None and bool(torch.isnan(scores).any()):
            raise ValueError(f"the {name}'s scores are NaN")


def attend_selected(q: Float[Tensor, "B Hq T D"], k: Float[Tensor, "B H S D"], v: Float[Tensor, "B H S D"],
                    kept: Int[Tensor, " n"], positions: Int[Tensor, "B T"], *, scale: float, window: int | None = None,
                    softcap: float | None = None) -> Float[Tensor, "B Hq T D"]:
    """Attention of the newest T tokens over the slots `kept` of what came before and, causally, over themselves.

    Args:
        k, v: everything held; the last T slots are the queries' own.
        kept: slots below S - T, ascending; slot = position.
        positions: of the queries. With `window`, a query sees the keys less than that far behind it.
    """
    T, S = q.shape[2], k.shape[2]
    own = torch.arange(S - T, S, device=k.device)
    index = torch.cat([kept, own])
    mask = None
    if window is not None:
        at = torch.cat([kept.expand(q.shape[0], -1), positions], 1)
        mask = (positions[:, :, None] - at[:, None] < window)[:, None]
    return attend(q, k.index_select(2, index), v.index_select(2, index), scale=scale, causal=True, mask=mask, softcap=softcap,
                  return_lse=False)[0]


def kv_heads(heads: Sequence[int], group: int) -> list[int]:
    """The key heads that query heads read."""
    return [head // group for head in heads]
