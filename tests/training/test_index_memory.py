"""Training indexers and memories: losses by hand, gradients that stay in the add-ons, and the command's way through."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from profiled import random_weights
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan import load
from longspan.cache.index_memory import Indexer
from longspan.cache.scores.indexmem import IndexMem
from longspan.cache.stores.latent_memory import LatentMemory
from longspan.context import Context
from longspan.evaluation.profiling import make_profile
from longspan.models import find_parts, profiles
from longspan.recipe import Recipe
from longspan.registry import Refused
from longspan.training import index_memory as training
from longspan.training import layer_notes
from longspan.training.index_memory import (
    INDEXER,
    MEMORY,
    MemoryModule,
    case_of,
    cases_of,
    fit_indexer,
    fit_memory,
    importance,
    index_loss,
    memory_loss,
    teacher,
    train,
    trained_importance,
)
from longspan.training.layer_notes import note

QUICK = {"indexer": replace(INDEXER, steps=40, accumulate=1, log_every=20),
         "memory": replace(MEMORY, steps=60, accumulate=1, log_every=60)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


def ids_of(n=2, length=48):
    return [tiny_ids(1, length, seed=s)[0].tolist() for s in range(n)]


@pytest.fixture(scope="module")
def noted():
    return note(tiny("llama"), ids_of(3), [0, 1])


def indexer_of(model, layer=0):
    w = random_weights(model)
    return Indexer(*(w[f"indexer.{n}"][layer] for n in ("query", "key", "gate")))


# --------------------------------------------------------------------------------------------------------------- losses


def test_divergence_is_positive_and_zero_up_to_a_constant():
    g = torch.Generator().manual_seed(0)
    wanted, found = torch.randn(20, generator=g), torch.randn(20, generator=g)
    assert index_loss(wanted, found) > 0.1
    assert index_loss(wanted, wanted + 2.5).abs() < 1e-6
    torch.testing.assert_close(index_loss(wanted, found + 11.0), index_loss(wanted, found), atol=1e-6, rtol=1e-5)
    changed = found.clone()
    changed[:4] += 9.0  # the first four are left out
    assert torch.equal(index_loss(wanted, changed), index_loss(wanted, found))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_teacher_is_the_most_any_row_and_head_looks_at_a_token_with(family):
    model = tiny(family)
    layer = 1
    text = note(model, ids_of(1, 30), [layer])[layer][0]
    model.set_attn_implementation("eager")  # the only one of transformers' own that knows softcaps
    hidden, states = [], model.model.layers[layer].self_attn
    hook = states.register_forward_pre_hook(lambda m, a, k: hidden.append(k["hidden_states"]), with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor(ids_of(1, 30)))
    hook.remove()
    torch.testing.assert_close(text.hidden, hidden[0][0], atol=1e-5, rtol=1e-5)
    logits = torch.einsum("hgsd,htd->hgst", text.q.unflatten(0, (2, -1)), text.k) * text.scale
    if text.softcap is not None:
        logits = text.softcap * torch.tanh(logits / text.softcap)
    wanted = logits.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf).amax((0, 1, 2))
    torch.testing.assert_close(teacher(text), wanted, atol=1e-5, rtol=1e-5)
    parts = find_parts(model)
    turned = parts.rotate(text.flat[None], *parts.rope(torch.arange(30)[None], layer))[0]
    torch.testing.assert_close(turned, text.q, atol=1e-5, rtol=1e-5)


def test_gradients_through_deciding_rows_are_those_of_the_dense_maximum(noted):
    text = noted[0][0]
    made = training.IndexerModule(2, 8, 32, 32, seed=1)
    index_loss(teacher(text), trained_importance(text, made.indexer())).backward()
    sparse = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    one, hidden = made.indexer(), text.hidden[None]
    scores = torch.einsum("bsh,bsht->bst", one.gates(hidden), torch.einsum(
        "bshd,btd->bsht", one.queries(text.flat[None]), one.keys(hidden)).relu())[0]
    dense = scores.masked_fill(~torch.ones(48, 48, dtype=torch.bool).tril(), -torch.inf).amax(0)
    torch.testing.assert_close(importance(text, one), dense.detach(), atol=1e-5, rtol=1e-5)
    index_loss(teacher(text), dense).backward()
    for found, p in zip(sparse, made.parameters()):
        torch.testing.assert_close(found, p.grad, atol=1e-5, rtol=1e-4)


def test_the_residual_is_what_evicted_entries_would_have_added(noted):
    text = noted[1][0]
    keep = torch.rand(24, generator=torch.Generator().manual_seed(0)) > 0.5
    case = case_of(text, keep)
    logits = torch.einsum("hgsd,htd->hgst", text.q[:, 24:].unflatten(0, (2, -1)), text.k) * text.scale
    logits = logits.masked_fill(torch.arange(48) > torch.arange(24, 48)[:, None], -torch.inf)
    mask = torch.cat([keep, torch.ones(24, dtype=torch.bool)])
    full, kept = ((x.softmax(-1) @ text.v[:, None]).flatten(0, 1) for x in (logits, logits.masked_fill(~mask, -torch.inf)))
    torch.testing.assert_close(case.residual[0], full - kept, atol=1e-5, rtol=1e-4)
    assert torch.equal(case.k[0], text.flat_k[:, :24][:, ~keep]) and torch.equal(case.v[0], text.v[:, :24][:, ~keep])
    closed = replace_gate(MemoryModule(8).memory(), -torch.inf)
    torch.testing.assert_close(memory_loss(closed, case), case.residual.square().mean())


def replace_gate(memory, bias):
    return type(memory)(memory.weight, memory.gate_weight, torch.tensor(bias))


def test_sinks_are_never_among_the_evicted(noted):
    text, indexer = noted[0][0], indexer_of(tiny("llama"))
    for case, share in zip(cases_of(text, indexer), training.EVICTED):
        assert case.k.shape[2] == 24 - max(4, int((1 - share) * 24 + 1e-9))
        sinks = text.flat_k[:, :4]
        assert not any(torch.equal(case.k[0, :, i], sinks[:, j]) for i in range(case.k.shape[2]) for j in range(4))


# ------------------------------------------------------------------------------------------------------------- training


def test_an_indexer_learns_its_teacher(noted):
    texts = noted[0]
    before = sum(float(index_loss(teacher(t), importance(t, training.IndexerModule(2, 8, 32, 32).indexer()))) for t in texts)
    trained = fit_indexer(texts, 2, 8, replace(INDEXER, steps=80, accumulate=1, log_every=80))
    assert sum(float(index_loss(teacher(t), importance(t, trained))) for t in texts) < 0.6 * before


def test_a_memory_learns_what_is_missing(noted):
    model = tiny("llama")
    cases = [c for t in noted[1] for c in cases_of(t, indexer_of(model, 1), [0.75])]
    missing = sum(float(c.residual.square().mean()) for c in cases)
    for per_head in (False, True):
        trained = fit_memory(cases, replace(MEMORY, steps=150, accumulate=3, log_every=150), per_head)
        assert sum(float(memory_loss(trained, c, per_head=per_head)) for c in cases) < 0.95 * missing


def test_gradients_reach_only_the_add_ons():
    model = tiny("llama").requires_grad_()
    before = {n: p.clone() for n, p in model.named_parameters()}
    train(model, ids_of(), [IndexMem(), LatentMemory()], {}, **QUICK)
    for name, p in model.named_parameters():
        assert p.grad is None and torch.equal(p, before[name])
    assert model.config._attn_implementation != "longspan"


def test_what_is_there_is_taken_over():
    model, texts = tiny("llama"), ids_of()
    indexers = train(model, texts, [IndexMem()], {}, **QUICK)
    assert set(indexers) == {"layers", "indexer.query", "indexer.key", "indexer.gate"}
    assert indexers["indexer.query"].shape == (2, 1, 8, 32) and indexers["layers"].tolist() == [0, 1]
    both = train(model, texts, [IndexMem(), LatentMemory()], indexers, **QUICK)
    assert all(torch.equal(both[n], t) for n, t in indexers.items()) and both["memory.weight"].shape == (2, 8, 8)
    third = train(model, texts, [LatentMemory(per_head_state=True)], both, **QUICK)
    assert third.keys() - both.keys() == {"memory-per-head.weight", "memory-per-head.gate_weight", "memory-per-head.gate_bias"}
    at_once = train(model, texts, [LatentMemory()], {}, **QUICK)  # a memory is trained on an indexer's choices
    assert torch.equal(at_once["indexer.key"], indexers["indexer.key"])
    again = train(model, texts, [IndexMem()], both, again=True, seed=1, **QUICK)
    assert not torch.equal(again["indexer.key"], both["indexer.key"])
    assert torch.equal(again["memory.weight"], both["memory.weight"])


def test_layers_are_noted_in_groups_that_fit(monkeypatch):
    model, texts = tiny("llama", layers=3), ids_of()
    at_once = train(model, texts, [IndexMem()], {}, **QUICK)
    monkeypatch.setattr(layer_notes, "NOTED_BYTES", 1)
    assert layer_notes.groups_of(model, [0, 1, 2], texts) == [[0], [1], [2]]
    one_by_one = train(model, texts, [IndexMem()], {}, **QUICK)
    assert all(torch.equal(one_by_one[n], t) for n, t in at_once.items())


def test_sliding_layers_take_no_part():
    found = train(tiny("gemma3", layers=4), ids_of(), [IndexMem()], {}, **QUICK)
    assert found["layers"].tolist() == [1, 3]
    with pytest.raises(Refused, match="every layer of this model has a sliding window"):
        train(tiny("mistral", sliding_window=16), ids_of(), [IndexMem()], {}, **QUICK)


def test_texts_with_nothing_to_choose_from_are_refused():
    for texts in ([], [[5] * 20]):
        with pytest.raises(Refused, match="too little to train on"):
            train(tiny("llama"), texts, [IndexMem()], {})


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("model"), positions=1024), dtype="float32")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(training.train, "__kwdefaults__", training.train.__kwdefaults__ | QUICK)


def test_profiles_are_trained_found_and_reused(loaded, quick):
    options = {"contexts": 1, "length": 160}
    first = make_profile(loaded, "indexmem(budget=0.25)", **options)
    assert not first.reused and first.path.is_file() and first.profile.notes["length"] == 160
    assert make_profile(loaded, "indexmem(budget=0.5, group=2)", **options).reused
    context = Context.from_ids(loaded, range(10, 110), "indexmem(budget=0.25)")
    assert context.achieved.kept_fraction == 0.25
    told = []
    both = make_profile(loaded, "indexmem(store=latent-memory)", lambda *what: told.append(what), **options)
    assert both.path == first.path and not both.reused and [t[:2] for t in told] == [(0, 2), (1, 2), (2, 2)]
    assert torch.equal(both.profile.tensors["indexer.key"], first.profile.tensors["indexer.key"])
    Context.from_ids(loaded, range(10, 110), "snapkv(budget=0.5, store=latent-memory)")
    budgets = make_profile(loaded, "indexmem @ lu-kv", **options | {"questions": 1, "answers": "known"})
    assert budgets.profile.key.method == "lu-kv" and "ratios" in budgets.profile.tensors


def test_a_score_is_trained_before_a_budget_is_fitted(loaded, quick):
    made = make_profile(loaded, "indexmem @ lu-kv", contexts=1, length=160, questions=1, answers="known")
    assert made.profile.key.score == "indexmem" and profiles.trained_key(loaded.model, IndexMem()).path.is_file()


def test_weights_that_come_with_the_package_serve_until_the_user_trains_some(loaded, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "shipped")
    key = profiles.trained_key(loaded.model, IndexMem())
    made = make_profile(loaded, "indexmem", contexts=1, length=160, out=key.shipped)
    assert made.path == key.shipped and not key.path.exists()
    assert profiles.find_trained(loaded.model, IndexMem()).tensors.keys() == made.profile.tensors.keys()
    assert make_profile(loaded, "indexmem").path == key.shipped and make_profile(loaded, "indexmem").reused
    own = make_profile(loaded, "indexmem", contexts=1, length=160, seed=1, again=True)
    assert own.path == key.path
    assert torch.equal(profiles.find_trained(loaded.model, IndexMem()).tensors["indexer.key"], own.profile.tensors["indexer.key"])


@pytest.mark.slow
def test_the_bundled_models_weights_load_and_fit():
    loaded = load(dtype="float32")
    parts = find_parts(loaded.model)
    for method in (IndexMem(), LatentMemory()):
        assert profiles.trained_key(loaded.model, method).shipped.is_file()
        found = profiles.find_trained(loaded.model, method)
        assert found.tensors["layers"].tolist() == list(range(parts.n_layers))
        assert all(torch.isfinite(t.float()).all() for t in found.tensors.values())
    ids = loaded.tokenizer("The quick brown fox jumps over the lazy dog. " * 12)["input_ids"]
    context = Context.from_ids(loaded, ids, Recipe.parse("indexmem(budget=0.25, store=latent-memory)"))
    assert context.achieved.kept_fraction == pytest.approx(0.25, abs=0.01)
    assert context.nlls(ids[1:9], ids[9:14])
