"""Streams cut into chunks of w real tokens, and the mean of each chunk.

A row's tokens are counted from the first of its document, padding never; a chunk is complete when its w-th token has been
read, and a document that ends inside a chunk leaves none. `even_chunks` serves rows that all stand at the same place,
`ragged_chunks` any padding and any documents. Sums are float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """The type in which chunks of `x` are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def even_chunks(
    h: Float[Tensor, "B T C"], w: int, total: Float[Tensor, "B C"], fill: int
) -> tuple[Float[Tensor, "B K C"], Float[Tensor, "B C"]]:
    """Means of the chunks that these tokens complete, and the sum of the chunk that still runs.

    `total` is the sum of the `fill` tokens (0 to w - 1) that the running chunk held before.
    """
    B, T, C = h.shape
    h, whole = h.to(wide(h)), (fill + T) // w
    if not whole:
        return h.new_zeros(B, 0, C), total + h.sum(1)
    own, edge = w - fill, whole * w - fill
    first = total + h[:, :own].sum(1)
    rest = h[:, own:edge].reshape(B, whole - 1, w, C).sum(2)
    return torch.cat((first[:, None], rest), 1) / w, h[:, edge:].sum(1)


@dataclass(frozen=True, eq=False)
class Ragged:
    """What the tokens of a call do to each row's stream of entries: a document's start is one, a complete chunk is one.

    Entries of a row stand at its left, in order; M is the most of any row.
    """

    means: Float[Tensor, "B M C"]
    """The means of complete chunks; at starts, nothing of use."""
    starts: Bool[Tensor, "B M"]
    """True where an entry is a document's start."""
    valid: Bool[Tensor, "B M"]
    before: Int[Tensor, "B T"]
    """Entries of the row before the chunk that a token ends (if it ends one)."""
    after: Int[Tensor, "B T"]
    """Entries of the row once the token is read."""
    total: Float[Tensor, "B C"]
    fill: Int[Tensor, " B"]


def ragged_chunks(
    h: Float[Tensor, "B T C"],
    w: int,
    real: Bool[Tensor, "B T"],
    starts: Bool[Tensor, "B T"],
    total: Float[Tensor, "B C"],
    fill: Int[Tensor, " B"],
) -> Ragged:
    """`real` says which tokens are no padding, `starts` which are the first of a document; every row has its own `fill`."""
    steps = real.cumsum(1)
    # Tokens of the row before the place from which chunks are counted: negative where that place lies in an earlier call.
    origin = torch.where(starts, steps - 1, -fill[:, None]).cummax(1).values
    ends = real & ((steps - origin) % w == 0)
    after = (starts.long() + ends.long()).cumsum(1)
    before, count = after - ends.long(), after[:, -1]
    M = int(count.max())
    # A chunk and the entry it may become have the same number; a chunk cut off by a start is overwritten by that start.
    h = h.to(wide(h)).masked_fill(~real[..., None], 0.0)
    sums = F.pad(total[:, None], (0, 0, 0, M)).scatter_add(1, before[..., None].expand_as(h), h)
    at_start = starts.new_zeros(len(h), M + 1, dtype=torch.long).scatter_add(1, before - starts.long(), starts.long())
    running = sums.gather(1, count[:, None, None].expand(-1, 1, h.shape[2]))[:, 0]
    valid = torch.arange(M, device=h.device) < count[:, None]
    return Ragged(sums[:, :M] / w, at_start[:, :M] > 0, valid, before, after, running, (steps - origin)[:, -1] % w)
