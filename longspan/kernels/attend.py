"""The attention core: exact attention over a part of the keys, and the exact merge of such parts.

Softmax attention over a set of keys S is sum_s exp(z_s) v_s / sum_s exp(z_s) with z_s = scale * q.k_s. When S is cut
into disjoint parts, each part can be normalised alone as long as it also reports its log-sum-exp
lse = log sum_s exp(z_s): the whole is the average of the parts' outputs weighted by exp(lse_part - lse), with
lse = log sum_parts exp(lse_part). Windows and memories, cached prefixes and new tokens, rings and chunks of heads,
sparse and condensed tiers are all added up this way (online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867;
attention in parts: FlashAttention, arXiv:2205.14135; flash-decoding).

`attend_reference` defines the result; `attend` returns the same from PyTorch's fused CPU kernel where one applies.
A part in which a query may look at nothing has output 0 and lse -inf, and weighs nothing in a merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

PLAIN_SCORES = 1 << 24
"""Scores (query-key pairs) the plain version holds at once; longer queries are read in chunks of rows."""
FOLD_ROWS = 64
"""Up to this many query rows, the query heads that share a key head are read as rows of one head: K is read once."""


def attend(
    q: Float[Tensor, "B Hq T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    *,
    scale: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "#B #Hq #T #S"] | None = None,
    softcap: float | None = None,
    return_lse: bool = True,
) -> tuple[Float[Tensor, "B Hq T Dv"], Float[Tensor, "B Hq T"] | Any]:
    """Exact attention of `q` over one part of the keys, with the log-sum-exp that `merge` needs.

    `causal` is aligned at the bottom right: query row i stands at key slot S-T+i and sees the slots up to its own.
    `mask` is True where a query may look (heads: Hq, Hkv or 1) and is applied on top of `causal`. `scale` defaults to
    1/sqrt(D), `softcap` bounds the scaled scores by softcap*tanh(score/softcap) (Gemma 2, arXiv:2408.00118). Query
    head h reads key head h // (Hq/Hkv).

    Returns (out in the dtype of `q`, lse in natural log, float32; float64 for float64 inputs). A query that may look
    at nothing gets 0 and -inf. With ``return_lse=False`` lse is None and the call is the very call of
    `scaled_dot_product_attention` that transformers makes, bit for bit. Raises ValueError on shapes that don't fit.
    """
    _check(q, k, v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    T, S = q.shape[2], k.shape[2]
    if not q.numel() or not S:
        return _nothing(q, v, return_lse)
    causal = causal and T > 1
    if softcap is None and not return_lse:
        return _sdpa(q, k, v, scale, causal, mask), None
    if softcap is not None or not _fused(q, k, v):
        return attend_reference(
            q, k, v, scale=scale, causal=causal, mask=mask, softcap=softcap, return_lse=return_lse
        )
    if causal and mask is not None:
        mask, causal = mask & causal_mask(T, S, q.device), False
    if causal and T != S:
        return _own_and_past(q, k, v, scale)
    return _flash_cpu(q, k, v, scale, causal, mask)


def attend_reference(
    q: Float[Tensor, "B Hq T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    *,
    scale: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "#B #Hq #T #S"] | None = None,
    softcap: float | None = None,
    return_lse: bool = True,
) -> tuple[Float[Tensor, "B Hq T Dv"], Float[Tensor, "B Hq T"] | Any]:
    """The definition of `attend`, in plain float32 (float64 for float64 inputs) and differentiable, lse included.

    Same arguments and results as `attend`. Long queries are read in chunks of rows, so that the score matrix stays
    small.
    """
    _check(q, k, v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    T, S = q.shape[2], k.shape[2]
    if not q.numel() or not S:
        return _nothing(q, v, return_lse)
    if mask is not None:
        mask = _mask_per_query_head(mask, q.shape[1], k.shape[1])
    wide = _statistics_dtype(q)
    k_all, v_all = _repeat(k, q.shape[1]).to(wide), _repeat(v, q.shape[1]).to(wide)
    rows = max(1, PLAIN_SCORES // max(1, q.shape[0] * q.shape[1] * S))
    outs, lses = [], []
    for start in range(0, T, rows):
        stop = min(T, start + rows)
        see = None if mask is None else mask[:, :, start:stop] if mask.shape[2] > 1 else mask
        if causal:
            own = causal_mask(T, S, q.device, start, stop)
            see = own if see is None else see & own
        out, lse = _softmax_rows(q[:, :, start:stop].to(wide), k_all, v_all, scale, see, softcap)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2) if return_lse else None


def merge(
    parts: Sequence[tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]],
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Attention over the union of disjoint key sets from the attention over each: the exact log-sum-exp merge.

    Each part is (out, lse) as `attend` returns it; parts with lse -inf weigh nothing, and where all are empty the
    result is 0 and -inf. Statistics are float32 (float64 if a part's lse is). The output has the parts' dtype.
    Raises ValueError without parts or when their shapes differ.
    """
    if not parts:
        raise ValueError("merge needs at least one part (out, lse)")
    shapes = {(tuple(out.shape), tuple(lse.shape)) for out, lse in parts}
    if len(shapes) > 1 or any(out.shape[:-1] != lse.shape for out, lse in parts):
        raise ValueError(f"merge needs parts of one shape, out (..., D) with lse (...), got {sorted(shapes)}")
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse.float() if lse.dtype != torch.float64 else lse for _, lse in parts])
    weights, lse = softmax_and_lse(lses, 0)
    total = parts[0][0].to(weights.dtype) * weights[0].unsqueeze(-1)
    for (out, _), weight in zip(parts[1:], weights[1:], strict=True):
        total = torch.addcmul(total, out.to(weights.dtype), weight.unsqueeze(-1))
    return total.to(parts[0][0].dtype), lse


def softmax_and_lse(x: Float[Tensor, "*n"], dim: int) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*rest"]]:
    """Softmax over `dim` and the log-sum-exp (without that axis); where all is -inf: 0 and -inf, gradients 0."""
    top = x.detach().amax(dim, keepdim=True)
    weights = torch.exp(x - top.masked_fill(torch.isneginf(top), 0.0))
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return weights / total, (total.log() + top).masked_fill(empty, -math.inf).squeeze(dim)


def causal_mask(
    T: int, S: int, device: torch.device | str = "cpu", start: int = 0, stop: int | None = None
) -> Bool[Tensor, "T S"]:
    """Rows `start` to `stop` of the bottom-right aligned causal mask: row i sees slots up to S-T+i."""
    rows = torch.arange(start, T if stop is None else stop, device=device)
    return torch.arange(S, device=device) <= (rows + S - T)[:, None]


# -------------------------------------------------------------------------------------------------------- plain version


def _softmax_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float, see: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    scores = (q @ k.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if see is not None:
        scores = scores.masked_fill(~see, -math.inf)
    weights, lse = softmax_and_lse(scores, -1)
    return weights @ v, lse


def _nothing(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Any]:
    """No keys (or no queries): output 0, lse -inf."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    return out, q.new_full(q.shape[:-1], -math.inf, dtype=_statistics_dtype(q)) if return_lse else None


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """(B,Hkv,S,D) -> (B,heads,S,D): each key head stands `heads`/Hkv times in a row."""
    group = heads // x.shape[1]
    if group == 1:
        return x
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, group, s, d).reshape(b, heads, s, d)


def _mask_per_query_head(mask: Tensor, q_heads: int, kv_heads: int) -> Tensor:
    """`mask` as (#B, Hq|1, #T, #S)."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.shape[1] in (1, q_heads):
        return mask
    return mask.repeat_interleave(q_heads // kv_heads, 1)


# -------------------------------------------------------------------------------------------------------- fused version


def _fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's fused CPU kernel applies; its log-sum-exp has no gradient, so training takes the plain way."""
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return q.device.type == "cpu" and q.dtype.is_floating_point and not wants_gradient


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """The call transformers makes (same arguments, so the same kernel and the same bits)."""
    T, S, heads = q.shape[2], k.shape[2], q.shape[1]
    if mask is None and causal and T != S:
        mask, causal = causal_mask(T, S, q.device), False
    elif mask is not None and causal:
        mask, causal = mask & causal_mask(T, S, q.device), False
    gqa = heads != k.shape[1]
    if mask is None and k.shape[-1] == v.shape[-1] <= 256:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
    if mask is not None:
        mask = _mask_per_query_head(mask, heads, k.shape[1])
    return F.scaled_dot_product_attention(
        q, _repeat(k, heads), _repeat(v, heads), attn_mask=mask, is_causal=causal, scale=scale
    )


def _own_and_past(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Bottom-right causal attention with T != S from the two cases the kernel knows: full, and causal and square."""
    T, S = q.shape[2], k.shape[2]
    if T > S:
        early, late = q[:, :, : T - S], q[:, :, T - S :]
        empty, none = _nothing(early, v, True)
        out, lse = _flash_cpu(late, k, v, scale, True, None)
        return torch.cat((empty, out), 2), torch.cat((none, lse), 2)
    past = _flash_cpu(q, k[:, :, : S - T], v[:, :, : S - T], scale, False, None)
    return merge((past, _flash_cpu(q, k[:, :, S - T :], v[:, :, S - T :], scale, True, None)))


def _flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused CPU kernel: (out, lse), here with all-masked rows, other value widths and folded groups."""
    d, dv = q.shape[-1], v.shape[-1]
    if d != dv:  # The kernel wants one width; zeros change neither scores nor the columns kept.
        width = max(d, dv)
        q, k, v = F.pad(q, (0, width - d)), F.pad(k, (0, width - d)), F.pad(v, (0, width - dv))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    T, heads, kv_heads = q.shape[2], q.shape[1], k.shape[1]
    fold = heads != kv_heads and not causal and T <= FOLD_ROWS
    if fold:
        q = q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    bias = None
    if mask is not None:
        mask = _fold_mask(mask, heads, kv_heads, T) if fold else _mask_per_query_head(mask, heads, kv_heads)
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    if mask is not None:  # The kernel reports 0 for rows that see nothing.
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    if fold:
        out, lse = out.reshape(q.shape[0], heads, T, -1), lse.reshape(q.shape[0], heads, T)
    return out[..., :dv] if d != dv else out, lse


def _fold_mask(mask: Tensor, heads: int, kv_heads: int, T: int) -> Tensor:
    """`mask` for queries folded to (B, Hkv, G*T, D): (#B, Hkv|1, G*T|1, #S)."""
    mask = _mask_per_query_head(mask, heads, kv_heads)
    b, h, t, s = mask.shape
    group = heads // kv_heads
    if h == 1:
        return mask if t == 1 else mask[:, :, None].expand(b, 1, group, t, s).reshape(b, 1, group * t, s)
    return mask.reshape(b, kv_heads, group, t, s).expand(b, kv_heads, group, T, s).reshape(b, kv_heads, group * T, s)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        raise ValueError(
            "attend expects q (B,Hq,T,D), k (B,Hkv,S,D), v (B,Hkv,S,Dv) with Hq a multiple of Hkv, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if mask is None:
        return
    wanted = (q.shape[0], (q.shape[1], k.shape[1]), q.shape[2], k.shape[2])
    heads = mask.shape[-3] if mask.ndim > 2 else 1
    full = (wanted[0], heads if heads in wanted[1] else wanted[1][0], wanted[2], wanted[3])
    if mask.dtype != torch.bool or mask.ndim > 4 or any(
        have not in (1, want) for have, want in zip(reversed(mask.shape), reversed(full))
    ):
        raise ValueError(
            f"attend expects a Boolean mask broadcastable to (B, Hq or Hkv, T, S) = ({wanted[0]}, {q.shape[1]} or "
            f"{k.shape[1]}, {wanted[2]}, {wanted[3]}), got {mask.dtype} {tuple(mask.shape)}"
        )
