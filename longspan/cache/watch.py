"""The newest query rows of a layer, kept until the cache is compressed.

Scores such as SnapKV look at the last w queries of the prompt. They may arrive in one call, in chunks, or token by
token, so every layer keeps the newest w rows, with positions and a mask of real tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Rows = tuple[Float[Tensor, "B Hq w D"], Int[Tensor, "B w"], Bool[Tensor, "B w"], Float[Tensor, "B w C"] | None]
"""Queries, positions, which are real, and the layer's input where a score asks for it."""


class QueryWindow:
    """At most `rows` query rows of one layer, in ascending position."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._held: Rows | None = None

    def held(self) -> Rows | None:
        """The rows kept, or None."""
        return self._held

    def see(self, q: Tensor, positions: Tensor, valid: Tensor | None, hidden: Tensor | None = None) -> None:
        """Take in new rows; the oldest leave."""
        if self.rows == 0:
            return
        if valid is None:
            valid = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        new = (q[:, :, -self.rows :], positions[:, -self.rows :], valid[:, -self.rows :],
               None if hidden is None else hidden[:, -self.rows :])
        old = self._held
        if old is None or new[0].shape[2] == self.rows:
            # Copies: a slice would keep the whole call's queries alive.
            self._held = (new[0].clone(), new[1].clone(), new[2].clone(), None if new[3] is None else new[3].clone())
            return
        # Only the older rows that stay are joined, so that nothing holds more than the window.
        stay = max(0, self.rows - new[0].shape[2])
        keep = slice(max(0, old[0].shape[2] - stay), None)
        hidden = None if old[3] is None or new[3] is None else torch.cat([old[3][:, keep], new[3]], 1)
        self._held = (torch.cat([old[0][:, :, keep], new[0]], 2), torch.cat([old[1][:, keep], new[1]], 1),
                      torch.cat([old[2][:, keep], new[2]], 1), hidden)

    def crop(self, n: int) -> None:
        """Forget the newest `n` rows (rejected drafts)."""
        if self._held is not None and n:
            q, positions, valid, hidden = self._held
            self._held = q[:, :, :-n], positions[:, :-n], valid[:, :-n], None if hidden is None else hidden[:, :-n]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self._held is not None:
            q, positions, valid, hidden = self._held
            self._held = q[rows], positions[rows], valid[rows], None if hidden is None else hidden[rows]

    def tensors(self) -> dict[str, Tensor]:
        """What is held, by name."""
        names = ("q", "positions", "valid", "hidden")
        return {} if self._held is None else {n: t for n, t in zip(names, self._held) if t is not None}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        if tensors:
            self._held = tensors["q"], tensors["positions"], tensors["valid"], tensors.get("hidden")
