"""The cache transformers carries: lengths, coming back, drafts, moving to another process, what it reports."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from generating import left_padded, new_tokens
from masked_oracle import check_against_oracle, forced_logits, positions_of
from tiny_models import tiny, tiny_ids

from longspan.cache import Achieved, RecipeCache, Rows, achieved_from_json
from longspan.cache.layer import PolicyLayer, SlidingLayer
from longspan.cache.stores.dense import DenseLayer
from longspan.cache.stores.ragged import RaggedLayer
from longspan.cache.watch import QueryWindow
from longspan.models.hook import Prompt
from longspan.recipe import Recipe
from longspan.registry import Refused

STATEFUL = ["h2o(budget=0.4, schedule=every(steps=2))", "snapkv(window=4, schedule=every(steps=3)) @ adakv(budget=0.5)",
            "expected-attention(n_sink=2, n_future=8, budget=0.5, schedule=every(steps=2))",
            "streaming-llm(n_sink=2, rerotate=True, budget=0.5, schedule=every(steps=2))",
            "knorm(budget=0.5, store=quantised(bits=8, group=8), schedule=every(steps=3))"]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def read(run, model, ids, prompt):
    cache = run.new_cache(Prompt(ids[:, :prompt], prompt))
    model(ids, past_key_values=cache)
    return cache


# ------------------------------------------------------------------------------------------- what transformers asks


def test_the_length_is_what_was_read_not_what_is_kept(model):
    with Recipe.parse("h2o(budget=0.2)").on(model) as run:
        cache = read(run, model, tiny_ids(1, 30), 30)
        assert cache.get_seq_length() == cache.get_seq_length(1) == 30
        assert cache.get_mask_sizes(4, 0) == (34, 0)
        assert cache.policy_layers[0].store.lengths().tolist() == [[6, 6]]
        assert not cache.is_compileable and cache.is_croppable and cache.is_sliding == [False, False]
        assert cache.get_max_length() == -1 and len(cache) == 2


def test_positions_go_on_where_the_text_ended(model):
    """The rotary phase of new tokens is their place in the text, not among what is kept."""
    ids, seen = tiny_ids(1, 20), []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True)
    with Recipe.parse("h2o(budget=0.2)").on(model):
        new_tokens(model, ids, 4)
    handle.remove()
    assert seen[1:] == [[[20]], [[21]], [[22]]]


def test_position_ids_may_be_counted_up_in_place(model):
    ids, position = tiny_ids(1, 100), torch.tensor([[20]])
    with Recipe.parse("full").on(model) as run:
        cache = read(run, model, ids[:, :20], 20)
        for t in range(20, 100):
            model(ids[:, t : t + 1], position_ids=position, past_key_values=cache)
            position += 1
        assert all(layer.store.view().positions[0, 0].tolist() == list(range(100)) for layer in cache.policy_layers)


def test_rows_repeat_and_are_picked(model):
    ids = tiny_ids(3, 20)
    for text in ("knorm(budget=0.5)", "h2o @ adakv(budget=0.5)"):
        with Recipe.parse(text).on(model) as run:
            cache = read(run, model, ids, 20)
            cache.batch_repeat_interleave(2)
            out = model(tiny_ids(6, 1), past_key_values=cache).logits
            cache = read(run, model, ids, 20)
            cache.batch_select_indices(torch.tensor([2, 0]))
            picked = model(tiny_ids(6, 1)[[4, 0]], past_key_values=cache).logits
        torch.testing.assert_close(picked, out[[4, 0]], atol=1e-5, rtol=1e-5)


def test_reset_forgets_everything(model):
    recipe, ids = Recipe.parse(STATEFUL[0]), tiny_ids(1, 24)
    with recipe.on(model) as run:
        wanted, cache = forced_logits(run, model, ids, 20)
        cache.reset()
        assert (cache.get_seq_length(), cache.prompt, cache.achieved().seen) == (0, None, 0)
        cache.prompt = Prompt(ids[:, :20], 20)
        again, _ = forced_logits(run, model, ids, 20, cache=cache)
    assert torch.equal(again, wanted)


def test_positive_crops_name_the_length_that_stays(model):
    with Recipe.parse("full").on(model) as run:
        cache = read(run, model, tiny_ids(1, 20), 12)
        cache.crop(15)
        assert cache.get_seq_length() == 15
        cache.crop(100)
        assert cache.get_seq_length() == 15


# ------------------------------------------------------------------------------------- drafts, snapshots, other places


@pytest.mark.parametrize("text", STATEFUL)
def test_rejected_drafts_leave_no_trace(model, text):
    """After every rejection: entries, statistics, query windows and counters are those of a run without drafts."""
    recipe, ids = Recipe.parse(text), tiny_ids(2, 40)
    wrong = tiny_ids(2, 8, seed=9)
    with recipe.on(model) as run:
        plain = run.new_cache(Prompt(ids[:, :20], 20))
        model(ids[:, :20], past_key_values=plain)
        # The first call holds the prompt and drafts, as in assisted decoding.
        drafted = run.new_cache(Prompt(ids[:, :20], 20))
        model(torch.cat([ids[:, :20], wrong[:, :4]], 1), past_key_values=drafted)
        drafted.crop(-4)
        at = 20
        for accepted, rejected in ((1, 3), (3, 1), (2, 5), (1, 1), (4, 0), (1, 7)):
            for t in range(at, at + accepted):
                model(ids[:, t : t + 1], past_key_values=plain)
            model(torch.cat([ids[:, at : at + accepted], wrong[:, :rejected]], 1), past_key_values=drafted)
            drafted.crop(-rejected) if rejected else drafted.crop(0)
            at += accepted
            same_state(plain, drafted)
        a = model(ids[:, at : at + 1], past_key_values=plain).logits
        torch.testing.assert_close(model(ids[:, at : at + 1], past_key_values=drafted).logits, a, atol=1e-5, rtol=1e-5)


def same_state(a, b):
    for x, y in zip(a.policy_layers, b.policy_layers):
        assert (x.seen, x.compressions) == (y.seen, y.compressions)
        first, second = x.store.view(), y.store.view()
        assert torch.equal(first.valid, second.valid) and torch.equal(first.positions[first.valid], second.positions[first.valid])
        torch.testing.assert_close(first.k[first.valid], second.k[first.valid], atol=1e-5, rtol=1e-4)
        for mine, other in zip(x.notes, y.notes):
            for name in ("per_key", "stats"):
                p, q = getattr(mine, name), getattr(other, name)
                assert p.keys() == q.keys()
                for key in p:
                    torch.testing.assert_close(p[key], q[key], atol=1e-4, rtol=1e-4)
        p, q = x.watch.tensors(), y.watch.tensors()
        assert p.keys() == q.keys()
        for key in p:
            torch.testing.assert_close(p[key], q[key], atol=1e-5, rtol=1e-4)


def test_padding_that_is_taken_back_is_counted_no_more(model):
    """A padded question, read in two calls and cropped: later budgets count the real tokens that are left."""
    ids, mask = tiny_ids(2, 36), torch.ones(2, 36, dtype=torch.long)
    mask[1, 20:23] = 0
    more = {"attention_mask": mask, "position_ids": positions_of(mask.bool())}
    with Recipe.parse("knorm(budget=0.5, schedule=every(steps=100))").on(model) as run:
        cache = run.new_cache(Prompt(ids[:, :20], 20))
        for a, b in ((0, 20), (20, 22), (22, 26)):
            step = {"attention_mask": mask[:, :b], "position_ids": more["position_ids"][:, a:b]}
            model(ids[:, a:b], past_key_values=cache, **step)
        assert cache.first.pads.tolist() == [0, 3]
        cache.crop(-6)
        model(ids[:, 26:], past_key_values=cache)
        cache.commit()
        assert cache.first.record.kept.tolist() == [[15, 15], [15, 15]]


def test_drafts_hold_nothing_once_they_are_over(model):
    with Recipe.parse(STATEFUL[0]).on(model) as run:
        cache = read(run, model, tiny_ids(1, 24), 20)
        layer = cache.policy_layers[0]
        assert layer.drafts is not None
        model(tiny_ids(1, 1), past_key_values=cache)
        assert layer.drafts is None
        read(run, model, tiny_ids(1, 20), 20)
        assert run.cache.policy_layers[0].drafts is None  # a prompt is no draft
    with Recipe.parse("h2o(budget=0.4)").on(model) as run:
        assert read(run, model, tiny_ids(1, 24), 20).policy_layers[0].drafts is None  # nothing to undo but entries


@pytest.mark.parametrize("text", [*STATEFUL, "full", "tova @ pyramid(budget=0.5)"])
def test_snapshots_can_be_come_back_to_again_and_again(model, text):
    recipe, ids = Recipe.parse(text), tiny_ids(1, 30)
    with recipe.on(model) as run:
        cache = read(run, model, ids[:, :22], 20)
        point, kept = cache.snapshot(), cache.kept_positions()
        outs = []
        for _ in range(3):
            outs.append(torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(22, 30)], 1))
            cache.restore(point)
            assert all(torch.equal(a, b) for x, y in zip(kept, cache.kept_positions()) for a, b in zip(x, y))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("text", [*STATEFUL, "full", "tova @ adakv(budget=0.5)"])
def test_deep_copies_go_on_by_themselves(model, text):
    """As transformers' documentation reuses a prompt: one deep copy of its cache for every continuation."""
    ids, others = tiny_ids(1, 30), tiny_ids(1, 30, seed=1)
    with Recipe.parse(text).on(model) as run:
        cache = read(run, model, ids[:, :22], 20)
        twins = [copy.deepcopy(cache) for _ in range(2)]
        model(others[:, 22:23], past_key_values=twins[0])  # nothing of it reaches the others
        outs = [torch.cat([model(ids[:, t : t + 1], past_key_values=c).logits for t in range(22, 30)], 1)
                for c in (twins[1], cache)]
        assert torch.equal(*outs)
        assert twins[1].achieved() == cache.achieved()
    with pytest.raises(RuntimeError, match="recipe that was left"):
        model(ids[:, :1], past_key_values=twins[0])


def test_deep_copies_of_sliding_layers():
    model, ids = tiny("gemma3"), tiny_ids(1, 40)
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        cache = read(run, model, ids[:, :30], 30)
        twin = copy.deepcopy(cache)
        first = model(ids[:, 30:], past_key_values=twin).logits
        assert cache.get_seq_length() == 30 and torch.equal(model(ids[:, 30:], past_key_values=cache).logits, first)


def test_snapshots_of_sliding_layers():
    model, ids = tiny("gemma3"), tiny_ids(1, 40)
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        cache = read(run, model, ids[:, :30], 30)
        point = cache.snapshot()
        outs = []
        for _ in range(2):
            outs.append(model(ids[:, 30:], past_key_values=cache).logits)
            cache.restore(point)
        assert torch.equal(*outs) and cache.get_seq_length() == 30


@pytest.mark.parametrize("text", [*STATEFUL, "full", "knorm(budget=0.5)", "tova @ adakv(budget=0.5)"])
def test_state_is_everything_needed_to_go_on(model, text):
    """Saved in the middle of decoding with padded rows and loaded into a new cache: what follows is bit for bit the same."""
    recipe = Recipe.parse(text)
    ids, mask = left_padded(tiny_ids(1, 30), tiny_ids(1, 26))
    more = {"attention_mask": mask, "position_ids": positions_of(mask.bool())}
    with recipe.on(model) as run:
        one = run.new_cache(Prompt(ids[:, :20], 20))
        model(ids[:, :23], past_key_values=one, **{k: v[:, :23] for k, v in more.items()})
        other = run.new_cache(Prompt(ids[:, :20], 20))
        for a, b in zip(one.policy_layers, other.policy_layers):
            b.load_state({n: t.clone() for n, t in a.state().items()}, a.seen, type(a.store).__name__)
        assert other.get_seq_length() == 23
        for t in range(23, 30):
            step = {"attention_mask": mask[:, : t + 1], "position_ids": more["position_ids"][:, t : t + 1]}
            outs = [model(ids[:, t : t + 1], past_key_values=c, **step).logits for c in (one, other)]
            assert torch.equal(*outs)
        assert one.achieved() == other.achieved()


# -------------------------------------------------------------------------------------------------------- re-rotation


@pytest.mark.parametrize("steps", [100, 1, 3])
def test_rerotation_reads_as_if_the_gap_were_not_there(steps):
    """In one layer keys depend on their own token alone: then the sinks and the newest tokens, turned, are the text in
    which everything between them was left out, as the paper numbers it."""
    model, ids = tiny("llama", layers=1), tiny_ids(1, 40)
    recipe = Recipe.parse(f'streaming-llm(n_sink=2, rerotate=True, budget="8 tokens", schedule=every(steps={steps}))')
    with recipe.on(model) as run:
        logits, cache = forced_logits(run, model, ids, 30)
    for t in range(30, 40):
        since = 30 + (t - 30) // steps * steps  # the last compression before this row: 2 sinks and 6 newest stay
        shortened = torch.cat([ids[:, :2], ids[:, since - 6 : t + 1]], 1)
        torch.testing.assert_close(logits[:, t - 29], model(shortened).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert cache.kept_positions()[0][0][:2].tolist() == [0, 1]  # where they stood in the text stays known


def test_without_rerotation_keys_are_as_they_were(model):
    ids = tiny_ids(1, 24)
    check_against_oracle(model, Recipe.parse("streaming-llm(n_sink=2, budget=0.5)"), ids, 20)
    with Recipe.parse("streaming-llm(n_sink=2, budget=0.5)").on(model) as run:
        plain, _ = forced_logits(run, model, ids, 20)
    with Recipe.parse("streaming-llm(n_sink=2, rerotate=True, budget=0.5)").on(model) as run:
        turned, _ = forced_logits(run, model, ids, 20)
    assert not torch.allclose(plain[:, 1:], turned[:, 1:], atol=1e-3)
    torch.testing.assert_close(plain[:, 0], turned[:, 0])  # the prompt is read before


def test_rerotation_undoes_the_scale_of_yarn():
    """Keys keep their length: scaled rotations are divided out."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model, ids = tiny("llama", layers=1, rope_parameters=rope), tiny_ids(1, 30)
    norms = []
    for rotate in ("False", "True"):
        with Recipe.parse(f"streaming-llm(n_sink=2, rerotate={rotate}, budget=0.5)").on(model) as run:
            cache = read(run, model, ids, 30)
            norms.append(cache.policy_layers[0].store.view().k.norm(dim=-1))
    torch.testing.assert_close(*norms, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------- what it reports


def test_achieved_survives_json():
    one = Achieved(20, [[1.0, 2.5]], "h2o", 0.123456, 10, 20, 3, 0.5)
    assert achieved_from_json(json.loads(json.dumps(one.as_json()))) == one
    assert set(one.as_json()) == {"seen", "asked", "kept_fraction", "cache_bytes", "full_cache_bytes", "compressions", "density",
                                  "tokens_computed", "kept_per_layer_and_head"}


def test_bytes_are_those_right_after_compression(model):
    with Recipe.parse("h2o(budget=0.25)").on(model) as run:
        cache = read(run, model, tiny_ids(1, 40), 40)
        just = cache.nbytes()
        assert cache.achieved().cache_bytes == just == 2 * (2 * 2 * 10 * 8 * 4 + 2 * 10 * 4)
        for _ in range(5):
            model(tiny_ids(1, 1), past_key_values=cache)
        assert cache.nbytes() > just == cache.achieved().cache_bytes


def test_unequal_heads_move_into_the_ragged_store(model):
    for text, kind in (("knorm @ adakv(budget=0.3)", "RaggedLayer"), ("knorm(budget=0.3)", "DenseLayer")):
        with Recipe.parse(text).on(model) as run:
            cache = read(run, model, tiny_ids(1, 40), 40)
            assert type(cache.policy_layers[0].store).__name__ == kind
    ids, mask = left_padded(tiny_ids(1, 40), tiny_ids(1, 20))
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:  # rows of unequal length
        model(ids, attention_mask=mask)
        run.commit()
        assert isinstance(run.cache.policy_layers[0].store, RaggedLayer)
    with Recipe.parse("h2o(budget=0.5, store=dense)").on(model) as run:  # unless asked for
        model(ids, attention_mask=mask)
        run.commit()
        assert run.cache.policy_layers[0].store.lengths().tolist() == [[20, 20], [10, 10]]


def test_heads_that_turn_unequal_later_move_too(model):
    """Equal at the prompt's end, unequal after a padded question: what is dropped is freed then too."""
    ids, mask = tiny_ids(2, 26), torch.ones(2, 26, dtype=torch.long)
    mask[1, 20:23] = 0
    with Recipe.parse("knorm(budget=0.5, schedule=every(steps=100))").on(model) as run:
        cache = run.new_cache(Prompt(ids[:, :20], 20))
        model(ids[:, :20], past_key_values=cache)
        assert isinstance(cache.first.store, DenseLayer)
        model(ids[:, 20:], past_key_values=cache, attention_mask=mask, position_ids=positions_of(mask.bool())[:, 20:])
        cache.commit()
        assert isinstance(cache.first.store, RaggedLayer)
        assert cache.first.store.lengths().tolist() == [[13, 13], [11, 11]]


def test_chunks_of_padded_rows(model):
    """Rows with little text at an early cut keep what they have."""
    ids, mask = left_padded(tiny_ids(1, 24), tiny_ids(1, 18))
    with Recipe.parse('h2o(budget="9 tokens", schedule=per-chunk(size=8))').on(model) as run:
        new_tokens(model, ids, 2, attention_mask=mask)
        assert run.achieved.kept == [[9.0, 9.0]] * 2 and run.achieved.compressions == 3


def test_per_chunk_bounds_memory_while_reading(model):
    ids, sizes = tiny_ids(1, 96), []
    with Recipe.parse('h2o(budget="16 tokens", schedule=per-chunk(size=16))').on(model) as run:
        cache = run.new_cache(Prompt(ids, 96))
        for a in range(0, 96, 16):
            model(ids[:, a : a + 16], past_key_values=cache)
            sizes.append(cache.nbytes())
    assert max(sizes) == sizes[-1] == 2 * (2 * 2 * 16 * 8 * 4 + 2 * 16 * 4)


def test_rows_must_agree_on_store_and_schedule():
    a, b = Recipe.parse("h2o(store=ragged)").cache, Recipe.parse("h2o(store=quantised)").cache
    with pytest.raises(Refused, match="must share a store, got quantised, ragged"):
        RecipeCache([Rows(a, torch.tensor([0])), Rows(b, torch.tensor([1]))], 2, [None, None], None)


def test_layers_with_a_window_of_their_own_stay_with_transformers():
    cache = RecipeCache([Rows(None)], 3, [None, 16, None], None)
    assert [type(layer) for layer in cache.layers] == [PolicyLayer, SlidingLayer, PolicyLayer]
    assert cache.policy_layers == [cache.layers[0], cache.layers[2]] and cache.first is cache.layers[0]


# ------------------------------------------------------------------------------------------------- the query window


@pytest.mark.parametrize("pieces", [[10], [3, 7], [1] * 10, [8, 1, 1], [2, 6, 2]])
def test_the_window_holds_the_newest_rows_however_they_come(pieces):
    q, positions = torch.randn(2, 4, 10, 3), torch.arange(10).expand(2, 10)
    valid, hidden = torch.rand(2, 10) > 0.3, torch.randn(2, 10, 5)
    window, at = QueryWindow(4), 0
    for n in pieces:
        part = slice(at, at + n)
        window.see(q[:, :, part], positions[:, part], valid[:, part], hidden[:, part])
        at += n
    for held, whole in zip(window.held(), (q[:, :, -4:], positions[:, -4:], valid[:, -4:], hidden[:, -4:])):
        assert torch.equal(held, whole)
        assert held.untyped_storage().nbytes() == held.numel() * held.element_size(), "a slice keeps the whole call alive"
    window.crop(1)
    assert window.held()[1][0].tolist() == [6, 7, 8]
    window.select(torch.tensor([1, 1, 0]))
    assert torch.equal(window.held()[0], q[[1, 1, 0]][:, :, 6:9])
    other = QueryWindow(4)
    other.load(window.tensors())
    assert all(torch.equal(a, b) for a, b in zip(other.held(), window.held()))


def test_a_window_of_no_rows_holds_nothing():
    window = QueryWindow(0)
    window.see(torch.randn(1, 1, 3, 2), torch.arange(3)[None], None)
    assert window.held() is None and window.tensors() == {}
