"""The oracle: per row of blocks, the key blocks that hold a share p of the true attention weight.

It computes the attention it is meant to save, so it is no method but the bound that tables compare with: no block
choice of the same size holds more weight (but for the forced blocks).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longspan.kernels.plan import ReadPlan
from longspan.prefill.base import ReadContext, Selector, in_blocks, keep_top_p, masked_softmax, plan_from_blocks
from longspan.registry import Refused, knob, method


@method("oracle-top-p", kind="selector", system="baselines",
        summary="Read the key blocks that hold a share of the true attention (a bound, not a saving).",
        capabilities=("block-plan", "all-queries"))
class OracleTopP(Selector):
    """Top-p of the exact block weights; first block and diagonal are always read."""

    p: float = knob(0.95, "share of the true attention that each row of blocks keeps", low=0, high=1)
    block: int = knob(128, "tokens per query and key block", low=1)

    def check(self) -> None:
        if self.p <= 0:
            raise Refused(f"{self}: expected p above 0 and up to 1, such as 0.95.")

    def select(self, x: ReadContext) -> ReadPlan:
        return plan_from_blocks(x, keep_top_p(block_mass(x, self.block), self.p), self.block)


def block_mass(x: ReadContext, block: int) -> Float[Tensor, "B Hq NQ NK"]:
    """Exact attention weights summed over each key block and averaged over the query block's rows, one row of blocks
    at a time. Rows of padding don't count; a block of them has mass 0."""
    (B, heads, T, D), key_heads, S = x.q.shape, x.k.shape[1], x.k_len
    keys, slots = x.k.float().mT, torch.arange(S, device=x.q.device)
    rows = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        seen = S - T + stop
        queries = x.q[:, :, start:stop].float().reshape(B, key_heads, -1, D)
        logits = (queries @ keys[..., :seen]).view(B, heads, stop - start, seen) * x.scale
        mask = slots[:seen] <= slots[S - T + start : seen, None]
        count: Tensor | int = stop - start
        if x.valid is not None:
            own = x.valid[:, S - T + start : seen]
            mask = mask & x.valid[:, None, None, :seen] & own[:, None, :, None]
            count = own.sum(-1).clamp(min=1)[:, None, None]
        mass = in_blocks(masked_softmax(logits, mask).sum(2), block).sum(-1) / count
        rows.append(F.pad(mass, (0, -(-S // block) - mass.shape[-1])))
    return torch.stack(rows, 2)
