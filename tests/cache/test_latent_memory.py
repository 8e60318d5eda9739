"""Latent memory: its arithmetic by hand, what the store writes and adds, and that a state never outlives its sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from generating import left_padded, new_tokens
from masked_oracle import forced_logits, oracle_logits, watch_compressions
from profiled import provide_profiles, random_weights
from tiny_models import tiny, tiny_ids

from longspan.cache.index_memory import FastState, Memory, Weights, read, written
from longspan.cache.stores.latent_memory import LatentMemory
from longspan.cache.stores.ragged import Ragged
from longspan.models import Prompt, find_parts, profiles
from longspan.models.profiles import Profile
from longspan.recipe import Recipe
from longspan.registry import Refused

D = 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(dm=D, gate_bias=0.0, seed=3):
    return Memory(rand(dm, D, seed=seed), 0.1 * rand(D, seed=seed + 1), torch.tensor(gate_bias))


def everything(k):
    return torch.ones(k.shape[:3], dtype=torch.bool)


def open_weights(model, gate_bias=0.0):
    """Weights whose gate lets half of the reading through, where the recipe looks for them."""
    key = profiles.trained_key(model, LatentMemory())
    profiles.save(Profile(key, random_weights(model, gate_bias=gate_bias)))
    return Weights(random_weights(model, gate_bias=gate_bias))


# ------------------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("per_head", [False, True])
def test_writing_at_once_or_in_any_parts_is_the_same(per_head):
    memory, k, v = weights(), rand(2, 3, 12, D), rand(2, 3, 12, D, seed=1)
    once = written(memory, None, k, v, everything(k), per_head=per_head)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    for cuts in ([1] * 12, [5, 7], [11, 1]):
        state, at = None, 0
        for n in cuts:
            part = order[at : at + n]
            state = written(memory, state, k[:, :, part], v[:, :, part], everything(k[:, :, part]), per_head=per_head)
            at += n
        torch.testing.assert_close(state.m, once.m, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.b, once.b, atol=1e-5, rtol=1e-5)


def test_entries_that_stay_are_not_written():
    memory, k, v = weights(), rand(1, 2, 12, D), rand(1, 2, 12, D, seed=1)
    mask = rand(1, 2, 12, seed=2) > 0
    wrong = v.masked_fill(~mask[..., None], torch.nan)
    found = written(memory, None, k.masked_fill(~mask[..., None], torch.nan), wrong, mask, per_head=True)
    for h in range(2):
        own = mask[0, h]
        k1, v1 = k[:, h : h + 1, own], v[:, h : h + 1, own]
        alone = written(memory, None, k1, v1, everything(k1))
        torch.testing.assert_close(found.m[:, h], alone.m[:, 0], atol=1e-5, rtol=1e-5)


def test_a_write_in_blocks_is_one_write(monkeypatch):
    memory, k, v = weights(), rand(1, 2, 12, D), rand(1, 2, 12, D, seed=1)
    before = written(memory, None, k, v, everything(k))
    once = written(memory, before, k, v, everything(k), lam=0.5)
    monkeypatch.setattr("longspan.cache.index_memory.WRITE_BLOCK", 5)
    blocks = written(memory, before, k, v, everything(k), lam=0.5)
    torch.testing.assert_close(blocks.m, once.m, atol=1e-5, rtol=1e-5)


def test_an_earlier_write_weighs_lam_of_the_next():
    memory, lam = weights(), 0.25
    (k1, v1), (k2, v2) = ((rand(1, 2, 4, D, seed=s), rand(1, 2, 4, D, seed=s + 1)) for s in (10, 20))
    first, second = (written(memory, None, k, v, everything(k)) for k, v in ((k1, v1), (k2, v2)))
    both = written(memory, written(memory, None, k1, v1, everything(k1), lam=lam), k2, v2, everything(k2), lam=lam)
    torch.testing.assert_close(both.m, lam * first.m + second.m)
    torch.testing.assert_close(both.b, lam * first.b + second.b)


def test_one_token_comes_back_as_its_value():
    """W orthogonal, phi(q) = phi(k) a unit vector: m = v as eps goes to 0."""
    W = torch.linalg.qr(rand(D, D))[0]
    memory = Memory(W, torch.zeros(D), torch.tensor(torch.inf))  # the gate is open
    k = W.T[:, 2].reshape(1, 1, 1, D)  # phi(k) = e_2
    v = rand(1, 1, 1, D, seed=1)
    state = written(memory, None, k, v, everything(k))
    torch.testing.assert_close(read(memory, state, k, eps=1e-12), v, atol=1e-5, rtol=1e-5)


def test_eta_cancels_and_a_scale_of_phi_divides_by_its_square():
    memory, k, v, q = weights(gate_bias=torch.inf), rand(1, 2, 6, D), rand(1, 2, 6, D, seed=1), rand(1, 4, 3, D, seed=2)
    plain = read(memory, written(memory, None, k, v, everything(k)), q, eps=0.0)
    torch.testing.assert_close(read(memory, written(memory, None, k, v, everything(k), eta=7.0), q, eps=0.0), plain)
    scaled = Memory(3 * memory.weight, memory.gate_weight, memory.gate_bias)
    found = read(scaled, written(scaled, None, k, v, everything(k)), q, eps=0.0)
    torch.testing.assert_close(found, plain / 9, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("per_head", [False, True])
def test_reading_by_hand(per_head):
    memory, k, v, q = weights(dm=5), rand(2, 2, 6, D), rand(2, 2, 6, D, seed=1), rand(2, 4, 3, D, seed=2)
    found = read(memory, written(memory, None, k, v, everything(k), per_head=per_head), q)
    for b in range(2):
        for h in range(4):
            heads = [h // 2] if per_head else [0, 1]
            phi = torch.cat([k[b, i] @ memory.weight.T for i in heads])
            M = phi.T @ torch.cat([v[b, i] for i in heads])
            own = q[b, h] @ memory.weight.T
            m = own @ M / ((own**2) @ (phi**2).sum(0) + 1e-6)[:, None]
            g = torch.sigmoid(q[b, h] @ memory.gate_weight + memory.gate_bias)
            torch.testing.assert_close(found[b, h], g[:, None] * m, atol=1e-5, rtol=1e-4)


def test_the_state_neither_grows_nor_falls():
    memory, state, sizes = weights(), None, set()
    for i in range(10_000):
        k = rand(1, 2, 1, D, seed=i)
        before, state = state, written(memory, state, k, k, everything(k))
        sizes.add(state.m.untyped_storage().nbytes() + state.b.untyped_storage().nbytes())
        if i % 1000 == 1:
            assert (state.b >= before.b).all() and (before.b >= 0).all()
    assert sizes == {4 * (D * D + D)}


def test_other_dtypes_are_refused_and_half_precision_is_summed_in_full():
    with pytest.raises(Refused, match=r"latent memory in bfloat16: .* need float32"):
        FastState(torch.zeros(1, 1, D, D, dtype=torch.bfloat16), torch.zeros(1, 1, D))
    k = rand(1, 2, 6, D).bfloat16()
    assert written(weights(), None, k, k, everything(k)).m.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------- in the store


def run_forced(model, text, ids, mask=None, prompt=20, **more):
    made = Recipe.parse(text)
    provide_profiles(made, model)
    with made.on(model) as run:
        logits, cache = forced_logits(run, model, ids, prompt, mask, **more)
        return logits, cache, run.achieved


def test_a_closed_gate_is_eviction_alone(model):
    ids, mask = left_padded(tiny_ids(1, 30), tiny_ids(1, 25, seed=1))
    with_memory, cache, _ = run_forced(model, "indexmem(budget=0.4, store=latent-memory, schedule=every(steps=3))", ids, mask)
    alone, _, _ = run_forced(model, "indexmem(budget=0.4, store=ragged, schedule=every(steps=3))", ids, mask)
    assert torch.equal(with_memory, alone)
    assert all(layer.store.memory.m.abs().sum() > 0 for layer in cache.policy_layers)


def test_an_empty_state_adds_nothing():
    memory = weights()
    assert (read(memory, FastState(torch.zeros(1, 1, D, D), torch.zeros(1, 1, D)), rand(1, 4, 3, D)) == 0).all()


@pytest.mark.parametrize("per_head", [False, True])
def test_the_store_writes_unrotated_keys_and_adds_the_reading(model, per_head):
    """Every layer's output against what its parts give: kept attention plus g m of the evicted entries."""
    open_weights(model)
    parts, B, H, N = find_parts(model), 2, 2, 16
    layer = LatentMemory(per_head_state=per_head).make()
    plain = Ragged().make()
    flat, v = rand(B, H, N, D), rand(B, H, N, D, seed=1)
    positions = torch.arange(N).expand(B, N)
    k = parts.rotate(flat, *parts.rope(positions, 1))
    keep = rand(B, H, N, seed=2) > 0
    for store in (layer, plain):
        store.bind(1, parts)
        store.append(k, v, positions, None)
        store.keep(keep)
    own = Weights(random_weights(model, gate_bias=0.0)).memory(parts, 1, torch.device("cpu"), per_head)
    q = rand(B, 4, 1, D, seed=4)
    at = torch.full((B, 1), N)
    for store in (layer, plain):
        store.append(rand(B, H, 1, D, seed=5), rand(B, H, 1, D, seed=6), at, None)
    found, kept = (store.attend(parts.rotate(q, *parts.rope(at, 1)), at, scale=0.3) for store in (layer, plain))
    added = read(own, written(own, None, flat, v, ~keep, per_head=per_head), q)
    torch.testing.assert_close(found, kept + added, atol=1e-5, rtol=1e-5)
    assert added.abs().max() > 0.01


def test_it_changes_what_is_read_after_the_first_eviction_only(model):
    open_weights(model)
    ids = tiny_ids(1, 30)
    full, _, _ = run_forced(model, "full", ids)
    found, _, achieved = run_forced(model, "indexmem(budget=0.4, store=latent-memory)", ids)
    assert torch.equal(found[:, 0], full[:, 0])  # the prompt's own last row: nothing was evicted before it
    with watch_compressions() as log:
        run_forced(model, "indexmem(budget=0.4, store=ragged)", ids)
    without = oracle_logits(model, ids, log)[:, 19:]
    assert (found[:, 1:] - without[:, 1:]).abs().amax((0, 2)).min() > 1e-3
    ragged = run_forced(model, "indexmem(budget=0.4, store=ragged)", ids)[2]
    assert achieved.cache_bytes == ragged.cache_bytes + 2 * 4 * (D * D + D)  # two layers' states are counted


def test_every_sequence_starts_empty(model):
    open_weights(model)
    made = Recipe.parse("indexmem(budget=0.4, store=latent-memory)")
    first, second = tiny_ids(1, 24), tiny_ids(1, 24, seed=1)
    with made.on(model) as run:
        alone = new_tokens(model, second)
        new_tokens(model, first)
        assert new_tokens(model, second) == alone
        cache = run.cache
        cache.reset()
        assert all(layer.store.memory is None for layer in cache.policy_layers)


def test_a_loaded_state_replaces_what_was_there(model):
    open_weights(model)
    parts = find_parts(model)
    layers = []
    for seed in (0, 1):
        layer = LatentMemory().make()
        layer.bind(0, parts)
        layer.append(rand(1, 2, 12, D, seed=seed), rand(1, 2, 12, D, seed=seed + 5), torch.arange(12)[None], None)
        layer.keep(torch.arange(12).expand(1, 2, 12) < 6)
        layers.append(layer)
    whole = LatentMemory().make()
    whole.bind(0, parts)
    whole.append(rand(1, 2, 12, D), rand(1, 2, 12, D), torch.arange(12)[None], None)
    layers[0].load({n: t.clone() for n, t in layers[1].state().items()})
    assert torch.equal(layers[0].memory.m, layers[1].memory.m) and layers[0].memory.m is not layers[1].memory.m
    layers[0].load(whole.state())
    assert layers[0].memory is None
    bad = layers[1].state()
    bad["memory_b"] = bad["memory_b"].bfloat16()
    with pytest.raises(Refused, match="need float32"):
        layers[0].load(bad)


def test_snapshots_and_copies_keep_their_own_state(model):
    open_weights(model)
    made = Recipe.parse("indexmem(budget=0.4, store=latent-memory, schedule=every(steps=1))")
    ids = tiny_ids(1, 34)
    with made.on(model) as run, torch.no_grad():
        cache = run.new_cache(Prompt(ids[:, :20], 20))
        go = lambda c, part: model(ids[:, part], past_key_values=c, use_cache=True).logits  # noqa: E731
        go(cache, slice(0, 20))
        point, twin = cache.snapshot(), copy.deepcopy(cache)
        once = go(cache, slice(20, 21)), go(cache, slice(21, 22))
        cache.restore(point)
        again = go(cache, slice(20, 21)), go(cache, slice(21, 22))
        other = go(twin, slice(20, 21)), go(twin, slice(21, 22))
    for a, b, c in zip(once, again, other):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert twin.policy_layers[0].store.place is cache.policy_layers[0].store.place  # a copy shares the weights


def test_rows_are_picked_with_their_states(model):
    open_weights(model)
    layer, parts = LatentMemory().make(), find_parts(model)  # held here, as a run holds them
    layer.bind(0, parts)
    layer.append(rand(3, 2, 12, D), rand(3, 2, 12, D, seed=1), torch.arange(12).expand(3, 12), None)
    layer.keep(torch.arange(12).expand(3, 2, 12) % torch.tensor([2, 3, 4])[:, None, None] == 0)
    before = layer.memory
    layer.select(torch.tensor([2, 0, 2]))
    assert torch.equal(layer.memory.m, before.m[[2, 0, 2]]) and torch.equal(layer.memory.b, before.b[[2, 0, 2]])


def test_beams_and_padded_rows_get_what_they_get_alone(model):
    open_weights(model)
    made = Recipe.parse("indexmem(budget=0.4, store=latent-memory, schedule=every(steps=3))")
    rows = [tiny_ids(1, n, seed=n) for n in (24, 17)]
    ids, mask = left_padded(*rows)
    with made.on(model):
        both, beams = new_tokens(model, ids, attention_mask=mask), new_tokens(model, ids, attention_mask=mask, num_beams=3)
    for i, row in enumerate(rows):
        with made.on(model):
            assert new_tokens(model, row) == [both[i]] and new_tokens(model, row, num_beams=3) == [beams[i]]


def test_a_row_that_evicts_nothing_is_left_alone():
    memory, k = weights(), rand(2, 2, 6, D)
    gone = everything(k)
    gone[1] = False
    state = written(memory, written(memory, None, k, k, everything(k)), k, k, gone, lam=0.5)
    first = written(memory, None, k, k, everything(k))
    assert torch.equal(state.m[1], first.m[1]) and not torch.equal(state.m[0], first.m[0])


def test_turned_keys_cannot_be_taken_in_later(model):
    """Where keys are turned as they are kept, those that go at that moment stand where they always stood."""
    open_weights(model)
    text = "streaming-llm(n_sink=2, rerotate={}, budget=0.4, store=latent-memory)"
    turning, plain = (Recipe.parse(text.format(r)) for r in (True, False))
    states = []
    for made in (turning, plain):
        with made.on(model) as run:
            _, cache = forced_logits(run, model, tiny_ids(1, 20), 20)
            states.append(cache.policy_layers[0].store)
    assert torch.equal(states[0].memory.m, states[1].memory.m) and states[0].turned and not states[1].turned
    other = LatentMemory().make()
    other.load(states[0].state())
    assert other.turned
    made = Recipe.parse("streaming-llm(n_sink=2, rerotate=True, budget=0.4, store=latent-memory, schedule=every(steps=2))")
    with pytest.raises(Refused, match="can't take in keys that were turned"), made.on(model) as run:
        forced_logits(run, model, tiny_ids(1, 24), 20)


def test_without_weights_it_says_how_to_train_them(model):
    for text, command in (("knorm(budget=0.5, store=latent-memory)", r"longspan profile 'indexmem\(store=latent-memory\)'"),
                          ("knorm(budget=0.5, store=latent-memory(per_head_state=True))", "per_head_state=True")):
        with pytest.raises(Refused, match=command), Recipe.parse(text).on(model) as run:
            forced_logits(run, model, tiny_ids(1, 9), 9)


def test_an_indexer_alone_is_not_enough(model):
    tensors = {n: t for n, t in random_weights(model).items() if not n.startswith("memory")}
    file = profiles.save(Profile(profiles.trained_key(model, LatentMemory()), tensors))
    with pytest.raises(Refused, match="there are none"):
        LatentMemory().weights_of(find_parts(model))
    with pytest.raises(Refused, match=r"has no memory\.weight, which latent-memory needs"):
        LatentMemory(weights=str(file)).weights_of(find_parts(model))


def test_before_bind_it_evicts_nothing_silently():
    layer = LatentMemory().make()
    layer.append(rand(1, 2, 12, D), rand(1, 2, 12, D), torch.arange(12)[None], None)
    with pytest.raises(ValueError, match="before bind"):
        layer.keep(torch.arange(12).expand(1, 2, 12) < 6)
