"""SampleAttention: a local window and the key columns that sampled queries attend to (arXiv:2406.15486).

Attention of real heads is mostly a window beside the diagonal and a few columns that many queries share. Which columns is
found from the exact attention of a few query rows, spread evenly; their sums rank the keys before the window. As published
the sample and its columns are those of the whole prompt and as many as hold `alpha` of the sampled attention; with `group`
every so many rows have a sample and columns of their own, which follow the text, and with `columns` their number is fixed,
so that the work per query doesn't grow with the prompt.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels.plan import ReadPlan
from longspan.prefill.base import ReadContext, Selector, attention_rows, forced, keep_mass, keep_top_k, readable
from longspan.registry import Refused, knob, method


@method("sample-attention", kind="selector", system="baselines", paper="arXiv:2406.15486",
        summary="Read a local window and the key columns that sampled queries attend to.",
        capabilities=("block-plan", "columns", "all-queries"))
class SampleAttention(Selector):
    """Columns per query head, from sampled rows; first keys and window are always read."""

    columns: int | None = knob(None, "key columns to read; as many as hold alpha if left out", low=1)
    shared: bool = knob(False, "heads of a layer share out their columns: more for those whose attention is spread out")
    alpha: float = knob(0.95, "share of the sampled attention that window and columns hold", low=0, high=1)
    group: int | None = knob(None, "rows that share a sample and columns, in tokens; the whole prompt if left out", low=1)
    rows: int = knob(64, "sampled rows of the prompt, or of each group", low=1)
    window: int = knob(256, "newest keys of every query that are always read", low=1)
    n_sink: int = knob(4, "first keys that are always read", low=0)
    block: int = knob(128, "tokens per query and key block", low=1)

    def check(self) -> None:
        if self.alpha <= 0:
            raise Refused(f"{self}: expected alpha above 0 and up to 1, such as 0.95.")
        if self.group is not None and self.group % self.block:
            raise Refused(f"{self}: expected a group of whole blocks of {self.block}; the nearest is "
                          f"{max(1, round(self.group / self.block)) * self.block}.")

    def select(self, x: ReadContext) -> ReadPlan:
        group = x.q_len if self.group is None else self.group
        keys = x.k.float().mT
        found = [self._columns(x, keys, start, min(start + group, x.q_len)) for start in range(0, x.q_len, group)]
        n_q, per = -(-x.q_len // self.block), -(-group // self.block)
        blocks = forced(x, self.block, sink=self.n_sink, window=self.window) & readable(x, self.block)
        blocks = blocks.expand(x.q.shape[0], x.heads, -1, -1)
        plan = ReadPlan.from_mask(blocks, q_len=x.q_len, k_len=x.k_len, q_block=self.block, k_block=self.block)
        offsets, columns = listed(found, [per] * (len(found) - 1) + [n_q - per * (len(found) - 1)])
        return ReadPlan(x.q_len, x.k_len, self.block, self.block, plan.offsets, plan.blocks, offsets, columns)

    def _columns(self, x: ReadContext, keys: Float[Tensor, "B Hkv D S"], start: int, stop: int) -> Bool[Tensor, "B H S"]:
        """The columns that the query rows from `start` to `stop` read."""
        n, seen = min(self.rows, stop - start), x.k_len - x.q_len + stop
        at = start + torch.arange(1, n + 1, device=x.q.device) * (stop - start) // n - 1
        weights = attention_rows(x, at, seen, keys)
        # What a sampled row reads in its window, or first of all, needs no column.
        first = max(0, x.k_len - x.q_len + int(at[0]) - self.window + 1)
        own = x.k_len - x.q_len + at[:, None]
        near = torch.arange(first, seen, device=at.device) > own - self.window
        weights[..., : self.n_sink] = 0.0
        weights[..., first:].masked_fill_(near, 0.0)
        sums = weights.sum(-2)
        if self.columns is not None:
            if self.shared:
                chosen = keep_top_k(sums.flatten(1), self.columns * x.heads).view_as(sums) & (sums > 0)
            else:
                chosen = keep_top_k(sums, self.columns) & (sums > 0)
        else:
            asked = sums.new_full((1, 1), n) if x.valid is None else x.valid[:, own[:, 0]].sum(-1)[:, None].clamp(min=1)
            beyond = sums.sum(-1) / asked  # the share that isn't near
            chosen = keep_mass(sums / asked[..., None], (self.alpha - 1 + beyond).clamp(min=0.0))
        if x.valid is not None:
            chosen = chosen & x.valid[:, None, :seen]
        return F.pad(chosen, (0, x.k_len - seen))


def listed(found: list[Bool[Tensor, "B H S"]], repeats: list[int]) -> tuple[Int[Tensor, "B H G+1"], Int[Tensor, " m"]]:
    """Columns in compressed rows, those of each group once for every query block in it."""
    if len(found) == 1:
        repeats = [1]
    masks = torch.stack(found, 2)
    counts = masks.sum(-1)
    B, H, G = counts.shape
    items = masks.nonzero()[:, -1].int().split(counts.flatten().tolist())
    columns = [items[(row * G) + g] for row in range(B * H) for g in range(G) for _ in range(repeats[g])]
    sizes = counts.repeat_interleave(torch.tensor(repeats, device=counts.device), -1)
    ends = sizes.flatten().cumsum(0).view_as(sizes)
    return torch.cat((ends[..., :1] - sizes[..., :1], ends), -1), torch.cat(columns)


__all__ = ["SampleAttention", "listed"]
