"""Asking a model: the text is read once, every question on top of it and taken back again.

With a recipe, the text's cache is what the recipe keeps of it, so the same questions tell whether a compressed cache has
lost the order of what it still holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from longspan.context.document import check_window
from longspan.context.units import with_units
from longspan.decoding import read
from longspan.evaluation.order.heads import Heads, averaging, recorded
from longspan.evaluation.order.judge import Margins, margins
from longspan.evaluation.order.prompts import LABELS, Prepared, label_ids, orders, suffix
from longspan.evaluation.order.segments import Pair
from longspan.models import Loaded, Prompt
from longspan.models.hook import turn
from longspan.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Open:
    """A text that has been read, ready for questions."""

    loaded: Loaded
    recipe: Recipe
    run: Any
    cache: Any
    n: int
    originals: list[Tensor]
    """Pooled head outputs of the text's spans, one a layer; empty where none were asked for."""

    def logits(self, ids: Sequence[int]) -> Float[Tensor, " V"]:
        """Next-token logits after text and question. `Refused` when both don't fit the model's window."""
        check_window(self.loaded, self.n + len(ids), "text and question", self.recipe)
        point = self.cache.snapshot()
        try:
            asked = torch.tensor([list(ids)], device=self.loaded.model.device)
            return read(self.loaded.model, asked, self.cache)[0, -1]
        finally:
            self.cache.restore(point)


@contextlib.contextmanager
def opened(loaded: Loaded, ids: Sequence[int], recipe: Recipe | str = "full", heads: Heads | None = None,
           spans: Sequence[tuple[int, int]] = ()) -> Iterator[Open]:
    """Read a text under a recipe; with `heads`, their outputs are averaged over the token ranges `spans` while it is read."""
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    check_window(loaded, len(ids), "the text", recipe)
    tensor = torch.tensor([list(ids)], device=loaded.model.device)
    marked = with_units(None, recipe, loaded.tokenizer, ids)
    with torch.inference_mode(), turn(loaded.model), recipe.on(loaded.model) as run:
        cache = run.new_cache(Prompt(tensor, len(ids), marked))
        with _noting(heads, spans, len(ids)) as originals:
            read(loaded.model, tensor, cache)
        yield Open(loaded, recipe, run, cache, len(ids), originals)


def _noting(heads: Heads | None, spans: Sequence[tuple[int, int]], T: int) -> contextlib.AbstractContextManager[list[Tensor]]:
    """`recorded` where heads and spans are given; else a list that stays empty."""
    return recorded(heads, averaging([spans], T)) if heads and spans else contextlib.nullcontext([])


@dataclass(frozen=True, eq=False)
class Asked:
    """What the pairs of one text gave."""

    margins: Margins
    copies: Float[Tensor, "layers heads samples D"] | None
    """Head outputs over the copies in the questions, both orders averaged: for each pair the earlier, then the later one."""
    originals: Float[Tensor, "layers heads samples D"] | None
    """Head outputs over the segments in the text, in the same order."""


def ask(loaded: Loaded, text: Prepared, pairs: Sequence[Pair], recipe: Recipe | str = "full", heads: Heads | None = None,
        labels: Sequence[str] = LABELS) -> Asked:
    """Ask for every pair in both orders; with `heads`, their outputs are noted as well.

    A `text` without tokens asks the same questions with no text (the control).
    """
    a, b = label_ids(loaded.tokenizer, labels)
    spans = [(s.start + text.offset, s.end + text.offset) for p in pairs for s in (p.earlier, p.later)] if text.n else []
    found: list[list[np.ndarray]] = [[], []]
    copies: list[Tensor] = []
    with opened(loaded, text.ids, recipe, heads, spans) as reader:
        for pair in pairs:
            for k, order in enumerate(orders(pair)):
                question = suffix(loaded.tokenizer, order, labels)
                with _noting(heads, question.spans, len(question.ids)) as noted:
                    logits = reader.logits(question.ids)
                found[k].append(logits[[a, b]].double().cpu().numpy())
                if noted:
                    copies.append(by_head(noted))
        originals = by_head(reader.originals) if reader.originals else None
    both = None
    if copies:
        # (layers, heads, pairs, orders, slots A and B, D); the earlier segment is A first and B then.
        split = torch.cat(copies, 2).unflatten(2, (len(pairs), 2, 2))
        both = ((split[:, :, :, 0] + split[:, :, :, 1].flip(3)) / 2).flatten(2, 3)
    return Asked(margins(np.array(found[0]), np.array(found[1])), both, originals)


def by_head(layers: Sequence[Float[Tensor, "B S Hq D"]]) -> Float[Tensor, "layers Hq samples D"]:
    """Pooled outputs of all layers with samples (rows of the batch, then spans) behind the heads, on the CPU."""
    return torch.stack([x.flatten(0, 1).transpose(0, 1).cpu() for x in layers])
