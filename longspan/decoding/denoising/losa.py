"""LoSA: of a block's rows, only those that changed read the prefix, and they read chosen pages.

Sparse attention alone saves little on a block: every row chooses its own pages, and the union of them is loaded. But from
one denoising step to the next few rows really change. So a block's first step reads the whole prefix for all rows and
keeps output, log-sum-exp and the queries they were computed for; in every later step and layer

1. each row's score is how far its query moved, e_i = mean over heads and channels of (q_i - q_ref,i)^2;
2. the `k` rows of the highest score are active (of equals the first);
3. active rows choose pages, `budget` tokens a query (see `pages`), the union of which is loaded once a key-value head;
4. their output, log-sum-exp and reference query are replaced; the other rows keep what they have;
5. all rows merge it with attention inside the block.

A rotation changes no length, so the score is the same before and after rotary positions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.decoding.blocks import BlockReader, Denoising, Part, Prefix, PrefixPart
from longspan.decoding.denoising.pages import page_part
from longspan.decoding.noise import Noise
from longspan.registry import Refused, knob, method


@method("losa", kind="denoising", system="losa", paper="arXiv:2604.12056",
        summary="Only the rows of a block that changed most read the prefix again, and only chosen pages of it.")
class LoSA(Denoising):
    """Locality-aware sparse attention (Xi et al., ICML 2026); the ablations of the paper are knobs."""

    k: int = knob(5, "active rows a step", low=0)
    budget: int = knob(128, "prefix tokens an active query chooses", low=1)
    page: int = knob(16, "keys a page", low=1)
    attend: str = knob("union", "active rows attend to all loaded pages, or to their own", choices=("union", "own"))
    ref: str = knob("refresh", "a row's query is compared with that of its latest refresh, or of the previous step",
                    choices=("refresh", "previous"))
    first: str = knob("dense", "how a block's first step reads the prefix", choices=("dense", "sparse"))
    save: str = knob("step", "the pass over the finished block: an ordinary step, or dense", choices=("step", "dense"))
    active: str = knob("top", "which rows are active: those that moved most, or any", choices=("top", "random"))
    dense_layers: int = knob(0, "first layers that always read everything", low=0)
    seed: int = knob(0, "seed of active=random", low=0)

    def begin(self, prefix: Prefix, length: int, block: int) -> BlockReader:
        if self.k > block:
            raise Refused(f"losa(k={self.k}): the model writes blocks of {block} tokens; expected k of at most {block}.")
        return LoSAReader(self, prefix, length)


class LoSAReader(BlockReader):
    """One block's kept parts, and how far its queries moved."""

    def __init__(self, method: LoSA, prefix: Prefix, length: int) -> None:
        super().__init__(prefix, length)
        self.method, self.k = method, min(method.k, length)
        if self.k < method.k:
            self.reads.notes.append(f"losa(k={method.k}): a short block of {length} tokens has {length} active rows at most")

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        m, kept = self.method, self.parts[layer]
        if not bool(torch.isfinite(q).all()):
            raise ValueError(f"layer {layer}: queries hold NaN or infinities, which would win every choice of rows")
        if kept is not None:
            kept.check(q)
        if layer < m.dense_layers or (self.save and m.save == "dense"):
            return self.fresh(layer, q)
        if kept is None:  # a block's first step, or one resumed without what it had kept
            part = self.sparse(layer, q) if m.first == "sparse" else self.fresh(layer, q)
            self.parts[layer] = PrefixPart(*part, q.clone())
            return part
        assert kept.q_ref is not None
        if self.k:
            rows = self.active_rows(layer, q, kept.q_ref)
            at = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
            moved = q.gather(2, at)
            out, lse = self.sparse(layer, moved)
            kept.o.scatter_(2, at, out)
            kept.lse.scatter_(2, at[..., 0], lse)
            kept.q_ref.scatter_(2, at, moved)
        if m.ref == "previous":
            kept.q_ref = q.clone()
        return kept.o, kept.lse

    def active_rows(self, layer: int, q: Float[Tensor, "B H T D"], q_ref: Float[Tensor, "B H T D"]) -> Int[Tensor, "B k"]:
        """The rows of a sequence that moved most; with active=random, any."""
        if self.method.active == "random":
            key: tuple[Any, ...] = (self.method.seed, "losa", self.step, self.save, layer)
            noise = Noise(key)
            start = self.prefix.places(1)[:, 0].tolist()
            e = torch.stack([noise.of(row).gumbel(place, q.shape[2], q.device) for row, place in enumerate(start)])
        else:
            e = movement(q, q_ref)
        return e.argsort(dim=1, descending=True, stable=True)[:, : self.k]

    def sparse(self, layer: int, q: Float[Tensor, "B H A D"]) -> Part:
        """Attention of some rows to the pages they choose; to everything where the budget covers it."""
        m = self.method
        if m.budget >= self.prefix.length:
            return self.fresh(layer, q)
        part, keys, bounds = page_part(q, self.prefix, layer, m.page, m.budget, m.attend == "union")
        self.count(keys)
        self.reads.bounds += bounds
        return part


def movement(q: Float[Tensor, "B H T D"], q_ref: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T"]:
    """How far each row's query moved: the mean over heads and channels of the squared difference, float32."""
    return (q.float() - q_ref.float()).square().mean((1, 3))
