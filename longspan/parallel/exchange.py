"""The moves between a rank's piece of the sequence and its share of the heads, with no more copies than buffers.

Heads leave in the layout (P, B, s, n, d), part r for rank r, and arrive in the same, part r from the r-th piece of the
sequence; with one row (B = 1) the arrived buffer *is* the whole sequence (S, n, d), seen through a view. Projections are
written straight into the buffer that is sent. Which heads go to which rank is a list per rank (`heads.Deal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.parallel.comm import Communicator

Heads = Sequence[Sequence[int]]
"""Heads of each rank."""


@dataclass(frozen=True, eq=False)
class Moved:
    """A buffer as it was sent and as it arrived."""

    sent: Float[Tensor, "P B s n d"]
    received: Float[Tensor, "P B s n d"]

    def whole(self) -> Float[Tensor, "B n S d"]:
        """All positions of this rank's heads; a view of what was received when B is 1."""
        p, b, s, n, d = self.received.shape
        return self.received.permute(1, 3, 0, 2, 4).reshape(b, n, p * s, d)

    def free_sent(self, comm: Communicator) -> None:
        """Give the sent buffer back; a group of one rank has none of its own."""
        if self.sent is not self.received:
            comm.live.free(self.sent)

    def free(self, comm: Communicator) -> None:
        comm.live.free(self.sent, self.received)


def project(x: Float[Tensor, "B s D"], weight: Float[Tensor, "Hd D"], heads: Heads, head_dim: int,
            turn: tuple[Tensor, Tensor] | None, comm: Communicator, what: str) -> Moved:
    """Project `x` to some heads, turn them to their positions, and exchange."""
    b, s, width = x.shape
    send = comm.live.empty((len(heads), b, s, len(heads[0]), head_dim), x)
    rows, per_head = x.view(b * s, width), weight.view(-1, head_dim, width)
    for part, own in zip(send, heads, strict=True):
        torch.mm(rows, per_head[list(own)].flatten(0, 1).mT, out=part.view(b * s, -1))
        turn_(part, turn)
    return Moved(send, comm.all_to_all(send, what))


def project_back(dsend: Float[Tensor, "P B s n d"], x: Float[Tensor, "B s D"], weight: Float[Tensor, "Hd D"], heads: Heads,
                 turn: tuple[Tensor, Tensor] | None, dx: Float[Tensor, "B s D"], dweight: Float[Tensor, "H d D"]) -> None:
    """The gradient of `project` without its exchange: adds to `dx` and to the heads' part of `dweight`.

    A key head that several ranks repeat gets the sum. Changes `dsend`.
    """
    b, s, width = x.shape
    head_dim = dsend.shape[-1]
    rows, per_head, dx_rows = x.view(b * s, width), weight.view(-1, head_dim, width), dx.view(b * s, width)
    for part, own in zip(dsend, heads, strict=True):
        turn_(part, turn, back=True)
        grad = part.view(b * s, -1)
        wanted = per_head[list(own)].flatten(0, 1)
        if dx.dtype == grad.dtype:
            dx_rows.addmm_(grad, wanted)
        else:
            dx_rows.add_(grad @ wanted)
        own_rows = torch.tensor(list(own), device=x.device)
        dweight.index_add_(0, own_rows, (grad.mT @ rows).view(len(own), head_dim, width).to(dweight.dtype))


def send_pieces(full: Float[Tensor, "B s H d"], heads: Heads, comm: Communicator, what: str) -> Moved:
    """Exchange some heads of a tensor that this rank holds for its piece of the sequence."""
    b, s, _, d = full.shape
    send = comm.live.empty((len(heads), b, s, len(heads[0]), d), full)
    for part, own in zip(send, heads, strict=True):
        part.copy_(full[:, :, list(own)])
    return Moved(send, comm.all_to_all(send, what))


def send_whole(x: Float[Tensor, "B n S d"], comm: Communicator, what: str) -> Moved:
    """Give every rank its piece of the sequence of this rank's heads; `x` is used up."""
    b, n, S, d = x.shape
    comm.live.adopt(x)
    send = x.view(b, n, comm.size, S // comm.size, d).permute(2, 0, 3, 1, 4).contiguous()
    if send.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        comm.live.adopt(send)
        comm.live.free(x)
    return Moved(send, comm.all_to_all(send, what))


def take_in(full: Float[Tensor, "B s H d"], received: Float[Tensor, "P B s n d"], heads: Heads) -> None:
    """Write what arrived into the heads' places in `full`."""
    for part, own in zip(received, heads, strict=True):
        full[:, :, list(own)] = part


def turn_(x: Float[Tensor, "B s n d"], turn: tuple[Tensor, Tensor] | None, *, back: bool = False) -> None:
    """Rotate heads in place to the positions of `turn` (halves pairing), or back; both are computed in its dtype."""
    if turn is None:
        return
    cos, sin = turn
    half = cos.shape[-1]
    sin = -sin if back else sin
    first, second = x[..., :half], x[..., half:]
    turned = first.to(cos.dtype) * cos - second.to(cos.dtype) * sin
    second.copy_(second.to(cos.dtype) * cos + first.to(cos.dtype) * sin)
    first.copy_(turned)
