"""The bundled model under a pairwise cover of score, budget, store and schedule: every pair of parts occurs together.

Each recipe of the cover equals the masked oracle, or is refused as it declares.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from masked_oracle import check_against_oracle
from profiled import provide_profiles

from longspan.models import load
from longspan.recipe import Recipe
from longspan.registry import Refused, card, cards

PROMPT, LENGTH = 96, 104
SIZES = {"window": 8, "n_future": 32}
SCHEDULES = ["at-prompt", "every(steps=3)", "per-chunk(size=40)"]


def names(kind):
    return [c.name for c in cards(kind=kind) if c.module.startswith("longspan")]


def written(name, **more):
    knobs = [f"{k.name}={SIZES[k.name]}" for k in card(name).knobs if k.name in SIZES]
    knobs += [f"{k.name}={written(k.default)}" for k in card(name).knobs if k.kind == "score"]
    return f"{name}({', '.join([*knobs, *(f'{k}={v}' for k, v in more.items() if v)])})"


def pairwise(*parameters):
    """A short list of combinations in which every pair of values of two parameters occurs (greedy)."""
    missing = {(i, a, j, b) for i, j in itertools.combinations(range(len(parameters)), 2)
               for a in parameters[i] for b in parameters[j]}

    def new(row):
        pairs = [(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)]
        return [pair for pair in pairs if pair in missing]

    found = []
    while missing:
        i, a, j, b = min(missing, key=str)
        fixed = [[a] if n == i else [b] if n == j else list(values) for n, values in enumerate(parameters)]
        best = max(itertools.product(*fixed), key=lambda row: len(new(row)))
        missing -= set(new(best))
        found.append(best)
    return found


COVER = pairwise(names("score"), names("budget"), ["", *names("store")], SCHEDULES)


def test_the_cover_holds_every_pair():
    parameters = [names("score"), names("budget"), ["", *names("store")], SCHEDULES]
    for (i, first), (j, second) in itertools.combinations(enumerate(parameters), 2):
        assert {(row[i], row[j]) for row in COVER} == set(itertools.product(first, second))
    assert len(COVER) < 0.4 * len(list(itertools.product(*parameters)))


@pytest.fixture(scope="module")
def model():
    loaded = load(dtype="float32")
    loaded.model.set_attn_implementation("sdpa")
    return loaded.model


@pytest.mark.slow
@pytest.mark.parametrize(("score", "budget", "store", "schedule"), COVER)
def test_bundled_model(model, score, budget, store, schedule, tmp_path, monkeypatch):
    text = f"{written(score, store=store and written(store), schedule=schedule)} @ {budget}(budget=0.5)"
    if store and card(budget).can("ragged") and card(store).can("equal-lengths"):
        with pytest.raises(Refused, match="keeps a different number of tokens per head"):
            Recipe.parse(text)
        return
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    recipe = Recipe.parse(text)
    provide_profiles(recipe, model)
    ids = torch.randint(20, 40_000, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    cache = check_against_oracle(model, recipe, ids, PROMPT, tolerance=2e-2, pieces=[PROMPT, 1, 4, 3])
    assert cache.nbytes() > 0 and (cache.achieved().kept_fraction < 1 or score == "full")
