"""Profiles for tiny models, made of random tokens in no time: for tests that run every method, those that need one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny, tiny_ids
from torch import Tensor

from longspan.cache.index_memory import Weights
from longspan.cache.stores.latent_memory import LatentMemory, LatentMemoryLayer, Place
from longspan.evaluation.calibration import Question, Reading
from longspan.evaluation.profiling import observe
from longspan.models import find_parts, profiles
from longspan.models.profiles import Profile
from longspan.recipe import Recipe


def random_reading(length: int = 60, *, questions: int = 2, vocab: int = 128, seed: int = 0) -> Reading:
    """A text of random tokens with questions of 3 and given answers of 4 random tokens."""
    draw = lambda n, at: tuple(tiny_ids(1, n, vocab=vocab, seed=1000 * seed + at)[0].tolist())  # noqa: E731
    return Reading(draw(length, 0), tuple(Question(draw(3, 2 * i + 1), draw(4, 2 * i + 2)) for i in range(questions)))


def random_weights(model: Any, *, gate_bias: float = -torch.inf, seed: int = 0) -> dict[str, Tensor]:
    """Weights of an indexer and a memory for every layer, drawn at random. By default the memory's gate is closed, so that
    it adds nothing, and a store that has one gives what the entries it keeps give."""
    parts, g = find_parts(model), torch.Generator().manual_seed(seed)
    channels, D, L = model.get_input_embeddings().weight.shape[1], parts.head_dim, parts.n_layers
    draw = lambda *shape: torch.randn(*shape, generator=g) * shape[-1] ** -0.5  # noqa: E731
    found = {"layers": torch.arange(L), "indexer.query": draw(L, 2, 8, parts.n_heads * D), "indexer.key": draw(L, 8, channels),
             "indexer.gate": draw(L, 2, channels)}
    for name in ("memory", "memory-per-head"):
        found |= {f"{name}.weight": torch.eye(D) + 0.1 * draw(L, D, D), f"{name}.gate_weight": draw(L, D),
                  f"{name}.gate_bias": torch.full((L,), gate_bias)}
    return found


class ClosedMemory(LatentMemory):
    """A latent memory without a model behind it, whose gate is closed: for tests of what all stores have in common (four
    query heads, two key heads of eight channels)."""

    def make(self) -> LatentMemoryLayer:
        layer = super().make()
        memory = Weights(random_weights(MEMORY_MODEL)).memory(MEMORY_PARTS, 0, torch.device("cpu"))
        layer.place = Place(0, MEMORY_PARTS, memory)
        return layer


MEMORY_MODEL = tiny("llama")
MEMORY_PARTS = find_parts(MEMORY_MODEL)


def provide_profiles(recipe: Recipe, model: Any, length: int = 60) -> list[Path]:
    """Put the profiles that the recipe needs where it looks for them, unless they are there: made of one random text, or
    weights drawn at random. Those come first: a score that has some must find them before it can be profiled.

    Set ``LONGSPAN_CACHE`` to a folder of the test's own first: ``monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))``.
    """
    wanted = profiles.profiled(recipe.methods) if recipe.cache is not None else []
    made = []
    for method in sorted(wanted, key=lambda m: not m.card.can("trains")):
        score = "" if method.card.can("trains") else str(recipe.scored.score)
        if not profiles.key_of(model, method, score).path.is_file():
            made.append(profiles.save(_profile(recipe, model, method, length)))
    return made


def _profile(recipe: Recipe, model: Any, method: Any, length: int) -> Profile:
    if method.card.can("trains"):
        return Profile(profiles.trained_key(model, method), random_weights(model))
    key = profiles.key_of(model, method, str(recipe.scored.score))
    return Profile(key, method.fit(observe(model, recipe, random_reading(length))))
