"""One reading of a document for many recipes that compress it when it ends.

    for recipe, context in read_once(loaded, ids, recipes):
        ...

Each context is what `Context.from_ids` would have made with that recipe, but the document is read once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from longspan.cache import can_share, fork, gatherer
from longspan.context.document import Context, check_window
from longspan.context.units import with_units
from longspan.decoding import read
from longspan.models import Loaded, Prompt
from longspan.models.hook import turn
from longspan.recipe import Recipe
from longspan.registry import Refused


def shareable(recipe: Recipe) -> bool:
    """Whether a recipe does nothing but choose what stays when the document ends."""
    single = (recipe.selector, recipe.decoding, recipe.denoising, recipe.reuse)
    other = (*single, *recipe.subsets, *recipe.positions, *recipe.weights)
    return all(part is None for part in other) and (recipe.cache is None or can_share(recipe.cache))


def read_once(loaded: Loaded, ids: Sequence[int], recipes: Sequence[Recipe], *,
              spans: dict[str, list[tuple[int, int]]] | None = None) -> Iterator[tuple[Recipe, Context | Refused]]:
    """Read a document once and compress it by every recipe, one after another.

    A recipe that refuses this document gives its refusal in place of a context. A context's `read_s` is the time of the
    common reading and of its own compression; the reading takes longer the more scores watch it.

    Raises:
        Refused: a recipe does more than choose at the document's end, or the document is too long.
    """
    for recipe in recipes:
        if not shareable(recipe):
            raise Refused(f"recipe {str(recipe)!r} does more than choose what stays, so it can't share a reading; expected "
                          "one that only chooses what stays when the document ends.")
    check_window(loaded, len(ids), "the document")
    marked: dict[str, list[tuple[int, int]]] = {}
    for recipe in recipes:
        marked |= with_units(spans, recipe, loaded.tokenizer, ids)
    tensor = torch.tensor([list(ids)], device=loaded.model.device)
    start = time.perf_counter()
    with turn(loaded.model), Recipe(cache=gatherer([r.cache for r in recipes if r.cache is not None])).on(loaded.model) as run:
        base = run.new_cache(Prompt(tensor, len(ids), marked))
        logits = read(loaded.model, tensor, base)[:, 0]
        read_s = time.perf_counter() - start
        for recipe in recipes:
            start = time.perf_counter()
            try:
                cache = fork(base, recipe.cache)
            except Refused as refusal:
                yield recipe, refusal
                continue
            context = Context(loaded, recipe, cache, list(ids), "", read_s + time.perf_counter() - start)
            context.logits, context.achieved = logits, cache.achieved()
            yield recipe, context
