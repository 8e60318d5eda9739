"""Multi-query associative recall with room between: pairs of key and value in the first half, questions in the second.

``k v`` pairs stand anywhere in the first half of a row, ``k v`` questions anywhere in the second, fillers between them; the
label at a question's key is its value, nothing else is labelled. Longer rows hold the same pairs and questions and more
fillers, so they ask for the same thing from farther away (after arXiv:2312.04927).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longspan.training import IGNORE, Batch, dice


@dataclass(frozen=True)
class SpreadRecall:
    """Batches of rows by number; every pair is asked for once."""

    time: int = 64
    batch: int = 32
    pairs: int = 8
    keys: int = 16
    values: int = 16
    fillers: int = 8
    seed: int = 0
    split: str = "train"

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.fillers

    def __call__(self, index: int) -> Batch:
        draw = dice(self.seed, self.split, index)
        B, n, half = self.batch, self.pairs, self.time // 2
        rows = np.arange(B)[:, None]
        ids = draw.integers(self.keys + self.values, self.vocab_size, (B, self.time))
        keys = draw.permuted(np.tile(np.arange(self.keys), (B, 1)), axis=1)[:, :n]
        values = draw.integers(self.keys, self.keys + self.values, (B, n))
        order = draw.permuted(np.tile(np.arange(n), (B, 1)), axis=1)
        told, asked = self._places(draw, half), half + self._places(draw, self.time - half)
        ids[rows, told], ids[rows, told + 1] = keys, values
        ids[rows, asked], ids[rows, asked + 1] = keys[rows, order], values[rows, order]
        labels = np.full_like(ids, IGNORE)
        labels[rows, asked] = values[rows, order]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), index=index)

    def _places(self, draw: np.random.Generator, room: int) -> np.ndarray:
        """Where the pairs of each row begin, two places each, in `room` places."""
        slots = draw.permuted(np.tile(np.arange(room - self.pairs), (self.batch, 1)), axis=1)[:, : self.pairs]
        return np.sort(slots, 1) + np.arange(self.pairs)
