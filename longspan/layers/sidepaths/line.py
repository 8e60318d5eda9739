"""The real tokens of a call in one line behind the remembered ones: how side paths with a memory of inputs see a call.

Padding may stand anywhere in a call, and documents may be packed into a row. A sum over the last few tokens is simple on a
line without gaps, where the token u places before is u columns before; `Line` makes that line and goes back from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.layers.context import Context


@dataclass(frozen=True, eq=False)
class Line:
    """K remembered tokens, then the call's real ones in order, then zeros up to the length of the call."""

    tokens: Float[Tensor, "B S C"]
    remembered: int
    """K."""
    valid: Bool[Tensor, "B T"] | None = None
    """Which tokens of the call are real; None when all are."""
    documents: Int[Tensor, "B T"] | None = None
    """Documents begun in this call, up to each of the call's columns (0: still the one we come from); None without any."""
    first: Int[Tensor, "B S"] | None = None
    """The column where each token's document begins."""

    @classmethod
    def of(cls, x: Float[Tensor, "B T C"], past: Float[Tensor, "B K C"], ctx: Context) -> Line:
        """The line of a call. `past` belongs to the document the rows come from, zeros where there were fewer tokens."""
        (B, T, _), K = x.shape, past.shape[1]
        starts = ctx.starts
        if ctx.valid is not None:
            slots = (~ctx.valid).int().argsort(dim=1, stable=True)  # real tokens first
            real = ctx.valid.gather(1, slots)[..., None]
            x = torch.where(real, take(x, slots), 0)
            starts = None if starts is None else starts.gather(1, slots) & real[..., 0]
        line = torch.cat((past.to(x.dtype), x), 1) if K else x
        if starts is None:
            return cls(line, K, ctx.valid)
        columns = torch.arange(K, K + T, device=x.device).expand(B, T)
        first = torch.where(starts, columns, 0).cummax(1).values
        return cls(line, K, ctx.valid, starts.cumsum(1), F.pad(first, (K, 0)))

    def back(self, y: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        """What stands in the call's columns, moved to where the call's tokens are; 0 for padding."""
        if self.valid is None:
            return y
        return torch.where(self.valid[..., None], take(y, (self.valid.cumsum(1) - 1).clamp(min=0)), 0)

    def end(self) -> Int[Tensor, "B 1"]:
        """The column behind each row's last real token."""
        B, S, _ = self.tokens.shape
        if self.valid is None:
            return torch.full((B, 1), S, device=self.tokens.device)
        return self.remembered + self.valid.sum(1, keepdim=True)

    def newest(self, n: int) -> Float[Tensor, "B n C"]:
        """The last `n` <= S real tokens of each row's current document, zeros where there were fewer."""
        S = self.tokens.shape[1]
        if self.valid is None and self.first is None:
            kept = self.tokens[:, S - n :]
            return kept if n == S else kept.clone()  # a view would keep the whole line
        source = self.end() + torch.arange(-n, 0, device=self.tokens.device)
        begins = 0 if self.first is None else self.first.gather(1, (self.end() - 1).clamp(min=0))
        return torch.where((source >= begins)[..., None], take(self.tokens, source.clamp(min=0)), 0)


def earlier(x: Float[Tensor, "B S C"], n: int, first: Int[Tensor, "B S"] | None = None) -> Float[Tensor, "B S C"]:
    """What stood `n` columns before, 0 where nothing did or (with `first`) another document."""
    S = x.shape[1]
    moved = F.pad(x[:, : max(S - n, 0)], (0, 0, min(n, S), 0)) if n else x
    if first is None or not n:
        return moved
    same = torch.arange(S, device=x.device) - n >= first
    return torch.where(same[..., None], moved, 0)


def take(x: Float[Tensor, "B S C"], columns: Int[Tensor, "B T"]) -> Float[Tensor, "B T C"]:
    """The columns asked for, row by row."""
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
