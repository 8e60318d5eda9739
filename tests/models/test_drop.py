"""Tokens left out from some layer on: equal to masking them, in unchanged generate, and no trace afterwards."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from generating import left_padded, new_tokens
from pruned_oracle import pruned_logits, read_pruned
from tiny_models import tiny, tiny_ids

from longspan.cache import KeepPlan, OwnPolicy, Policy
from longspan.cache.schedules.every import Every
from longspan.context import Context
from longspan.models import Loaded, Prompt, hook
from longspan.models.drop import PROMPT_ROWS, Dropped
from longspan.recipe import Recipe, per_row
from longspan.registry import Card, Refused

LAYERS, LAST, N = 4, 1, 24


class Thin(Policy):
    """Keeps all keys and values, and lets every third prompt token and the last one go on after layer 1."""

    card = Card("thin", "policy", "", "cache", "", "Every third token.", __name__, "Thin", capabilities=("drops-tokens",))

    def __init__(self) -> None:
        pass

    def __str__(self) -> str:
        return "thin"

    def plan(self, x):
        if x.layer == LAST and not x.early:
            x.across[PROMPT_ROWS] = (x.valid & ((x.positions % 3 == 0) | (x.positions == x.seen[:, None, None] - 1)))[:, 0]
        return KeepPlan(x.valid.clone())


THIN = Recipe(cache=OwnPolicy(Thin()))


def state_of(model):
    """Everything that a stay may touch: configs, instance attributes, hooks."""
    modules = [(sorted(m.__dict__), {n: list(h) for n, h in m.__dict__.items() if n.endswith("_hooks")}) for m in model.modules()]
    return model.config._attn_implementation_internal, model.config.to_dict(), modules


def went_on(length):
    return [*range(0, length - 1, 3), length - 1]


@pytest.fixture
def model():
    return tiny("llama", layers=LAYERS)


# ------------------------------------------------------------------------------------------------------------- gathering


def test_rows_ascend_and_shorter_rows_start_with_places_that_dont_count():
    keep = torch.tensor([[True, False, True, True], [False, False, True, False]])
    dropped = Dropped.after(2, keep, 6)  # two tokens follow the prompt
    assert dropped.gap == 1
    assert dropped.rows[0].tolist() == [0, 2, 3, 4, 5]
    assert dropped.rows[1, 2:].tolist() == [2, 4, 5]
    assert dropped.real.tolist() == [[True] * 5, [False, False, True, True, True]]
    assert Dropped.after(0, keep[:1], 4).real is None


def test_gathering_takes_every_row_its_own_tokens():
    dropped = Dropped.after(0, torch.tensor([[True, False, True], [False, True, True]]), 3)
    hidden = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(dropped.gather(hidden), torch.stack([hidden[0, [0, 2]], hidden[1, [1, 2]]]))
    assert dropped.gather(torch.arange(3)[None]).tolist() == [[0, 2], [1, 2]]


# ------------------------------------------------------------------------------------------- the same as masking them


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_family_equals_the_oracle(family, padded):
    model = tiny(family, layers=LAYERS)
    ids, mask = tiny_ids(1, N + 6), None
    if padded:
        ids, mask = left_padded(ids, tiny_ids(1, N + 1, seed=1))
    with THIN.on(model) as run:
        found, cache = read_pruned(run, model, ids, N, mask, pieces=[N, 1, 3, 2])
        assert cache.get_seq_length() == N + 6 and all(layer.seen == N + 6 for layer in cache.policy_layers)
        for layer in cache.policy_layers:
            text = layer.store.view()
            for row, length in enumerate([N, N - 5][: len(ids)]):
                first = went_on(length) if layer.layer > LAST else list(range(length))
                held = text.positions[row, 0][text.valid[row, 0]].tolist()
                assert held == [*first, *range(length, length + 6)]
        wanted = pruned_logits(model, cache, ids, N, LAST, mask)[:, N - 1 :]
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_a_prompt_is_not_read_as_if_nothing_had_been_dropped(model):
    ids = tiny_ids(1, N)
    with THIN.on(model) as run:
        found, _ = read_pruned(run, model, ids, N)
    assert (found - model(ids).logits[:, -1:]).abs().max() > 1e-2


def test_the_layers_after_compute_fewer_tokens(model):
    seen = []
    hooks = [layer.mlp.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1])) for layer in model.model.layers]
    with THIN.on(model) as run:
        new_tokens(model, tiny_ids(1, N), 2)
    for h in hooks:
        h.remove()
    went = len(went_on(N))
    assert seen == [N, N, went, went, 1, 1, 1, 1]
    achieved = run.achieved
    assert achieved.tokens_computed == pytest.approx((2 * N + 2 * went) / (4 * N))
    assert achieved.kept == [[N, N]] * 2 + [[went, went]] * 2 and achieved.kept_fraction == achieved.tokens_computed
    assert achieved.as_json()["tokens_computed"] == pytest.approx(achieved.tokens_computed, abs=1e-6)
    assert achieved.cache_bytes < achieved.full_bytes


# ---------------------------------------------------------------------------------------------------------- in generate


def test_padded_rows_get_what_they_get_alone(model):
    rows = [tiny_ids(1, n, seed=n) for n in (30, 23, 11)]
    ids, mask = left_padded(*rows)
    with THIN.on(model):
        together = new_tokens(model, ids, attention_mask=mask)
        assert together == [new_tokens(model, row)[0] for row in rows]


@pytest.mark.parametrize("more", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}])
def test_assisted_decoding_equals_plain_greedy(model, more):
    """The first forward then holds prompt and drafts: the drafts all go on."""
    ids = torch.cat([tiny_ids(1, 12), tiny_ids(1, 12)], 1)
    if more.pop("assistant", False):
        more["assistant_model"] = model
    with THIN.on(model):
        assert new_tokens(model, ids, 10, **more) == new_tokens(model, ids, 10)


def test_drafts_that_come_with_the_prompt_equal_the_oracle(model):
    ids = tiny_ids(1, N + 4)
    with THIN.on(model) as run:
        found, cache = read_pruned(run, model, ids, N, pieces=[N + 2, 2])
        wanted = pruned_logits(model, cache, ids, N, LAST)[:, -4:]
    torch.testing.assert_close(found[:, -4:], wanted, atol=2e-4, rtol=0)


def test_beams_and_several_sequences(model):
    ids, mask = left_padded(tiny_ids(1, 20), tiny_ids(1, 15, seed=3))
    with THIN.on(model):
        both = new_tokens(model, ids, 5, attention_mask=mask, num_beams=3, num_return_sequences=2)
        alone = new_tokens(model, tiny_ids(1, 20), 5, num_beams=3, num_return_sequences=2)
    assert both[:2] == alone and len(both) == 4


def test_several_questions_on_one_document_and_a_turn_that_stays(model):
    loaded = Loaded(model, None, "tiny", "none", Path())
    document, question = tiny_ids(1, N)[0].tolist(), tiny_ids(1, 5, seed=1)[0].tolist()
    context = Context.from_ids(loaded, document, THIN)
    first = context.nlls(question, [7, 8, 9])
    assert context.nlls(question, [7, 8, 9]) == first
    assert context.achieved.tokens_computed < 1
    point = context.cache.snapshot()
    context.nlls(question, [3])
    context.cache.restore(point)
    assert context.nlls(question, [7, 8, 9]) == first


def test_deep_copies_go_on_by_themselves(model):
    ids = tiny_ids(1, N + 4)
    with THIN.on(model) as run:
        whole, _ = read_pruned(run, model, ids, N)
        _, cache = read_pruned(run, model, ids[:, :N], N)
        twin = copy.deepcopy(cache)
        out = model(input_ids=ids[:, N:], past_key_values=twin, use_cache=True).logits
        assert twin.achieved().tokens_computed == cache.achieved().tokens_computed < 1
    torch.testing.assert_close(out, whole[:, 1:], atol=1e-5, rtol=0)


def test_a_selector_reads_what_is_left(model):
    recipe = Recipe.parse("a-shape") + Recipe()
    recipe.cache = THIN.cache
    with recipe.on(model):
        found = new_tokens(model, tiny_ids(1, N))
    with THIN.on(model):
        assert found == new_tokens(model, tiny_ids(1, N))  # so short a text is read whole by the selector


# -------------------------------------------------------------------------------------------------------------- no trace


def test_the_model_is_left_as_it_was(model):
    ids = tiny_ids(2, N)
    before, logits = state_of(model), model(ids).logits
    with THIN.on(model), Recipe.parse("full").on(model):
        new_tokens(model, ids, 2)
    with pytest.raises(Refused), THIN.on(model):
        new_tokens(model, ids, 2, prefill_chunk_size=10)
    with THIN.on(model):
        new_tokens(model, ids, 2)
    assert state_of(model) == before and torch.equal(model(ids).logits, logits)
    assert not hook._attached and not hook._held


def test_layers_are_hooked_only_for_policies_that_drop(model):
    def hooks():
        return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.model.layers)

    with Recipe.parse("snapkv(budget=0.5, window=4)").on(model):
        assert hooks() == 0
        with THIN.on(model):
            assert hooks() == 2 * LAYERS - 1
    assert hooks() == 0


def test_a_deep_copy_made_inside_is_a_plain_model(model):
    ids = tiny_ids(1, N)
    with THIN.on(model):
        twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, atol=1e-6, rtol=0)


# -------------------------------------------------------------------------------------------------------------- refusals


def test_a_prompt_in_pieces_is_refused(model):
    with THIN.on(model) as run:
        with pytest.raises(Refused, match="thin drops prompt tokens while the whole prompt of 24 tokens is read at once, but "
                                          "tokens 0 to 10 came alone"):
            new_tokens(model, tiny_ids(1, N), 2, prefill_chunk_size=10)
        cache = run.new_cache(None)
        model(input_ids=tiny_ids(1, N), past_key_values=cache, use_cache=True)
        with pytest.raises(Refused, match="drops prompt tokens while they are read, which is over"):
            cache.commit()


def test_other_schedules_are_refused(model):
    recipe = Recipe(cache=OwnPolicy(Thin(), schedule=Every(steps=3)))
    with pytest.raises(Refused, match=r"thin\(schedule=every\(steps=3\)\): it drops prompt tokens once"), recipe.on(model):
        pass


def test_rows_with_other_recipes_are_refused(model):
    with pytest.raises(Refused, match="all rows of a batch must go on with tokens of the same recipe"), \
            per_row([THIN, Recipe.parse("full")], model):
        pass
    with per_row([THIN, THIN], model):
        together = new_tokens(model, tiny_ids(2, N))
    with THIN.on(model):
        assert together == new_tokens(model, tiny_ids(2, N))


def test_layers_with_a_short_window_are_refused():
    model = tiny("gemma3", layers=LAYERS)
    with THIN.on(model), pytest.raises(Refused, match=r"some of the model.s layers keep a window of 16 tokens"):
        new_tokens(model, tiny_ids(1, N), 2)


def test_the_prompt_cant_be_taken_back_in_part(model):
    with THIN.on(model) as run:
        _, cache = read_pruned(run, model, tiny_ids(1, N + 3), N)
        cache.crop(-2)
        assert cache.get_seq_length() == N + 1
        with pytest.raises(Refused, match=r"can't take back 5 tokens: part of the prompt was dropped .* ask for at most 1"):
            cache.crop(-5)
        assert {layer.seen for layer in cache.policy_layers} == {N + 1}


def test_reset_forgets_what_was_dropped(model):
    with THIN.on(model) as run:
        first, cache = read_pruned(run, model, tiny_ids(1, N), N)
        cache.reset()
        assert cache.computed == 1.0
        cache.prompt = Prompt(None, N)
        again, _ = read_pruned(run, model, tiny_ids(1, N), N, cache=cache)
    assert torch.equal(first, again)
