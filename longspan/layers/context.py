"""What a layer is told about the tokens of one call, and where each row stands after it.

A row is a stream of tokens. Some may be padding, anywhere; the real ones are counted in order. Documents packed into
one row follow each other: a token of another segment id than the token before it starts a new document, positions start
again at 0, and memories are cleared. `Cursor` carries the counts from one call to the next, so that a sequence can be
cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from longspan.layers.base import PositionModule
from longspan.layers.state import MixerState


@dataclass(eq=False)
class Cursor(MixerState):
    """Where each row of a batch stands after the tokens read so far. Padding is never counted."""

    total: Int[Tensor, " B"]
    """Tokens read."""
    count: Int[Tensor, " B"]
    """Tokens read of the current document."""
    segment: Int[Tensor, " B"]
    """Segment id of the current document."""
    documents: Int[Tensor, " B"]
    """Documents begun."""
    packed: bool = False
    """Whether segment ids were ever given."""

    @classmethod
    def start(cls, batch: int, device: torch.device | str | None = None) -> Cursor:
        """Nothing read yet."""
        zero = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(zero, zero, zero, zero)


@dataclass(frozen=True, eq=False)
class Context:
    """Everything about the tokens of one call that a layer may read. Made by `Context.of`.

    Change a field with ``dataclasses.replace`` (positions of a perturbed view, say); `order`, `segments` and `starts`
    keep telling the truth about the text.
    """

    positions: Real[Tensor, "B T"]
    """Where tokens stand: by default the index within the document; padding takes its neighbour's."""
    order: Int[Tensor, "B T"]
    """Index among all real tokens of the row, earlier calls included (of padding: of the last token before it)."""
    valid: Bool[Tensor, "B T"] | None = None
    """True where a token is real; None when all are."""
    segments: Int[Tensor, "B T"] | None = None
    """Running number of the document, from 0; None when rows hold one document each."""
    starts: Bool[Tensor, "B T"] | None = None
    """True where a token is the first of a document: what was remembered is cleared before it. None with `segments`."""
    residual: Float[Tensor, "B T C"] | None = None
    """The residual stream entering the layer, not normalised."""
    position: PositionModule = field(default_factory=PositionModule)
    """The position scheme of the layer."""
    length: int | None = None
    """Declared total length of the stream, for methods that depend on it; None when unknown."""
    auxiliary: dict[str, list[Tensor]] = field(default_factory=dict)
    """Terms that layers offer to the objective (`report`): a regulariser, a firing rate."""
    after: Cursor | None = None
    """Where the rows stand after this call."""

    def report(self, name: str, value: Tensor) -> None:
        """Offer a tensor to the objective under `name`, one for each layer that reports it: a scalar, or (B,T) for each token."""
        self.auxiliary.setdefault(name, []).append(value)

    @classmethod
    def of(
        cls,
        batch: int,
        time: int,
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        positions: Real[Tensor, "B T"] | None = None,
        before: Cursor | None = None,
        length: int | None = None,
        device: torch.device | str | None = None,
    ) -> Context:
        """The context of a call with `batch` rows of `time` tokens that continues at `before`.

        Raises ValueError when shapes don't fit. Segment ids need not count up; only a change of id matters. Tokens read
        before any ids were given count as segment 0.
        """
        for name, given in (("valid", valid), ("segments", segments), ("positions", positions)):
            if given is not None and tuple(given.shape) != (batch, time):
                raise ValueError(f"{name} should have shape ({batch}, {time}), got {tuple(given.shape)}")
        if valid is not None and valid.dtype != torch.bool:
            raise ValueError(f"valid should be Boolean (True = a real token), got {valid.dtype}")
        if segments is None and before is not None and before.packed:
            segments = before.segment[:, None].expand(batch, time)
        steps = torch.arange(1, time + 1, device=device).expand(batch, time) if valid is None else valid.cumsum(1)
        # Rows that start afresh without padding share one line of numbers: an expanded tensor, turned into angles once.
        fresh = before is None and valid is None and segments is None
        before = Cursor.start(batch, device) if before is None else before
        order = steps[:1].sub(1).expand(batch, time) if fresh else before.total[:, None] + steps - 1
        if segments is not None:
            number, documents, starts, after = _documents(valid, segments, order, before)
        else:
            number, documents, starts = order + (before.count - before.total)[:, None], None, None
            after = _read(steps, before)
        if positions is None:
            positions = order if fresh else number.clamp(min=0)
        return cls(positions, order, valid, documents, starts, length=length, after=after)


def _read(steps: Tensor, before: Cursor) -> Cursor:
    """The cursor after a call without segments, in which row b read ``steps[b, -1]`` tokens."""
    read = steps[:, -1] if steps.shape[1] else torch.zeros_like(before.total)
    total = before.total + read
    return Cursor(total, before.count + read, before.segment, torch.maximum(before.documents, (total > 0).long()))


def _documents(
    valid: Tensor | None, segments: Tensor, order: Tensor, before: Cursor
) -> tuple[Tensor, Tensor, Tensor, Cursor]:
    """Index in the document, running number of the document, first-of-document flags, and the cursor afterwards."""
    batch, time = segments.shape
    if not time:
        return order, order, order.bool(), before
    real = torch.ones_like(segments, dtype=torch.bool) if valid is None else valid
    # Segment id of the last real token up to and including t; column 0 stands for the calls before this one.
    ids = torch.cat((before.segment[:, None], segments), 1)
    where = torch.arange(1, time + 1, device=segments.device).expand(batch, time)
    latest = torch.where(real, where, 0).cummax(1).values
    current = ids.gather(1, latest)
    previous = torch.cat((before.segment[:, None], current[:, :-1]), 1)
    starts = real & ((order == 0) | (current != previous))
    documents = before.documents[:, None] + starts.cumsum(1) - 1
    # A document's first token sets the origin from which its tokens are counted; until one starts, the old one holds.
    origin = torch.where(starts, order, (before.total - before.count)[:, None]).cummax(1).values
    number = order - origin
    after = Cursor(order[:, -1] + 1, number[:, -1] + 1, current[:, -1].clone(), documents[:, -1] + 1, packed=True)
    return number, documents.clamp(min=0), starts, after
