"""Training what a recipe's methods need trained: calibration texts, questions and answers included, for their trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from longspan.context.document import check_window
from longspan.evaluation.calibration import calibration
from longspan.evaluation.texts import load_text
from longspan.models import Loaded, profiles
from longspan.models.load import context_window
from longspan.models.profiles import Profile
from longspan.recipe import Recipe
from longspan.registry import Refused

Progress = Callable[[int, int, str], None]


def train_weights(loaded: Loaded, recipe: Recipe, progress: Progress | None = None, *, contexts: int = 8,
                  length: int | None = None, text: str = "pydoc", seed: int = 0, out: Path | None = None,
                  again: bool = False) -> tuple[Path, Profile, bool] | None:
    """Train the weights that a recipe's methods need on a model, or find those that are there.

    Args:
        contexts, length, text, seed: the texts, as for `make_profile`.
        out: where to write; by default where the methods look for them.
        again: train them even if they are there.

    Returns:
        The file, what it holds, and whether it was there; None where nothing in the recipe is trained.

    Raises:
        Refused: the texts don't suit the model.
    """
    methods = [m for m in profiles.profiled(recipe.methods) if m.card.can("trains")]
    if not methods:
        return None
    key = profiles.trained_key(loaded.model, methods[0])
    path = out or key.path
    before: dict[Path, Profile] = {}
    for place in [path] if out else [path, key.shipped]:
        try:
            found = profiles.load(place)
        except Refused:  # none there, or damaged
            continue
        if found.key == key:
            before[place] = found
    for place, found in [] if again else before.items():
        if not profiles.missing(found, methods):
            return place, found, True
    if out is not None and out.exists() and not before and not again:
        raise Refused(f"{str(out)!r} is there and isn't the profile of {recipe} on this model; name another file, or say --again "
                      "to write over it.")
    length = min(1024, context_window(loaded.model) // 2) if length is None else length
    trainer = importlib.import_module(methods[0].trainer)
    # A trainer may want texts of its own kind: key-value prompts, needles.
    texts = getattr(trainer, "texts", training_texts)(loaded, contexts, length, text, seed)
    start = next(iter(before.values())).tensors if before else {}
    tensors = trainer.train(loaded.model, texts, methods, start, again=again, seed=seed, progress=progress)
    notes = {"model": loaded.name, "recipe": str(recipe), "contexts": contexts, "length": length, "text": text,
             "text_sha256": load_text(text).sha256, "seed": seed}
    profile = Profile(key, tensors, notes)
    return profiles.save(profile, path), profile, False


def training_texts(loaded: Loaded, contexts: int, length: int, text: str, seed: int) -> list[tuple[int, ...]]:
    """Calibration texts, each with a question and its answer: what weights are trained on."""
    readings = calibration(loaded.tokenizer, contexts=contexts, questions=1, length=length, known=True, text=text, seed=seed)
    texts = [(*r.ids, *r.questions[0].ids, *r.questions[0].answer) for r in readings]
    check_window(loaded, max(map(len, texts)), "a training text with its question and answer")
    return texts
