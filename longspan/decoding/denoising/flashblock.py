"""FlashBlock: attention to the prefix is computed once for several denoising steps.

While a block is denoised its prefix stays frozen, and the part of attention that points at it barely moves from step to
step. So it is computed at the block's first step and kept (output and log-sum-exp); later steps compute attention inside
the block only and merge the two. One list of dirty positions counts the tokens committed since the kept part was
computed; when it holds `tau` of them, or when the finished block is read for its keys and values, the part is computed
anew. Every sequence decides by itself.

    refresh = nothing kept, or |dirty| >= tau, or the saving pass
    dirty   = committed now if refresh, else dirty with what is committed now

With a `budget` the prefix is split at every refresh: pages that the block's queries choose (see `pages`) are read in every
step, and only the attention to all other pages is kept. Plain sparse attention loses that rest; here it is merely old.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.decoding.blocks import BlockReader, Denoising, Part, Prefix, PrefixPart
from longspan.decoding.denoising.pages import attend_pages, chosen_pages, page_bounds, union_over_rows
from longspan.kernels import merge
from longspan.registry import knob, method


@method("flashblock", kind="denoising", system="flashblock", paper="arXiv:2602.05305",
        summary="Keep a block's attention to the prefix, and compute it anew after tau committed tokens.")
class FlashBlock(Denoising):
    """Reuse of block-external attention (Chen et al., ICML 2026). `tau` of 0 or less reads the prefix in every step."""

    tau: int = knob(2, "committed tokens after which the prefix is read again; 0: always")
    budget: int = knob(0, "prefix tokens a query reads in every step, the rest is kept; 0: all is kept", low=0)
    page: int = knob(16, "keys a page, with a budget", low=1)

    def begin(self, prefix: Prefix, length: int, block: int) -> BlockReader:
        return FlashBlockReader(self, prefix, length) if not self.budget else SplitReader(self, prefix, length)


class FlashBlockReader(BlockReader):
    """One block's kept parts, and its dirty positions."""

    def __init__(self, method: FlashBlock, prefix: Prefix, length: int) -> None:
        super().__init__(prefix, length)
        self.method = method
        self.dirty = torch.zeros(prefix.rows, length, dtype=torch.bool, device=prefix.k[0].device)
        self.refresh = self.dirty.any(1)

    def begin(self, step: int, save: bool = False) -> None:
        super().begin(step, save)
        due = self.dirty.sum(1) >= self.method.tau
        self.refresh = torch.ones_like(due) if save or self.parts[0] is None else due

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        kept, rows = self.parts[layer], self.refresh.nonzero()[:, 0]
        if kept is not None:
            kept.check(q)
        if kept is None or len(rows) == len(q):
            part = self.fresh(layer, q)
            if not self.save:  # the block is done: nobody will ask again
                self.parts[layer] = PrefixPart(*part)
            return part
        if len(rows):
            kept.put(rows, self.fresh(layer, q[rows], rows))
        return kept.o, kept.lse

    def changed(self, where: Bool[Tensor, "B T"]) -> None:
        """Committed tokens are dirty, and so are tokens that were masked again."""
        self.dirty = torch.where(self.refresh[:, None], where, self.dirty | where)

    def keep(self, rows: Int[Tensor, " R"]) -> None:
        super().keep(rows)
        self.dirty, self.refresh = self.dirty[rows], self.refresh[rows]


class SplitReader(FlashBlockReader):
    """The same, with chosen pages read in every step; `parts` hold the attention to the others."""

    def __init__(self, method: FlashBlock, prefix: Prefix, length: int) -> None:
        super().__init__(method, prefix, length)
        self.chosen: list[Bool[Tensor, "B Hkv M"] | None] = [None] * len(prefix.k)

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        kept, rows = self.parts[layer], self.refresh.nonzero()[:, 0]
        if kept is not None:
            kept.check(q)
        if self.save:
            return self.fresh(layer, q)
        chosen = self.chosen[layer]
        if kept is None or chosen is None or len(rows):
            self.choose(layer, q)
            chosen, kept = self.chosen[layer], self.parts[layer]
            assert chosen is not None and kept is not None
        out, lse, keys = attend_pages(q, self.prefix, layer, chosen, self.method.page)
        # Rows that refresh read everything, their chosen pages included; `choose` counted that.
        self.count(int(keys[~self.refresh].sum()))
        return merge([(out, lse), (kept.o, kept.lse)])

    def choose(self, layer: int, q: Float[Tensor, "B H T D"]) -> None:
        """Pages of the rows that refresh, and attention to their other pages."""
        prefix, size = self.prefix, self.method.page
        bounds = page_bounds(prefix, layer, size)
        own = chosen_pages(q, bounds, -(-self.method.budget // size))
        chosen = union_over_rows(own, prefix.k[layer].shape[1])
        out, lse, _ = attend_pages(q, prefix, layer, ~chosen & bounds.valid[:, None], size)
        here, before, kept = self.refresh, self.chosen[layer], self.parts[layer]
        k, padding = prefix.k[layer], prefix.padding
        self.count(int((k.shape[1] * (k.shape[2] - padding[here])).sum()))
        self.reads.bounds += 2 * k.shape[1] * int(bounds.valid[here].sum())
        if layer == 0:
            self.reads.refreshes += int(here.sum())
        if before is None or kept is None:
            self.chosen[layer], self.parts[layer] = chosen, PrefixPart(out, lse)
            return
        self.chosen[layer] = torch.where(here[:, None, None], chosen, before)
        kept.put(here.nonzero()[:, 0], (out[here], lse[here]))

    def use(self, prefix: Prefix) -> None:
        super().use(prefix)
        self.chosen = [None] * len(prefix.k)

    def keep(self, rows: Int[Tensor, " R"]) -> None:
        super().keep(rows)
        self.chosen = [None if c is None else c[rows] for c in self.chosen]
