"""Every score with every budget, store and schedule: it runs and equals the masked oracle, or gives its declared refusal.

Which methods there are comes from their cards, so a new one is tested here as soon as it is registered.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from generating import left_padded
from masked_oracle import check_against_oracle, forced_logits
from profiled import provide_profiles
from tiny_models import tiny, tiny_ids

from longspan.recipe import Recipe
from longspan.registry import Refused, card, cards

SIZES = {"window": 4, "n_sink": 2, "n_future": 8}
STORE_SIZES = {"group": 8}
PROMPT, LENGTH = 24, 33
PIECES = [PROMPT, 1, 4, 3, 1]
SPANS = {"documents": [(0, 10), (10, 18)], "shots": [(0, 6), (6, 12), (12, 18)], "turns": [(0, 12), (12, 18)],
         "question": [(18, 24)]}


def names(kind):
    return [c.name for c in cards(kind=kind) if c.module.startswith("longspan")]


def written(name, **more):
    """A call of a method with sizes that suit this short text."""
    sizes = SIZES | (STORE_SIZES if card(name).kind == "store" else {})
    knobs = [f"{k.name}={sizes[k.name]}" for k in card(name).knobs if k.name in sizes]
    knobs += [f"{k.name}={written(k.default)}" for k in card(name).knobs if k.kind == "score"]
    return f"{name}({', '.join([*knobs, *(f'{k}={v}' for k, v in more.items() if v)])})"


@pytest.fixture(scope="module", autouse=True)
def profiles_of_our_own(tmp_path_factory):
    """Methods that need offline statistics find them in a folder of this module's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_CACHE", str(tmp_path_factory.mktemp("profiles")))
        yield


@functools.lru_cache(maxsize=1)
def tried():
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    return model, *left_padded(tiny_ids(1, LENGTH), tiny_ids(1, LENGTH - 5, seed=1))


SCHEDULES = {"at-prompt": "", "every": "every(steps=3)", "per-chunk": "per-chunk(size=7)"}


def test_all_schedules_are_in_the_grid():
    assert set(names("schedule")) == set(SCHEDULES)


def grid():
    """Every combination; those that differ from the default in both store and schedule are marked slow."""
    for score, budget, store, schedule in itertools.product(names("score"), names("budget"), [None, *names("store")], SCHEDULES):
        marks = [pytest.mark.slow] if store and schedule != "at-prompt" else []
        yield pytest.param(score, budget, store, schedule, marks=marks, id=f"{score}-{budget}-{store}-{schedule}")


@pytest.mark.parametrize(("score", "budget", "store", "schedule"), grid())
def test_grid(score, budget, store, schedule):
    schedule = SCHEDULES[schedule]
    text = f"{written(score, store=store and written(store), schedule=schedule)} @ {budget}(budget=0.5)"
    if store is not None and card(budget).can("ragged") and card(store).can("equal-lengths"):
        with pytest.raises(Refused, match=f"{budget} keeps a different number of tokens per head, which store={store}"):
            Recipe.parse(text)
        return
    model, ids, mask = tried()
    provide_profiles(Recipe.parse(text), model)
    cache = check_against_oracle(model, Recipe.parse(text), ids, PROMPT, mask, pieces=PIECES, spans=SPANS)
    achieved = cache.achieved()
    assert achieved.kept_fraction < 1.0 or score == "full"
    assert achieved.compressions == {"": 1, "every(steps=3)": 4, "per-chunk(size=7)": 4}[schedule]
    held = [layer.store.lengths() for layer in cache.policy_layers]
    if not card(budget).can("ragged") and not card(budget).can("layer-budgets"):
        assert all((h == h[:, :1]).all() for h in held)


@pytest.mark.parametrize("store", [None, *[n for n in names("store") if not card(n).can("lossy")]])
@pytest.mark.parametrize("budget", names("budget"))
@pytest.mark.parametrize("score", names("score"))
def test_keeping_everything_is_bit_identical_to_the_full_recipe(score, budget, store):
    """kr=1: nothing is evicted, and no path through the store may change a bit."""
    if store is not None and card(budget).can("ragged") and card(store).can("equal-lengths"):
        pytest.skip("refused")
    model, ids, mask = tried()
    found = []
    recipe = f"{written(score, store=store and written(store))} @ {budget}(budget=1.0)"
    provide_profiles(Recipe.parse(recipe), model)
    for text in ("full", recipe):
        with Recipe.parse(text).on(model) as run:
            found.append(forced_logits(run, model, ids, PROMPT, mask, pieces=PIECES, spans=SPANS)[0])
            assert run.achieved.kept_fraction == 1.0
    assert torch.equal(*found)


@pytest.mark.parametrize("score", names("score"))
def test_kept_counts_in_a_model(score):
    """B per head; AdaKV H*B per layer; Pyramid within one of B in the mean over layers; B of a row's real tokens."""
    model, ids, mask = tried()
    model = tiny("llama", layers=4)
    provide_profiles(Recipe.parse(f"{written(score)} @ uniform(budget=0.4)"), model)
    wanted = torch.tensor([int(0.4 * PROMPT), int(0.4 * (PROMPT - 5))])
    for budget in ("uniform", "adakv", "pyramid"):
        with Recipe.parse(f"{written(score)} @ {budget}(budget=0.4)").on(model) as run:
            forced_logits(run, model, ids[:, :PROMPT], PROMPT, mask[:, :PROMPT], spans=SPANS)
            counts = torch.stack([layer.record.kept for layer in run.cache.policy_layers])  # (L,B,H)
        if budget == "uniform":
            assert (counts == wanted[None, :, None]).all()
        if budget == "adakv":
            assert (counts.sum(-1) == 2 * wanted).all()
        if budget == "pyramid":
            assert ((counts.float().mean((0, 2)) - wanted).abs() <= 1).all()
