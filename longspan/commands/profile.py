"""``longspan profile``: the offline statistics that a recipe needs on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longspan.terminal import Dtype, Json, Load, Model, load_model, own_methods, parse_recipes, progress_bar, show


def profile(
    recipe: Annotated[list[str], typer.Argument(help="A recipe with a method that needs a profile, such as 'snapkv @ lu-kv'; "
                                                "several share the work.")],
    contexts: Annotated[int, typer.Option(min=1, help="Calibration texts.")] = 8,
    questions: Annotated[int, typer.Option(min=1, help="Questions about each text.")] = 2,
    length: Annotated[int | None, typer.Option("--length", "-l", min=1, help="Tokens of a text; 1024, or half of a shorter "
                                               "window, if left out.")] = None,
    answers: Annotated[str, typer.Option(help="Answers sampled from the model, or known ones.")] = "sampled",
    text: Annotated[str, typer.Option(help="What texts are cut from, such as pydoc or docstrings.")] = "pydoc",
    seed: Annotated[int, typer.Option(help="Seed of texts and answers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File to write; where recipes look for it if left out.")] = None,
    again: Annotated[bool, typer.Option(help="Make it even if it is there.")] = False,
    model: Model = None, dtype: Dtype = None, load: Load = None, as_json: Json = False,
) -> None:
    """Make the offline statistics that a recipe needs on a model. Recipes find them by themselves from then on.

    Example: `longspan profile "snapkv @ lu-kv(budget=0.2)"`
    """
    own_methods(load)
    from longspan.evaluation.profiling import make_profiles, needing

    parsed = parse_recipes(recipe)
    for one in parsed:
        needing(one)  # refuses before a model is loaded
    loaded = load_model(model, dtype)
    with progress_bar("texts") as tick:
        profiles = make_profiles(loaded, parsed, tick, contexts=contexts, questions=questions, length=length, answers=answers,
                                 text=text, seed=seed, out=out, again=again)
    if as_json:
        show(profiles[0].as_json() if len(profiles) == 1 else [made.as_json() for made in profiles])
        return
    for made in profiles:
        how = "was there already" if made.reused else f"made in {made.seconds:.0f} s"
        print(f"{made.profile.key.method} profile of {made.profile.key.score} on {loaded.name}: {how}\n{made.path}")
