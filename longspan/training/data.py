"""What small models learn from: text that is installed with Python, files, and two synthetic tasks.

Every source is a function of the batch's number (`longspan.training.base.Batches`), with dice of its own for every
number: no place in the data has to be remembered, and training and held-out batches never share their dice.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from longspan.registry import Refused, nearest
from longspan.training.base import IGNORE, SPLITS, Batch, dice
from longspan.training.table_lookup import TableLookup

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


# ---------------------------------------------------------------------------------------------------------------- text


class Tokenizer(Protocol):
    """What a text needs to become tokens."""

    vocab_size: int

    def encode(self, text: str) -> list[int] | Tensor: ...

    def decode(self, ids: list[int]) -> str: ...


class Bytes:
    """UTF-8 bytes as tokens: 256 of them, nothing to train, any text."""

    vocab_size = 256

    def encode(self, text: str) -> Int[Tensor, " N"]:
        return torch.from_numpy(np.frombuffer(text.encode("utf-8"), dtype=np.uint8).copy())

    def decode(self, ids: list[int]) -> str:
        """Bytes that are no valid UTF-8 become replacement characters."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


class TokenizerFile:
    """A ``tokenizer.json`` of the tokenizers library."""

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer as Reader

        if not Path(path).is_file():
            raise Refused(f"tokenizer={str(path)!r}: no such file; expected a tokenizer.json.")
        self._reader: Any = Reader.from_file(str(path))
        self.vocab_size = self._reader.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._reader.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._reader.decode([int(i) for i in ids])


def read_text(source: str | Path) -> str:
    """The text called `source`: ``topics`` (Python's help topics), ``stdlib`` (its source files, shuffled with a fixed
    seed), or the path of a text file, or of a folder whose text files are read in order of their names.

    Raises `Refused` when there is no such text, or it is empty.
    """
    if str(source) in INSTALLED:
        return INSTALLED[str(source)]()
    path = Path(source)
    if not path.exists():
        raise Refused(f"{nearest(str(source), INSTALLED, 'text')} A path of a text file or folder will do too.")
    inside = (f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file())
    files = [path] if path.is_file() else sorted(inside)
    text = "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)
    if not text:
        raise Refused(f"text={str(source)!r}: no text there; expected files that end in {', '.join(TEXT_SUFFIXES)}.")
    return text


def _topics() -> str:
    from pydoc_data import topics

    return "\n".join(text for _, text in sorted(topics.topics.items()))


def _stdlib() -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(f for pattern in ("*.py", "*/*.py") for f in root.glob(pattern))
    files = [f for f in files if not skipped.intersection(f.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    return "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)


INSTALLED = {"topics": _topics, "stdlib": _stdlib}
"""Texts that every Python carries."""


@dataclass(frozen=True, eq=False)
class TextBatches:
    """Random windows of `length` tokens from one long text; the last tenth is held out."""

    tokens: Int[Tensor, " N"]
    length: int
    batch: int
    seed: int = 0
    split: str = "train"
    held_out: float = 0.1

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise Refused(nearest(self.split, SPLITS, "split"))
        if len(self._part) <= self.length:
            raise Refused(
                f"context={self.length}: the {self.split} part of the text has {len(self._part)} tokens; "
                f"expected a shorter context."
            )

    @property
    def _part(self) -> Tensor:
        edge = round(len(self.tokens) * (1.0 - self.held_out))
        return self.tokens[:edge] if self.split == "train" else self.tokens[edge:]

    def __call__(self, index: int) -> Batch:
        part = self._part
        starts = dice(self.seed, self.split, index).integers(0, len(part) - self.length, self.batch)
        rows = torch.stack([part[s : s + self.length + 1] for s in starts.tolist()]).long()
        return Batch(rows[:, :-1], rows[:, 1:], index=index)


# ----------------------------------------------------------------------------------------------------- synthetic tasks


@dataclass(frozen=True)
class Copy:
    """Read random symbols, then a marker, then write the symbols again; only the copy is labelled."""

    symbols: int
    length: int
    batch: int
    seed: int = 0
    split: str = "train"

    @classmethod
    def fit(cls, context: int, batch: int, seed: int = 0, split: str = "train") -> Copy:
        """The task that fills `context` tokens."""
        if context < 4:
            raise Refused(f"context={context}: expected at least 4 tokens for copying.")
        return cls(16, context // 2, batch, seed, split)

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def __call__(self, index: int) -> Batch:
        drawn = dice(self.seed, self.split, index).integers(0, self.symbols, (self.batch, self.length))
        text = torch.from_numpy(drawn)
        marker = torch.full((self.batch, 1), self.symbols)
        ids = torch.cat((text, marker, text[:, :-1]), 1)
        labels = torch.cat((torch.full_like(text, IGNORE), text), 1)
        return Batch(ids, labels, index=index)


@dataclass(frozen=True)
class Recall:
    """Associative recall: pairs of key and value, then keys again, each asking for its value (arXiv:2312.04927).

    A row is ``k v k v … q v q v …`` with distinct keys; the label at each q is its value, nothing else is labelled.
    """

    pairs: int
    queries: int
    keys: int
    values: int
    batch: int
    seed: int = 0
    split: str = "train"

    def __post_init__(self) -> None:
        for name, most, of in (("queries", self.pairs, "pairs"), ("pairs", self.keys, "keys")):
            if not 1 <= getattr(self, name) <= most:
                raise Refused(f"recall: {name}={getattr(self, name)}; expected 1 up to the {most} {of}.")

    @classmethod
    def fit(cls, context: int, batch: int, seed: int = 0, split: str = "train") -> Recall:
        """The task that fills `context` tokens: half of them pairs, half of them questions."""
        if context < 4:
            raise Refused(f"context={context}: expected at least 4 tokens for recall.")
        pairs = context // 4
        return cls(pairs, pairs, 2 * pairs, 2 * pairs, batch, seed, split)

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    def __call__(self, index: int) -> Batch:
        draw = dice(self.seed, self.split, index)
        keys = draw.permuted(np.tile(np.arange(self.keys), (self.batch, 1)), axis=1)[:, : self.pairs]
        values = draw.integers(self.keys, self.keys + self.values, (self.batch, self.pairs))
        asked = draw.permuted(np.tile(np.arange(self.pairs), (self.batch, 1)), axis=1)[:, : self.queries]
        told = np.stack((keys, values), -1).reshape(self.batch, -1)
        answers = np.take_along_axis(values, asked, 1)
        questions = np.stack((np.take_along_axis(keys, asked, 1), answers), -1).reshape(self.batch, -1)
        ids = torch.from_numpy(np.concatenate((told, questions), 1))
        labels = torch.full_like(ids, IGNORE)
        labels[:, told.shape[1] :: 2] = torch.from_numpy(answers)
        return Batch(ids, labels, index=index)


SYNTHETIC: dict[str, Any] = {"copy": Copy, "recall": Recall, "table-lookup": TableLookup}
"""Tasks by name; each has ``fit(context, batch, seed, split)``."""
