"""The comparison's own side: longspan. See `side` for the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import side
import torch
from torch import Tensor
from transformers import DynamicCache

from longspan.cache import LayerContext, RecipeCache
from longspan.models import Prompt
from longspan.recipe import Recipe

SETTINGS = {"snapkv": "window=64, "}
"""Where kvpress's default differs from ours."""


@contextlib.contextmanager
def method(model: Any, ids: Tensor, name: str, ratio: float, record: bool) -> Iterator[side.Opened]:
    if name == side.DENSE:
        yield side.Opened(DynamicCache())
        return
    recipe = Recipe.parse(f"{name}({SETTINGS.get(name, '')}budget={round(1 - ratio, 6)})")
    assert recipe.cache is not None
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(_spy(type(recipe.cache.score))) if record else []
        cache = stack.enter_context(recipe.on(model)).new_cache(Prompt(ids, ids.shape[1]))
        yield side.Opened(cache, lambda: _kept(seen, cache))


@contextlib.contextmanager
def _spy(score: type) -> Iterator[list[Tensor]]:
    """Note the scores of every layer."""
    seen: list[Tensor] = []
    original = score.score  # type: ignore[attr-defined]

    def noting(self: Any, x: LayerContext) -> Tensor:
        seen.append(original(self, x))
        return seen[-1]

    with mock.patch.object(score, "score", noting):
        yield seen


def _kept(seen: list[Tensor], cache: RecipeCache) -> dict[str, Tensor]:
    kept = torch.stack([torch.stack(heads) for heads in cache.kept_positions()])
    return {"kept": kept.sort(-1).values.int(), "scores": torch.stack([scores[0].float() for scores in seen])}


if __name__ == "__main__":
    side.main(method, {"longspan": version("longspan")})
