"""Perturbed position indices: the same tokens in the same order, some of them said to stand elsewhere.

Only the indices that rotate queries and keys change; order, causality, padding and documents don't. Three kinds
(arXiv:2604.14339):

* ``skip``: a gap y at a split s, r_i = i for i < s and i + y for i >= s. The tail sees the head y further away.
* ``cyclic``: r_i = (i + u) mod L.
* ``nope``: r_i = 0, so that rotary attention knows no distances.

Every document of a row has draws of its own, over its real tokens: s uniform in 1 .. L-1 (a gap before the first token
moves all alike, which rotary positions can't see), y in 1 .. Y, u in 1 .. L-1. The draws are a function of a seed and the
batch's number, and touch no other random state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longspan.layers import Context
from longspan.registry import Method, Refused
from longspan.training.base import Batch

PERTURBATIONS = ("skip", "cyclic", "nope")
_STREAM = 0x726F7065
"""Keeps these draws apart from those of the data, which start from the same seed and number."""


@dataclass(frozen=True, eq=False)
class View:
    """Where tokens are said to stand, and where that can change what the model answers."""

    positions: Int[Tensor, "B T"]
    moved: Bool[Tensor, "B T"]
    """True for real tokens whose answer may differ from the standard view's: from the split on, or all."""
    documents: Int[Tensor, "B T"]
    """Running number of the document; one draw covers one document of one row."""


def skip(positions: Int[Tensor, "B T"], split: Int[Tensor, "#B #T"], gap: Int[Tensor, "#B #T"]) -> Int[Tensor, "B T"]:
    """Indices from `split` on moved by `gap`."""
    return positions + gap * (positions >= split)


def cyclic(positions: Int[Tensor, "B T"], shift: Int[Tensor, "#B #T"], length: Int[Tensor, "#B #T"]) -> Int[Tensor, "B T"]:
    """Indices moved by `shift`, round a circle of `length` places."""
    return (positions + shift) % length


def draw_skip(draw: np.random.Generator, lengths: Any, most: int | None = None) -> tuple[Any, Any]:
    """Splits and gaps of documents of these lengths (at least 2 tokens each); gaps up to `most`, or the length."""
    lengths = np.asarray(lengths)
    return draw.integers(1, lengths), draw.integers(1, (lengths if most is None else np.full_like(lengths, most)) + 1)


def draw_cyclic(draw: np.random.Generator, lengths: Any) -> Any:
    """Shifts of documents of these lengths (at least 2 tokens each)."""
    return draw.integers(1, np.asarray(lengths))


def perturbed(kind: str, batch: Batch, *, most: int | None = None, seed: int = 0) -> View:
    """The perturbed view of a batch.

    Documents of one token can't be perturbed and stay as they are. `most` bounds the gaps of ``skip``; None: the
    document's length, so that indices stay below twice the length.

    Raises:
        Refused: rows of less than two tokens.
    """
    rows, time = batch.ids.shape
    if time < 2:
        raise Refused(f"rows of {time} token{'s' * (time != 1)} have no indices to perturb; expected at least 2.")
    ctx = Context.of(rows, time, valid=batch.valid, segments=batch.segments, device=batch.ids.device)
    places = ctx.positions
    documents = torch.zeros_like(places) if ctx.segments is None else ctx.segments
    real = torch.ones_like(places, dtype=torch.bool) if ctx.valid is None else ctx.valid
    lengths = per_document(real.long(), documents)
    long_enough = lengths >= 2
    counts = lengths.clamp(min=2).cpu().numpy()
    draw = np.random.default_rng([seed, batch.index, _STREAM])

    def here(drawn: Any) -> Int[Tensor, "B T"]:
        return torch.as_tensor(drawn, device=places.device).gather(1, documents)

    moved = real & long_enough.gather(1, documents)
    if kind == "skip":
        split, gap = (here(drawn) for drawn in draw_skip(draw, counts, most))
        moved = moved & (places >= split)
        return View(torch.where(moved, skip(places, split, gap), places), moved, documents)
    changed = cyclic(places, here(draw_cyclic(draw, counts)), here(counts)) if kind == "cyclic" else torch.zeros_like(places)
    return View(torch.where(moved, changed, places), moved, documents)


def require_whole(method: Method, state: Any) -> None:
    """Refuse a sequence that is fed in pieces: indices are drawn over whole documents."""
    if state is not None:
        raise Refused(f"{method.card.name} reads whole sequences; expected segments=1.")


def per_document(values: Tensor, documents: Int[Tensor, "B T"]) -> Tensor:
    """Sums of `values` (B,T) over each document: (B, documents)."""
    sums = values.new_zeros(len(values), int(documents.max()) + 1)
    return sums.scatter_add(1, documents, values)
