"""Look up cells of a table of random tokens: the small task on which reinforcement learning is tried (arXiv:2603.21719).

A row is a table, row by row, then questions with their answers:  k v v v  k v v v  …  k c v  k c v  …  k c.  The first cell of
each table row is its key; no key comes twice. A question names a key and one of the other columns; the answer is one token, the
cell there. Keys, values and names of columns are tokens of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longspan.registry import Refused
from longspan.training.base import IGNORE, Batch, dice


@dataclass(frozen=True)
class TableLookup:
    """Tables of `rows` rows and `columns` columns, the keys' among them; answers alone are labelled.

    Raises:
        Refused: fewer than two rows, columns or values, fewer keys than rows, no question.
    """

    rows: int = 8
    columns: int = 4
    keys: int = 64
    values: int = 64
    questions: int = 1
    batch: int = 64
    seed: int = 0
    split: str = "train"

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("columns", 2), ("keys", self.rows), ("values", 2), ("questions", 1)):
            if getattr(self, name) < least:
                said = ", one for each row" if name == "keys" else ""
                raise Refused(f"table-lookup: {name}={getattr(self, name)}; expected at least {least}{said}.")

    @classmethod
    def fit(cls, context: int, batch: int, seed: int = 0, split: str = "train") -> TableLookup:
        """The task that fills `context` tokens: 34 are the usual table and one question, more are half table, half questions."""
        least = 2 * cls.columns + 2
        if context < least:
            raise Refused(f"context={context}: expected at least {least} tokens for a table of two rows and a question.")
        rows = min(max(cls.rows, context // 2 // cls.columns), (context - 2) // cls.columns)
        questions = (context + 1 - rows * cls.columns) // 3
        return cls(rows, cls.columns, max(cls.keys, 2 * rows), cls.values, questions, batch, seed, split)

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.columns - 1

    def __call__(self, index: int) -> Batch:
        draw, asked = dice(self.seed, self.split, index), (self.batch, self.questions)
        keys = draw.permuted(np.tile(np.arange(self.keys), (self.batch, 1)), axis=1)[:, : self.rows, None]
        cells = draw.integers(self.keys, self.keys + self.values, (self.batch, self.rows, self.columns - 1))
        row, column = draw.integers(self.rows, size=asked), draw.integers(self.columns - 1, size=asked)
        each = np.arange(self.batch)[:, None]
        answers = cells[each, row, column]
        questions = np.stack((keys[each, row, 0], self.keys + self.values + column, answers), -1)
        table = np.concatenate((keys, cells), -1).reshape(self.batch, -1)
        ids = torch.from_numpy(np.concatenate((table, questions.reshape(self.batch, -1)[:, :-1]), 1))
        labels = torch.full_like(ids, IGNORE)
        labels[:, table.shape[1] + 1 :: 3] = torch.from_numpy(answers)
        return Batch(ids, labels, index=index)
