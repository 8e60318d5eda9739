"""Scaled queries and silent heads: what they do to a model, and that every bit comes back."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan.models import find_parts
from longspan.models.frequency_kernels import best_heads, head_scores, kernel_energy, rotary_rows, rotation
from longspan.recipe import Recipe
from longspan.registry import Refused
from longspan.weights.head_ablation import HeadAblation
from longspan.weights.head_enhancement import HeadEnhancement, multipliers
from longspan.weights.heads import scaled_queries, silent_heads

FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "gemma3"]


def logits(model, length=12):
    with torch.no_grad():
        return model(tiny_ids(2, length)).logits


def weights(model):
    return {name: p.clone() for name, p in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def pre_softmax(model, layer, length=12):
    """Rotated q . k of a layer, (B,Hq,T,T)."""
    found = {}

    def keep(module, q, k, v, mask, **kwargs):
        found[module.layer_idx] = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(1, 2).contiguous(), None

    from transformers import AttentionInterface

    AttentionInterface.register("keep_products", keep)
    before = model.config._attn_implementation
    model.set_attn_implementation("keep_products")
    try:
        logits(model, length)
    finally:
        model.set_attn_implementation(before)
    return found[layer]


def pairs_of(model):
    return len(find_parts(model)._frequencies(0)[0])


# ---------------------------------------------------------------------------------------------------- scaled queries


@pytest.mark.parametrize("family", FAMILIES)
def test_multipliers_of_one_leave_logits_bit_equal(family):
    model = tiny(family)
    before = logits(model)
    with scaled_queries(find_parts(model), {(0, 1): torch.ones(pairs_of(model)), (1, 3): torch.ones(pairs_of(model))}):
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("length", [12, 4])  # 4 tokens and 4 heads: which axis is which?
@pytest.mark.parametrize("family", FAMILIES)
def test_one_number_for_all_pairs_scales_the_heads_scores(family, length):
    """Also behind a query norm, and with a bias. Phi3 rotates half of each head: only that half is scaled."""
    model = tiny(family)
    before = pre_softmax(model, 0, length)
    with scaled_queries(find_parts(model), {(0, 2): torch.full((pairs_of(model),), 1.5)}):
        after = pre_softmax(model, 0, length)
    others = [0, 1, 3]
    assert torch.equal(after[:, others], before[:, others])
    if family == "phi3":
        assert not torch.allclose(after[:, 2], before[:, 2], rtol=1e-3)
    else:
        torch.testing.assert_close(after[:, 2], 1.5 * before[:, 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_pairs_energy_grows_by_the_square(family):
    model = tiny(family)
    parts = find_parts(model)

    def energy():
        wq, wk = rotary_rows(parts, 1)
        return kernel_energy(wq, wk, *rotation(parts, 1, -50, wq))

    before, gain = energy(), torch.arange(1, pairs_of(model) + 1) / 2.0
    with scaled_queries(parts, {(1, 2): gain}):
        after = energy()
    torch.testing.assert_close(after[2], before[2] * gain.square())
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.filterwarnings("ignore:the model's queries or keys have a bias")
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_given_back(family):
    model = tiny(family).to(torch.bfloat16)
    kept, before = weights(model), logits(model)
    for change in (HeadEnhancement(heads=3), HeadAblation(heads=3), HeadAblation(heads=3, score="random")):
        with change.on(model):
            assert not torch.equal(logits(model), before)
        assert same(weights(model), kept) and torch.equal(logits(model), before)
    with pytest.raises(KeyError), HeadEnhancement(heads=8).on(model), HeadAblation(heads=2).on(model):
        raise KeyError
    assert same(weights(model), kept) and torch.equal(logits(model), before)


def test_blocks_nest():
    model = tiny("llama")
    kept = weights(model)
    with HeadEnhancement(heads=4).on(model):
        outer = weights(model)
        with HeadEnhancement(heads=4).on(model):
            assert not same(weights(model), outer)
        assert same(weights(model), outer)
    assert same(weights(model), kept)


def test_a_model_that_trains_keeps_its_gradients():
    model = tiny("llama").requires_grad_(True)
    with HeadEnhancement(heads=2).on(model):
        model(tiny_ids()).logits.sum().backward()
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


# ------------------------------------------------------------------------------------------------------ the methods


def test_profiles_at_64_pairs_are_the_published_points():
    llama, qwen = multipliers("llama", 64), multipliers("qwen3", 64)
    torch.testing.assert_close(llama[:40], 0.8 + 0.2 * torch.arange(40) / 40)
    torch.testing.assert_close(llama[[40, 47, 48, 55, 63]], torch.tensor([1.0, 1.2, 1.2, 1.0, 1.0]))
    torch.testing.assert_close(qwen[[0, 7, 8, 31, 32, 47, 48, 55, 56, 63]],
                               torch.tensor([1.0, 1.0, 1.0, 0.2, 0.2, 1.0, 1.0, 1.4, 1.4, 1.0]))
    torch.testing.assert_close(multipliers("llama", 32), llama[::2])
    between = multipliers("llama", 128)
    torch.testing.assert_close(between[1], (llama[0] + llama[1]) / 2)
    assert len(between) == 128


def test_the_best_heads_are_changed_and_no_others():
    model = tiny("llama")
    parts = find_parts(model)
    best = best_heads(head_scores(parts).rps)[:2]
    before = weights(model)
    with HeadEnhancement(heads=2, profile="qwen3").on(model):
        after = weights(model)
    gain = multipliers("qwen3", 4)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        ratio = (after[name] / before[name]).view(4, 8, 32)
        for head in range(4):
            wanted = torch.cat((gain, gain)) if (layer, head) in best else torch.ones(8)
            torch.testing.assert_close(ratio[head], wanted[:, None].expand(8, 32))
    assert all(torch.equal(before[n], after[n]) for n in before if "q_proj" not in n)


def test_silent_heads_add_nothing():
    model = tiny("llama")
    parts = find_parts(model)
    seen = {}
    hook = parts.attention(0).o_proj.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    with silent_heads(parts, [(0, 1), (0, 2), (0, 1)]):
        logits(model)
        out = parts.attention(0).o_proj(seen["x"])
    hook.remove()
    rest = seen["x"].clone()
    rest[..., 8:24] = 0
    torch.testing.assert_close(out, parts.attention(0).o_proj(rest))


def test_ablation_chooses_the_best_or_by_seed():
    parts = find_parts(tiny("llama"))
    assert HeadAblation(heads=3).chosen(parts) == best_heads(head_scores(parts).rps)[:3]
    draws = [HeadAblation(heads=3, score="random", seed=s).chosen(parts) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2] and len(set(draws[0])) == 3


def test_as_parts_of_a_recipe():
    """The recipe changes the weights, the cache and the positions together, and leaves nothing behind."""
    model, ids = tiny("llama"), tiny_ids(1, 30)
    kept, before = weights(model), logits(model)
    recipe = Recipe.parse("head-enhancement(heads=4, profile=qwen3) + snapkv(window=4) @ long-context-heads(budget=0.5)")
    assert str(recipe) == 'head-enhancement(heads=4, profile="qwen3") + snapkv(window=4) @ long-context-heads(budget=0.5)'
    with recipe.on(model) as run:
        assert not torch.equal(model(tiny_ids(2, 12)).logits, before)
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=2)
        assert run.achieved.kept_fraction == pytest.approx(0.5)
    assert same(weights(model), kept) and torch.equal(logits(model), before)


# -------------------------------------------------------------------------------------------------------- bad input


def test_bad_input():
    model = tiny("llama")
    parts = find_parts(model)
    with pytest.raises(Refused, match=r"no head \(2, 9\); the model has 2 layers of 4 query heads.* nearest is \(1, 3\)"), \
            silent_heads(parts, [(2, 9)]):
        pass
    with pytest.raises(Refused, match="5 multipliers were given for a head of 4 rotated pairs; expected 4"), \
            scaled_queries(parts, {(0, 0): torch.ones(4), (0, 1): torch.ones(5)}):
        pass
    for name, cls in (("head-enhancement", HeadEnhancement), ("head-ablation", HeadAblation)):
        with pytest.raises(Refused, match=rf"{name}\(heads=9\): the model has 8 query heads"), cls(heads=9).on(model):
            pass
    with pytest.raises(Refused, match="did you mean 'llama'"):
        HeadEnhancement(profile="lama")


def test_weights_that_cannot_be_changed_in_place_are_refused():
    class Other(torch.nn.Linear):
        pass

    model = tiny("llama")
    kept = weights(model)
    layer = model.model.layers[1].self_attn
    layer.q_proj.__class__ = Other
    with pytest.raises(Refused, match="layer 1's query projection is Other, whose weights can't be changed in place"), \
            HeadEnhancement(heads=8).on(model):
        pass
    assert same(weights(model), kept)
    with pytest.raises(Refused, match="layer 0's output projection is offloaded"):
        meta = copy.deepcopy(tiny("llama")).to("meta")
        with silent_heads(find_parts(meta), [(0, 0)]):
            pass
