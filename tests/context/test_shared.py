"""One reading for many recipes: every context is what reading alone under that recipe gives."""

from __future__ import annotations

import pytest
import torch
from tiny_folder import write_tiny_folder

from longspan.cache import can_share
from longspan.context import Context, read_once, shareable
from longspan.models import load
from longspan.recipe import Recipe
from longspan.registry import Refused

RECIPES = ["full", "snapkv(window=4, budget=0.3)", "h2o(budget=0.3)", "h2o @ adakv(budget=0.5)", "tova(budget=0.4)",
           "expected-attention(n_future=8, budget=0.4)", "obcache(fullhist=True, window=4, budget=0.4)",
           "knorm(budget=0.5, store=quantised(group=8))", "streaming-llm(budget=0.3, rerotate=True)",
           "keydiff(budget=0.5, store=ragged)", "shotkv(r_p=0.5, W=4)", "hard-kv(W=4, B_lo=8, store=ragged, schedule=at-prompt)",
           "keydiff(budget=0.5, store=tiered)", "snapkv(window=4, budget=1.0)"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(write_tiny_folder(tmp_path_factory.mktemp("tiny"))), dtype="float32")


@pytest.fixture(scope="module")
def ids(loaded):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, loaded.model.config.vocab_size, (60,), generator=generator).tolist()


def test_each_context_is_what_reading_alone_gives(loaded, ids):
    recipes = [Recipe.parse(r) for r in RECIPES]
    for recipe, shared in read_once(loaded, ids, recipes):
        alone = Context.from_ids(loaded, ids, Recipe.parse(str(recipe)))
        assert shared.achieved == alone.achieved
        held = zip(shared.cache.kept_positions(), alone.cache.kept_positions())
        assert all(torch.equal(a, b) for ours, theirs in held for a, b in zip(ours, theirs))
        for question, answer in (([7, 8, 9], [10, 11, 12]), ([], [5, 6])):
            assert shared.nlls(question, answer) == pytest.approx(alone.nlls(question, answer), abs=1e-5)
            assert shared.answer_ids(question, 5)[0].ids == alone.answer_ids(question, 5)[0].ids


def test_contexts_do_not_disturb_each_other(loaded, ids):
    """All are kept and used in turns, also those that evict nothing and so start from the same tensors."""
    found = dict((str(r), c) for r, c in read_once(loaded, ids, [Recipe.parse(r) for r in RECIPES]))
    before = {name: c.nlls([7, 8], [9, 10]) for name, c in found.items()}
    for n, context in enumerate(found.values()):
        context.answer_ids([20 + n] * 3, 4)
    assert {name: c.nlls([7, 8], [9, 10]) for name, c in found.items()} == before


def test_forced_says_what_nlls_and_greedy_say(loaded, ids):
    context = Context.from_ids(loaded, ids, "snapkv(window=4, budget=0.5)")
    for question in ([7, 8, 9], []):
        written = context.answer_ids(question, 4)[0].ids
        nlls, likeliest = context.forced(question, written)
        assert nlls == pytest.approx(context.nlls(question, written), abs=1e-5)
        assert all(likeliest)
        other = [*written[:1], written[1] ^ 1]
        assert context.forced(question, other)[1] == [True, False]


def test_a_refusal_takes_the_place_of_its_context(loaded, ids):
    recipes = [Recipe.parse('snapkv(window=32, budget="8 tokens")'), Recipe.parse("knorm(budget=0.5)")]
    (_, refused), (_, context) = read_once(loaded, ids, recipes)
    assert isinstance(refused, Refused) and "smaller than the 32 tokens" in str(refused)
    assert context.achieved.kept_fraction == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["snapkv(budget=0.5, schedule=per-chunk(size=8))", "snapkv(budget=0.5, schedule=every)",
                                  "xattention + snapkv(budget=0.5)"])
def test_what_reads_in_its_own_way_is_refused(loaded, ids, text):
    recipe = Recipe.parse(text)
    assert not shareable(recipe)
    with pytest.raises(Refused, match="can't share a reading"):
        next(read_once(loaded, ids, [recipe]))


def test_sharing_is_decided_by_schedule():
    assert can_share(Recipe.parse("snapkv(schedule=at-prompt)").cache)
    assert not can_share(Recipe.parse("snapkv(schedule=every(steps=4))").cache)
