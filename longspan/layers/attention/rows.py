"""Attention that needs its scores written out, a few rows of queries at a time.

Softmax has a fused kernel; another normaliser, or one that carries something from query to query, needs the matrix. Here
it is made for as many queries as `SCORES` allows, used, and forgotten; in training it is made again for the gradient. So
memory is bounded by one part, however long the text is::

    for part in row_parts(q, k):
        scores, see = scores_of(q, k, visible, part)        # (B,H,t,S'), (#B,1,t,S')
        out = averaged(weights, v)                          # the values of the S' keys

`by_rows` is that loop for operators whose weights depend on their own row alone. Keys that no query of a part sees are
left out at the end: S' <= S. Everything is float32 (float64 for float64 inputs), outside autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.kernels import causal_mask
from longspan.layers.attention.base import Visible

SCORES = 1 << 22
"""Scores (query-key pairs, heads and batch included) written out at once."""

Weigh = Callable[[Float[Tensor, "B H t S"], Bool[Tensor, "#B 1 t S"]], Float[Tensor, "B H t S"]]


def by_rows(
    weigh: Weigh,
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    visible: Visible,
    *,
    scale: float | None = None,
    bias: Float[Tensor, "#B #H T S"] | None = None,
    most: int = SCORES,
) -> Float[Tensor, "B H T Dv"]:
    """Values averaged with ``weigh(scores, see)``, part by part; the result has the dtype of `q`.

    `weigh` gets scaled scores with the bias and which keys are seen, and returns weights that are 0 for the others.
    """
    check_call(q, k, v)

    def rows(part: slice, *tensors: Any) -> Tensor:
        scores, see = scores_of(tensors[0], tensors[1], visible, part, scale=scale, bias=tensors[3])
        return averaged(weigh(scores, see), tensors[2])

    return in_parts(rows, row_parts(q, k, most), q, k, v, bias)


def in_parts(
    rows: Callable[..., Float[Tensor, "B H t Dv"]], parts: list[slice], q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> Float[Tensor, "B H T Dv"]:
    """``rows(part, q, k, v, *more)`` for each part, joined along the queries, in the dtype of `q`; 0 without keys."""
    if not (q.shape[2] and k.shape[2]):
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        found = [recomputed(len(parts) > 1, rows, part, q, k, v, *more) for part in parts]
    return torch.cat(found, 2).to(q.dtype)


def recomputed(again: bool, work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)``; with `again`, nothing it makes is kept for its gradient, for which it is done once more."""
    if not (again and torch.is_grad_enabled()):
        return work(*args)
    return checkpoint(work, *args, use_reentrant=False, preserve_rng_state=False)


def row_parts(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], most: int = SCORES) -> list[slice]:
    """The queries in parts of at most `most` scores, at least one query each."""
    rows = max(1, most // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(a, min(a + rows, q.shape[2])) for a in range(0, q.shape[2], rows)]


def scores_of(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    visible: Visible,
    part: slice,
    *,
    scale: float | None = None,
    bias: Float[Tensor, "#B #H T S"] | None = None,
) -> tuple[Float[Tensor, "B H t S2"], Bool[Tensor, "#B 1 t S2"]]:
    """scale q.k (1/sqrt(D) by default) plus `bias` of the queries `part`, not masked, and which keys they see."""
    see = seen_by(visible, part)
    end, scale = see.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale
    scores = product(widened(q[:, :, part]) * scale, widened(k[:, :, :end]).mT)
    return (scores if bias is None else scores + bias[..., part, :end].to(scores.dtype)), see


def seen_by(visible: Visible, part: slice) -> Bool[Tensor, "#B 1 t S2"]:
    """Which keys the queries `part` see; under causality alone, up to the last of them."""
    if visible.mask is not None:
        return visible.mask[..., part, :]
    T, S = visible.T, visible.S
    return causal_mask(T, S, visible.device, part.start, part.stop)[None, None, :, : S - T + part.stop]


def averaged(weights: Float[Tensor, "B H t S2"], v: Float[Tensor, "B G S Dv"]) -> Float[Tensor, "B H t Dv"]:
    """The values of the first S' keys, each head's with its weights."""
    return product(weights, widened(v[:, :, : weights.shape[-1]]).to(weights.dtype))


def softmax_seen(scores: Float[Tensor, "B H t S"], see: Bool[Tensor, "#B 1 t S"]) -> Float[Tensor, "B H t S"]:
    """Softmax over the keys seen; 0 for the others, and everywhere in a row that sees nothing."""
    return scores.masked_fill(~see, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~see, 0.0)


def product(x: Float[Tensor, "B H t N"], y: Float[Tensor, "B G N M"]) -> Float[Tensor, "B H t M"]:
    """Matrix product of every query head with the matrix of its key head; no copy of `y` is made."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    return (x.reshape(*y.shape[:2], -1, x.shape[-1]) @ y).reshape(*x.shape[:3], -1)


def widened(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_call(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError, naming the argument, unless q (B,H,T,D), k (B,G,S,D) and v (B,G,S,Dv) belong together.

    H must be a multiple of G, and the T queries are the last of the S keys.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(f"{name} should be a floating tensor of 4 axes (batch, heads, tokens, channels), got {x.dtype} "
                             f"{tuple(x.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v should have the batch, heads and length of k {tuple(k.shape)}, got {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q should have the batch and width of k {tuple(k.shape)} and a multiple of its heads, got "
                         f"{tuple(q.shape)}")
    if q.shape[2] > k.shape[2] > 0:
        raise ValueError(f"q has {q.shape[2]} queries, more than the {k.shape[2]} keys they are the last of")
