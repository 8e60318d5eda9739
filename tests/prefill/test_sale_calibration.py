"""Thresholds of SALE: found by halving until the bound holds, kept for a model, and asked for by name."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from tiny_models import tiny, tiny_ids
from tiny_tokenizer import tiny_tokenizer

from longspan import Recipe
from longspan.kernels.block_sparse import block_sparse_attention
from longspan.models import profiles
from longspan.models.load import Loaded
from longspan.prefill import ReadContext
from longspan.prefill.base import dense_plan
from longspan.prefill.sale import Sale, inspect
from longspan.prefill.sale_calibration import LEAST, START, _Finder, lowered, prompt, sparse_error, texts, train
from longspan.registry import Refused

SMALL = {"q_block": 16, "k_block": 16, "w": 32, "dense_until": 0}


def context(T=400, heads=4, key_heads=2, D=32) -> ReadContext:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, T, D, generator=g) for h in (heads, key_heads, key_heads))
    return ReadContext(q + torch.randn(D, generator=g), k, v, D**-0.5)


def dense(x: ReadContext) -> torch.Tensor:
    return block_sparse_attention(x.q, x.k, x.v, dense_plan(x, 64), scale=x.scale)


def test_thresholds_halve_until_the_bound_holds():
    x = context(T=420)
    for theta in (0.05, 0.4, 1.0, 3.0):
        method = Sale(theta=theta, **SMALL)
        found = lowered(x, method, dense(x))
        allowed = {0.0} | {START / 2**r for r in range(10) if START / 2**r > LEAST}
        assert all(any(math.isclose(t, a, rel_tol=1e-6) for a in allowed) for t in found.tolist())
        seen = inspect(x, method.areas(x))
        error = sparse_error(x, method, seen, found, dense(x))
        assert bool((error < theta * 420)[found > 0].all())
        larger = sparse_error(x, method, seen, 2 * found, dense(x))
        assert bool((larger >= theta * 420)[(found > 0) & (found < START * 0.99)].all())
    assert lowered(context(T=40), Sale(**SMALL), dense(context(T=40))) is None


def test_thresholds_only_fall():
    x, method = context(T=420), Sale(theta=3.0, **SMALL)
    start = torch.tensor([0.001, 0.0, 0.008, 0.0005])
    assert bool((lowered(x, method, dense(x), start) <= start).all())


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


def test_training_finds_thresholds_that_hold_on_every_prompt():
    model = tiny("llama", layers=2, positions=1024)
    prompts = [tiny_ids(1, 330, seed=s)[0].tolist() for s in (1, 2)]
    method = Sale(theta=0.02, **SMALL)
    found = train(model, prompts, [method], {})
    assert found["tau"].shape == (2, 4) and found["tau"].dtype == torch.float32
    again = _Finder(method)
    again.tau = dict(enumerate(found["tau"]))
    assert not any(again.read(model, ids) for ids in prompts)  # nothing is left to lower
    assert train(model, [], [method], found) is found
    assert model.config._attn_implementation != "longspan"
    with pytest.raises(Refused, match="leave nothing to skip"):
        train(model, [prompts[0][:60]], [method], {})


def test_layers_that_are_never_read_sparsely_get_zero():
    model = tiny("gemma3", layers=2, positions=1024)
    found = train(model, [tiny_ids(1, 330)[0].tolist()], [Sale(theta=5.0, **SMALL)], {})
    assert not found["tau"][0].any() and found["tau"][1].all()


def test_prompts_are_dictionaries_with_a_question():
    tokenizer = tiny_tokenizer()
    ids = prompt(tokenizer, 700, random.Random(3))
    text = tokenizer.decode(ids)
    asked = text.split('value of the key "')[1].split('"')[0]
    assert 600 < len(ids) <= 700 and text.count(f'"{asked}": "') == 1 and text.endswith("assistant\n")
    assert ids == prompt(tokenizer, 700, random.Random(3)) != prompt(tokenizer, 700, random.Random(4))
    with pytest.raises(Refused, match="ask for more"):
        prompt(tokenizer, 60, random.Random(0))


def test_short_lengths_ask_for_prompts_of_4096_tokens(tmp_path):
    model = tiny("llama", positions=3000, vocab=1200)
    loaded = Loaded(model, tiny_tokenizer(), "tiny", "0" * 64, tmp_path)
    made = texts(loaded, 2, 1024)
    assert len(made) == 2 and all(2900 < len(ids) <= 3000 for ids in made) and made[0] != made[1]
    assert 2100 < len(texts(loaded, 1, 2200)[0]) <= 2200
    with pytest.raises(Refused, match="reads 3000"):
        texts(loaded, 1, 3001)
    with pytest.raises(Refused, match="at least 1"):
        texts(loaded, 0, 4096)


def test_without_thresholds_the_command_is_named(own_cache):
    model = tiny("llama", positions=1024)
    ids = tiny_ids(1, 400)
    with pytest.raises(Refused, match="longspan profile sale"), Recipe.parse("sale(dense_until=0)").on(model):
        model(ids)
    with pytest.raises(Refused, match=r"longspan profile 'sale\(theta=0.2, k_block=16\)'"), \
            Recipe.parse("sale(dense_until=0, theta=0.2, k_block=16)").on(model):
        model(ids)
    with pytest.raises(Refused, match="or run the model under the recipe"):
        Sale(dense_until=0).plan(context())


def test_found_thresholds_are_used_and_a_prompt_is_read(own_cache):
    model = tiny("llama", positions=1024)
    ids, method = tiny_ids(1, 400), Sale(**SMALL)
    tau = torch.tensor([[0.0, 1.0, 1.0, 0.1], [1.0, 1.0, 1.0, 1.0]])
    profiles.save(profiles.Profile(profiles.trained_key(model, method), {"tau": tau}))
    recipe = Recipe.parse(str(method))
    with recipe.on(model) as run:
        sparse = model(ids).logits
        assert 0.1 < run.achieved.density < 0.9
    plain_ = model(ids).logits
    assert not torch.allclose(sparse, plain_) and torch.isfinite(sparse).all()
    half = tiny("llama", positions=1024).bfloat16()  # the key doesn't depend on the dtype
    assert profiles.find_trained(half, method).key == profiles.trained_key(model, method)
    profiles.save(profiles.Profile(profiles.trained_key(model, method), {"tau": tau[:1, :3]}))
    with pytest.raises(Refused, match="thresholds of shape"), Recipe.parse(str(method)).on(model):
        model(ids)


def test_thresholds_of_the_bundled_model_come_with_the_package():
    file, = profiles.SHIPPED.glob("*-sale-*.safetensors")
    found = profiles.load(file)
    assert found.key.shipped == file and json.loads(found.key.settings) == Sale().profile_settings()
    allowed = [0.0] + [START / 2**r for r in range(10) if START / 2**r > LEAST]
    tau = found.tensors["tau"]
    assert tau.shape == (30, 9) and bool((tau[..., None] - torch.tensor(allowed)).abs().amin(-1).lt(1e-9).all())


def test_every_threshold_at_zero_is_the_model_as_it_is():
    model, ids = tiny("llama", positions=1024), tiny_ids(1, 400)
    with Recipe.parse("sale(tau=0.0, dense_until=0)").on(model) as run:
        assert torch.allclose(model(ids).logits, tiny("llama", positions=1024)(ids).logits, atol=1e-4)
        assert run.achieved.density == 1.0
