"""Drafts that are models: the text stays the target's, and the draft's cache holds what stands and nothing else."""

import pytest
import torch
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.decoding import Law, Noise, Proposal, Target, greedy, read, write
from longspan.decoding.drafts.draft_model import DraftModel
from longspan.decoding.drafts.layer_skip import LayerSkip, without_layers
from longspan.models import Prompt
from longspan.registry import Refused


def start(model, recipe="full", length=40, law=None, seed=0):
    ids = tiny_ids(1, length)
    made = Recipe.parse(recipe)
    context = made.on(model)
    run = context.__enter__()
    cache = run.new_cache(Prompt(ids, length))
    logits = read(model, ids, cache)[:, 0]
    return context, Target(model, cache, ids[0].tolist(), law or Law(), Noise((seed,)), attach=Recipe().on), logits


def written(draft, recipe="full", law=None, most=24, model=None):
    context, target, logits = start(model or tiny("llama", layers=4), recipe, law=law)
    try:
        if draft is None:
            return greedy(target.model, target.cache, logits, most, ())
        return write(target, draft, logits, most, ())
    finally:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("recipe", ["full", "knorm(budget=0.5)", "keydiff @ adakv(budget=0.5)",
                                    "streaming-llm(budget=0.5, schedule=every(steps=8))"])
@pytest.mark.parametrize("skip", [1, 2])
def test_layer_skip_writes_the_plain_text(recipe, skip):
    model = tiny("llama", layers=4)
    plain, done = written(None, recipe, model=model), written(LayerSkip(skip=skip, adapt="always"), recipe, model=model)
    assert done.ids == plain.ids
    assert done.accepted <= done.proposed and (skip == 2 or done.accepted)


@pytest.mark.parametrize("rule", ["match", "point-mass", "reject"])
def test_sampling_works_under_every_rule(rule):
    model = tiny("llama", layers=4)
    law = Law(0.8)
    done = written(LayerSkip(skip=1, rule=rule, adapt="always"), law=law, model=model)
    assert len(done.ids) == 24
    if rule == "match":
        plain = written(LayerSkip(skip=1, gamma=1, adapt="always"), law=law, model=model)
        assert done.ids == plain.ids


def test_the_target_is_left_as_it_is():
    model = tiny("llama", layers=4)
    before = [type(m) for m in model.modules()]
    short = without_layers(model, range(1, 3))
    assert len(short.model.layers) == 2 and len(model.model.layers) == 4
    assert short.model.layers[1] is model.model.layers[3]
    assert [type(m) for m in model.modules()] == before


def test_the_draft_reads_what_stands_and_nothing_else():
    """After a rejection the draft's cache is that of a draft which never saw the rejected tokens."""
    model = tiny("llama", layers=4)
    context, target, _ = start(model)
    drafter = LayerSkip(skip=2).begin(target)
    target.ids.append(7)
    proposal = drafter.propose(target.ids, 10)
    assert len(proposal.tokens) == 4 and drafter.seen == 40 + 4
    target.ids += [*proposal.tokens[:1], 9]
    drafter.settle(target.ids, 1, 4)
    assert drafter.seen == 42
    again = drafter.propose(target.ids, 10)
    fresh = LayerSkip(skip=2).begin(target)
    assert again.tokens == fresh.propose(target.ids, 10).tokens
    drafter.close()
    context.__exit__(None, None, None)


def test_a_draft_equal_to_its_target_is_always_right(tmp_path):
    folder = write_tiny_folder(tmp_path)
    from longspan.models import load

    loaded = load(str(folder), dtype=torch.float32)
    context, target, logits = start(loaded.model)
    done = write(target, DraftModel(model=str(folder), gamma=3, adapt="always"), logits, 21, ())
    context.__exit__(None, None, None)
    assert done.accepted == done.proposed == 15 and done.passes == 5


def test_queries_of_the_draft_are_those_that_attention_saw():
    model = tiny("llama", layers=4)
    context, target, _ = start(model)
    drafter = LayerSkip(skip=2, gamma=3).begin(target)
    drafter.watch((0, 3))
    target.ids.append(5)
    proposal = drafter.propose(target.ids, 10)
    heads, dim = model.config.num_attention_heads, model.config.head_dim
    assert set(proposal.notes["queries"]) == {0, 3}
    assert proposal.notes["queries"][3].shape == (heads, 3, dim)
    assert isinstance(proposal, Proposal) and proposal.notes["cache"] is drafter.cache
    drafter.close()
    context.__exit__(None, None, None)


@pytest.mark.parametrize(("draft", "what"), [
    ("layer-skip(skip=3)", "4 layers"), ("layer-skip(skip=1, first=3)", "first between 1 and 2"),
    ("draft-model", "expected a model"),
])
def test_what_does_not_fit_is_refused(draft, what):
    context, target, _ = start(tiny("llama", layers=4))
    try:
        with pytest.raises(Refused, match=what):
            Recipe.parse(draft).decoding.begin(target)
    finally:
        context.__exit__(None, None, None)


def test_a_cache_reader_may_answer_for_the_store():
    model = tiny("llama")
    context, target, _ = start(model)
    plain = read(model, torch.tensor([[3]]), target.cache)
    target.cache.crop(-1)
    seen = []

    def look(call, q, positions, store):
        seen.append((call.layer, q.shape[2], store.width()))

    target.cache.reads = look
    assert torch.equal(read(model, torch.tensor([[3]]), target.cache), plain)
    assert seen == [(i, 1, 41) for i in range(model.config.num_hidden_layers)]
    target.cache.crop(-1)
    target.cache.reads = lambda call, q, positions, store: torch.zeros_like(q)
    assert not torch.allclose(read(model, torch.tensor([[3]]), target.cache), plain)
    context.__exit__(None, None, None)
