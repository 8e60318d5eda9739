"""The newest query rows of a layer, kept until the cache is compressed.

Scores such as SnapKV look at the last w queries of the prompt. They may arrive in one call, in chunks, or token by
token, so every layer keeps the newest w rows, with positions and a mask of real tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class QueryWindow:
    """At most `rows` query rows of one layer, (B,Hq,w,D), in ascending position."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._q: Float[Tensor, "B Hq w D"] | None = None
        self._positions: Int[Tensor, "B w"] | None = None
        self._valid: Bool[Tensor, "B w"] | None = None
        self.hidden: Float[Tensor, "B w C"] | None = None

    def see(self, q: Tensor, positions: Tensor, valid: Tensor | None, hidden: Tensor | None = None) -> None:
        """Take in new rows; the oldest leave."""
        if self.rows == 0:
            return
        if valid is None:
            valid = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        q, positions, valid = q[:, :, -self.rows :], positions[:, -self.rows :], valid[:, -self.rows :]
        hidden = None if hidden is None else hidden[:, -self.rows :]
        if self._q is None or q.shape[2] == self.rows:
            # A copy: a slice would keep the whole call's queries alive.
            self._q, self._positions, self._valid = q.clone(), positions.clone(), valid.clone()
            self.hidden = None if hidden is None else hidden.clone()
            return
        assert self._positions is not None and self._valid is not None
        self._q = torch.cat([self._q, q], 2)[:, :, -self.rows :]
        self._positions = torch.cat([self._positions, positions], 1)[:, -self.rows :]
        self._valid = torch.cat([self._valid, valid], 1)[:, -self.rows :]
        if hidden is not None and self.hidden is not None:
            self.hidden = torch.cat([self.hidden, hidden], 1)[:, -self.rows :]

    def q(self, like: Tensor) -> Float[Tensor, "B Hq w D"]:
        """The rows kept; none of the shape of `like` (B,Hq,T,D) if none are."""
        return like[:, :, :0] if self._q is None else self._q

    def positions(self, like: Tensor) -> Int[Tensor, "B w"]:
        return like[:, :0] if self._positions is None else self._positions

    @property
    def valid(self) -> Bool[Tensor, "B w"] | None:
        return self._valid

    def crop(self, n: int) -> None:
        """Forget the newest `n` rows (rejected drafts)."""
        if self._q is None or n == 0:
            return
        assert self._positions is not None and self._valid is not None
        self._q, self._positions, self._valid = self._q[:, :, :-n], self._positions[:, :-n], self._valid[:, :-n]
        self.hidden = None if self.hidden is None else self.hidden[:, :-n]

    def select(self, rows: Tensor) -> None:
        if self._q is not None:
            assert self._positions is not None and self._valid is not None
            self._q, self._positions, self._valid = self._q[rows], self._positions[rows], self._valid[rows]
            self.hidden = None if self.hidden is None else self.hidden[rows]
