"""Quest: every query head reads the pages of the cache whose keys could match its query best.

1. The history is cut into pages of 16 entries. A page remembers the least and the largest value of every channel of its keys.
2. u_p = sum over channels c of max(q_c least_c, q_c largest_c) bounds what any key of page p can score with the query q.
3. Each query head takes the pages with the largest bounds, and always the newest page. The first two layers read everything.

Every row chooses for itself; the heads of a group load the union of their pages, and attend to their own alone. With a draft
that proposes nothing this is Quest as it decodes; with one, all proposed tokens are read so. Nothing is evicted, and the text
follows the target's law over the pages read, not its own (arXiv:2406.10774).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache import top_mask
from longspan.decoding.base import Checker, Draft, Proposal, Target, Verifier
from longspan.decoding.recent import check_whole, reading
from longspan.kernels import attend, causal_mask
from longspan.models.call import LayerCall
from longspan.registry import knob, method

LEAST_PAGES = 3


@method("quest", kind="verifier", paper="arXiv:2406.10774",
        summary="Each query head reads the pages whose keys could match best; all pages stay.")
class Quest(Verifier):
    """Page selection by bounds, for one token at a time or several."""

    budget: int = knob(1024, "entries a query head reads of the history", low=1)
    page: int = knob(16, "entries of a page", low=1)
    dense_layers: int = knob(2, "first layers that read everything", low=0)

    @property
    def pages(self) -> int:
        """Pages a head reads, the newest included."""
        return max(LEAST_PAGES, self.budget // self.page)

    def begin(self, target: Target, draft: Draft) -> QuestChecker:
        check_whole(target, self)
        return QuestChecker(target, self)


class QuestChecker(Checker):
    """Reads the proposals of one sequence page by page."""

    def __init__(self, target: Target, quest: Quest) -> None:
        super().__init__(target)
        self.quest = quest
        self.bounds: dict[int, tuple[Tensor, Tensor]] = {}
        """Least and largest values (1,H,P,D) of each layer's pages. A page that is full never changes."""
        self.loaded = self.held = 0
        """Entries of the history loaded by key heads so far, and how many there were."""

    def check(self, last: int, proposal: Proposal) -> Float[Tensor, "g+1 V"]:
        with reading(self.target.cache, self._read):
            return super().check(last, proposal)

    def _read(self, call: LayerCall, q: Tensor, positions: Tensor, store: Any) -> Tensor | None:
        k, v, size = store.tail.keys, store.tail.values, self.quest.page
        history = k.shape[2] - q.shape[2]
        older, others = max(0, history - 1) // size, self.quest.pages - 1  # the newest page is read by everybody
        self.held += history * k.shape[1]
        if call.layer < self.quest.dense_layers or older <= others or call.window is not None:
            self.loaded += history * k.shape[1]
            return None
        picked = choose_pages(page_bounds(q, *self._bounds(call.layer, k, older)), others)
        union = picked.view(1, k.shape[1], -1, older).any(2)
        self.loaded += int(union.sum()) * size + (history - older * size) * k.shape[1]
        return attend_pages(q, k, v, picked, union, size, scale=call.scale, softcap=call.softcap)

    def _bounds(self, layer: int, k: Float[Tensor, "1 H S D"], pages: int) -> tuple[Tensor, Tensor]:
        """The bounds of the first `pages` pages, of which most are known from earlier rounds."""
        known = self.bounds.get(layer)
        have = 0 if known is None else known[0].shape[2]
        if pages > have:
            fresh = bounds_of(k[:, :, have * self.quest.page : pages * self.quest.page], self.quest.page)
            least, largest = (t if known is None else torch.cat([known[i], t], 2) for i, t in enumerate(fresh))
            self.bounds[layer] = least, largest
        least, largest = self.bounds[layer]
        return least[:, :, :pages], largest[:, :, :pages]


def bounds_of(k: Float[Tensor, "B H S D"], size: int) -> tuple[Float[Tensor, "B H P D"], Float[Tensor, "B H P D"]]:
    """Least and largest value of every channel in each whole page of `size` keys."""
    return tuple(k.unflatten(2, (-1, size)).aminmax(dim=3))  # type: ignore[return-value]


def page_bounds(q: Float[Tensor, "B Hq T D"], least: Float[Tensor, "B H P D"], largest: Float[Tensor, "B H P D"]
                ) -> Float[Tensor, "B Hq T P"]:
    """u_p of every page for every query: no key of the page has a larger product with it. Float32."""
    B, heads, T, D = q.shape
    own = q.float().reshape(B, least.shape[1], -1, D)
    bound = own.clamp(min=0) @ largest.float().mT + own.clamp(max=0) @ least.float().mT
    return bound.reshape(B, heads, T, -1)


def choose_pages(bounds: Float[Tensor, "B Hq T P"], n: int) -> Bool[Tensor, "B Hq T P"]:
    """The `n` pages with the largest bounds; of equal ones the earlier."""
    return top_mask(bounds, torch.full(bounds.shape[:-1], n, device=bounds.device))


def attend_pages(q: Float[Tensor, "1 Hq T D"], k: Float[Tensor, "1 H S D"], v: Float[Tensor, "1 H S D"],
                 picked: Bool[Tensor, "1 Hq T P"], union: Bool[Tensor, "1 H P"], size: int, *, scale: float,
                 softcap: float | None = None) -> Float[Tensor, "1 Hq T D"]:
    """Attention of every head and row over its own pages and, causally, over all that comes after the P pages.

    Only the pages in `union` of a key head are gathered.
    """
    heads, T, pages = picked.shape[1:]
    most = int(union.sum(-1).max())
    order: Int[Tensor, "1 H m"] = (~union).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
    rows = (order[..., None] * size + torch.arange(size, device=q.device)).flatten(2)

    def take(t: Tensor) -> Tensor:
        return torch.cat([t.gather(2, rows[..., None].expand(-1, -1, -1, t.shape[-1])), t[:, :, pages * size :]], 2)

    per_head = order.repeat_interleave(heads // union.shape[1], 1)[:, :, None].expand(-1, -1, T, -1)
    own = picked.gather(-1, per_head).repeat_interleave(size, -1)
    rest = causal_mask(T, k.shape[2] - pages * size, q.device).expand(1, heads, -1, -1)
    return attend(q, take(k), take(v), scale=scale, causal=False, mask=torch.cat([own, rest], -1), softcap=softcap,
                  return_lse=False)[0]
