"""Pages of a prefix: what a page can score at most for a query, which pages queries choose, and attention to chosen ones.

A page is P keys in a row (the last one may be shorter); kept of it are the least and the largest key of each channel. A
query's score of a page is

    u = sum_c max(q_c kmin_c, q_c kmax_c)  >=  q . k  for every key k of the page

(Quest, arXiv:2406.10774). Pages count from a row's first real token. What is chosen for the query heads of a key-value
head is loaded once, as a union.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.decoding.blocks import Part, Prefix
from longspan.kernels import attend


@dataclass(frozen=True, eq=False)
class PageBounds:
    """Least and largest key of every page of one layer; which pages of a row hold keys."""

    low: Float[Tensor, "B Hkv M D"]
    high: Float[Tensor, "B Hkv M D"]
    valid: Bool[Tensor, "B M"]


def page_bounds(prefix: Prefix, layer: int, size: int) -> PageBounds:
    """The bounds of a layer's pages. They are kept with the prefix: when it grew, only the last pages are made anew.

    Raises ValueError for a page of no keys.
    """
    if size < 1:
        raise ValueError(f"a page has at least one key, got {size}")
    k, key = prefix.k[layer], ("pages", layer, size)
    total = k.shape[2]
    pages = -(-total // size)
    known: tuple[int, PageBounds] | None = prefix.notes.get(key)
    if known is not None and known[0] == total:
        return known[1]
    first = 0 if known is None or prefix.pad is not None else known[0] // size  # whole pages stay what they are
    low, high = _bounds(_from_first_token(k, prefix.pad)[:, :, first * size :], size, prefix.padding)
    if first and known is not None:
        low, high = (torch.cat([old[:, :, :first], new], 2) for old, new in ((known[1].low, low), (known[1].high, high)))
    held = -(-(total - prefix.padding) // size)
    made = PageBounds(low, high, torch.arange(pages, device=k.device) < held[:, None])
    prefix.notes[key] = (total, made)
    return made


def _from_first_token(k: Float[Tensor, "B Hkv N D"], pad: Int[Tensor, " B"] | None) -> Float[Tensor, "B Hkv N D"]:
    """Keys moved to the front of their rows; what follows the last one repeats it."""
    if pad is None:
        return k
    at = (torch.arange(k.shape[2], device=k.device) + pad[:, None]).clamp(max=k.shape[2] - 1)
    return k.gather(2, at[:, None, :, None].expand_as(k))


def _bounds(k: Float[Tensor, "B Hkv N D"], size: int, pad: Int[Tensor, " B"]) -> tuple[Tensor, Tensor]:
    missing = -k.shape[2] % size
    if missing:  # the last page is filled with its last key, which changes neither bound
        k = torch.cat([k, k[:, :, -1:].expand(-1, -1, missing, -1)], 2)
    paged = k.unflatten(2, (-1, size))
    return paged.amin(3), paged.amax(3)


def page_scores(q: Float[Tensor, "B H A D"], bounds: PageBounds) -> Float[Tensor, "B H A M"]:
    """The most that q . k can be in each page, for each query; -inf for pages without keys."""
    group = q.shape[1] // bounds.low.shape[1]
    q = q.float().unflatten(1, (-1, group))
    # The larger product is with the largest key where a query's channel is positive, else with the least one.
    u = q.clamp(min=0) @ bounds.high.float().mT[:, :, None] + q.clamp(max=0) @ bounds.low.float().mT[:, :, None]
    return u.flatten(1, 2).masked_fill(~bounds.valid[:, None, None], -torch.inf)


def chosen_pages(q: Float[Tensor, "B H A D"], bounds: PageBounds, count: int) -> Bool[Tensor, "B H A M"]:
    """Each query's `count` pages of the highest score; of equals the first."""
    u = page_scores(q, bounds)
    if count >= u.shape[-1]:
        return bounds.valid[:, None, None].expand_as(u)
    top = u.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(u, dtype=torch.bool).scatter_(-1, top, True) & bounds.valid[:, None, None]


def union_over_rows(own: Bool[Tensor, "B H A M"], kv_heads: int) -> Bool[Tensor, "B Hkv M"]:
    """The pages that any query of a key-value head chose."""
    return own.unflatten(1, (kv_heads, -1)).any(3).any(2)


def attend_pages(
    q: Float[Tensor, "B H A D"], prefix: Prefix, layer: int, chosen: Bool[Tensor, "B Hkv M"], size: int,
    own: Bool[Tensor, "B H A M"] | None = None,
) -> tuple[Float[Tensor, "B H A D"], Float[Tensor, "B H A"], Int[Tensor, " B"]]:
    """Attention to the chosen pages, float32; with `own`, each query to its own ones among them.

    Returns output, log-sum-exp, and how many keys of each sequence were loaded, over its key-value heads. Keys of other
    pages are never touched.
    """
    k, v = prefix.k[layer], prefix.v[layer]
    rows, kv_heads, total, _ = k.shape
    counts = chosen.sum(-1)
    width = max(1, int(counts.max()))
    # Chosen pages in their order; slots beyond a head's count repeat its first page and are masked.
    order = (~chosen).byte().argsort(dim=-1, stable=True)[..., :width]
    slot = torch.arange(width, device=k.device) < counts[..., None]
    order = torch.where(slot, order, order[..., :1])
    keys = order[..., None] * size + torch.arange(size, device=k.device) + prefix.padding[:, None, None, None]
    there = (slot[..., None] & (keys < total)).flatten(2)
    keys = keys.clamp(max=total - 1).flatten(2)
    head = torch.arange(rows * kv_heads, device=k.device).view(rows, kv_heads, 1) * total
    loaded_k, loaded_v = (t.reshape(-1, t.shape[-1])[(keys + head).flatten()].view(*keys.shape, -1) for t in (k, v))
    mask = None if own is None and bool(there.all()) else there[:, :, None]
    if own is not None and mask is not None:
        group = q.shape[1] // kv_heads
        wanted = own.gather(-1, order.repeat_interleave(group, 1)[:, :, None].expand(*own.shape[:3], width))
        mask = mask.repeat_interleave(group, 1) & wanted.repeat_interleave(size, -1)
    out, lse = attend(q, loaded_k, loaded_v, causal=False, mask=mask)
    return out.to(torch.promote_types(out.dtype, torch.float32)), lse, there.sum((1, 2))


def page_part(q: Float[Tensor, "B H A D"], prefix: Prefix, layer: int, size: int, budget: int,
              union: bool) -> tuple[Part, int, int]:
    """Attention of queries to the pages they choose, `budget` tokens each: to the union of them over a key-value head, or
    each query to its own.

    Returns the part, and the keys and bounds read, over sequences and key-value heads.
    """
    bounds = page_bounds(prefix, layer, size)
    own = chosen_pages(q, bounds, -(-budget // size))
    chosen = union_over_rows(own, prefix.k[layer].shape[1])
    out, lse, keys = attend_pages(q, prefix, layer, chosen, size, None if union else own)
    return (out, lse), int(keys.sum()), 2 * prefix.k[layer].shape[1] * int(bounds.valid.sum())
