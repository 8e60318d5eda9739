"""Quest on every row of a block: each query reads its best pages of the prefix, in every step anew.

The baseline of block-wise sparse attention. Nothing is remembered, so nothing grows old; but the rows of a block choose
different pages, and their union, which is what must be loaded, grows towards the whole prefix (arXiv:2406.10774, applied to
a block as LoSA's comparison does, arXiv:2604.12056).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longspan.decoding.blocks import BlockReader, Denoising, Part, Prefix
from longspan.decoding.denoising.pages import page_part
from longspan.registry import knob, method


@method("quest-rows", kind="denoising", paper="arXiv:2406.10774",
        summary="Every row of a block reads its best pages of the prefix, in every denoising step.")
class QuestRows(Denoising):
    """Top pages by the bound of Quest for every query head and row; their union over a key-value head is loaded once."""

    budget: int = knob(128, "prefix tokens a query chooses", low=1)
    page: int = knob(16, "keys a page", low=1)
    attend: str = knob("union", "rows attend to all loaded pages, or to their own", choices=("union", "own"))
    dense_layers: int = knob(0, "first layers that always read everything", low=0)

    def begin(self, prefix: Prefix, length: int, block: int) -> BlockReader:
        return QuestReader(self, prefix, length)


class QuestReader(BlockReader):
    """Chooses pages in every pass."""

    def __init__(self, method: QuestRows, prefix: Prefix, length: int) -> None:
        super().__init__(prefix, length)
        self.method = method

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        m = self.method
        if layer < m.dense_layers or m.budget >= self.prefix.length:
            return self.fresh(layer, q)
        part, keys, bounds = page_part(q, self.prefix, layer, m.page, m.budget, m.attend == "union")
        self.count(keys)
        self.reads.bounds += bounds
        return part
