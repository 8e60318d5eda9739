"""Profiles for tiny models, made of random tokens in no time: for tests that run every method, those that need one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_ids

from longspan.cache import profiles
from longspan.cache.profiles import Profile
from longspan.evaluation.calibration import Question, Reading
from longspan.evaluation.profiling import observe
from longspan.recipe import Recipe


def random_reading(length: int = 60, *, questions: int = 2, vocab: int = 128, seed: int = 0) -> Reading:
    """A text of random tokens with questions of 3 and given answers of 4 random tokens."""
    draw = lambda n, at: tuple(tiny_ids(1, n, vocab=vocab, seed=1000 * seed + at)[0].tolist())  # noqa: E731
    return Reading(draw(length, 0), tuple(Question(draw(3, 2 * i + 1), draw(4, 2 * i + 2)) for i in range(questions)))


def profile_of(recipe: Recipe, model: Any, length: int = 60) -> list[Profile]:
    """The profiles that the recipe needs on the model, made of one random text; none where it needs none."""
    if recipe.cache is None:
        return []
    score = str(recipe.cache.score)
    return [Profile(profiles.key_of(model, m, score), m.fit(observe(model, recipe, random_reading(length))))
            for m in profiles.profiled(recipe.methods)]


def provide_profiles(recipe: Recipe, model: Any, length: int = 60) -> list[Path]:
    """Put the profiles that the recipe needs where it looks for them, unless they are there.

    Set ``LONGSPAN_CACHE`` to a folder of the test's own first: ``monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))``.
    """
    wanted = profiles.profiled(recipe.methods) if recipe.cache is not None else []
    if all(profiles.key_of(model, m, str(recipe.cache.score)).path.is_file() for m in wanted):
        return []
    return [profiles.save(made) for made in profile_of(recipe, model, length)]
