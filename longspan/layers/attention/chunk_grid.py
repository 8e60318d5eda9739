"""Tokens of a call laid out in chunks of their documents, wherever the text was cut.

A token belongs to chunk n // C of its document, n its index there; padding has no index. So chunks are the same however a text is
cut into calls and whatever stands around it. From a call to the next each row keeps the keys of its last two chunks: the one
before the current one, complete, and the current one as far as it is read. A call lays them out first, as chunks 0 and 1 of
a grid, and its own tokens after them; a new document opens a new chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the tokens of a call stand. The grid has as many chunks as the longest row needs, at least 2."""

    size: int
    """C, the slots of a chunk."""
    chunk: Int[Tensor, "B T"]
    """Chunk of the grid that a token is in, 1 or more; of padding: any."""
    offset: Int[Tensor, "B T"]
    """Slot within that chunk."""
    source: Int[Tensor, "B slots"]
    """Row that fills each slot: of the 2C kept ones, then of the T new ones; 2C + T for an empty slot."""
    age: Int[Tensor, "B chunks"]
    """Index of each chunk within its document."""
    last: Int[Tensor, " B"]
    """The chunk of the grid that the next token of the document would be in: the current one from now on."""
    count: Int[Tensor, " B"]
    """Tokens of the current document read after this call."""

    @property
    def chunks(self) -> int:
        return self.age.shape[1]

    @property
    def filled(self) -> Bool[Tensor, "B chunks C"]:
        """Slots that hold a token."""
        return (self.source < 2 * self.size + self.chunk.shape[1]).unflatten(1, (self.chunks, self.size))

    def kept(self) -> Int[Tensor, "B 2C"]:
        """Slots of the grid that the next call needs."""
        return (self.last[:, None] - 1) * self.size + torch.arange(2 * self.size, device=self.last.device)


def lay_out(
    time: int,
    size: int,
    count: Int[Tensor, " B"],
    valid: Bool[Tensor, "B T"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> Grid:
    """The grid of a call of `time` tokens after `count` tokens of each row's document; `starts` marks first tokens of others."""
    B, device = len(count), count.device
    real = torch.ones(B, time, dtype=torch.bool, device=device) if valid is None else valid
    index, before = real.cumsum(1) - 1, count[:, None]
    origin = -before.expand(B, time)
    if starts is not None:
        origin = torch.where(real & starts, index, origin).cummax(1).values
    number = index - origin  # within the document; of padding: the last real token's
    # The first token of a call may be the first of a chunk that was laid out already, empty.
    opens = real & (number % size == 0) & ~((index == 0) & (number == before))
    chunk, count_after = 1 + opens.cumsum(1), number[:, -1] + 1
    last = chunk[:, -1] + (real.any(1) & (count_after % size == 0))
    chunks = int(last.max()) + 1
    age = torch.cat(((count // size)[:, None] - 1, (count // size)[:, None],
                     (count_after // size)[:, None].expand(B, chunks - 1)), 1)  # one column more, for padding
    age = age.scatter(1, torch.where(real, chunk, chunks), number // size)[:, :chunks]
    source = _source(real, count, size, chunk * size + number % size, chunks)
    return Grid(size, chunk, number % size, source, age, last, count_after)


def _source(real: Tensor, count: Tensor, size: int, slot: Tensor, chunks: int) -> Int[Tensor, "B slots"]:
    (B, time), device = real.shape, real.device
    nothing, kept = 2 * size + time, torch.arange(2 * size, device=device)
    read = count[:, None] // size * size - size + kept  # index within the document of what is kept
    source = torch.full((B, chunks * size + 1), nothing, device=device)
    source[:, : 2 * size] = torch.where((read >= 0) & (read < count[:, None]), kept, nothing)
    rows = (2 * size + torch.arange(time, device=device)).expand(B, time)
    return source.scatter(1, torch.where(real, slot, chunks * size), rows)[:, :-1]


def take(t: Tensor, index: Int[Tensor, "B N"]) -> Tensor:
    """Rows ``t[b, index[b, n]]`` of (B,S,…), as (B,N,…): whole rows are copied."""
    flat = index + torch.arange(len(t), device=t.device)[:, None] * t.shape[1]
    return t.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape)
