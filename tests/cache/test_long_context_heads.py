"""Frequency kernels against explicit D x D matrices and the model's own rotations, and the budget they give."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from layer_contexts import random_context
from tiny_models import tiny, tiny_ids

from longspan.cache.budgets.long_context_heads import LongContextHeads
from longspan.cache.budgets.uniform import Uniform
from longspan.cache.policy import CachePolicy
from longspan.cache.scores.knorm import KNorm
from longspan.models import find_parts
from longspan.models import frequency_kernels as fk
from longspan.recipe import Recipe
from longspan.registry import Refused

FAMILIES = ["llama", "qwen3", "phi3", "gemma3"]


def random_rows(heads=2, kv_heads=1, pairs=4, width=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 2, pairs, width, generator=g, dtype=torch.float64) for n in (heads, kv_heads)]


def angles(pairs=4, distance=-40):
    theta = distance * 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return theta.cos(), theta.sin()


def explicit(wq, wk, cos, sin):
    """All M_m as matrices, (heads, pairs, D, D)."""
    group = len(wq) // len(wk)
    return torch.stack([torch.stack([
        wq[h, :, m].T @ torch.tensor([[cos[m], -sin[m]], [sin[m], cos[m]]], dtype=wq.dtype) @ wk[h // group, :, m]
        for m in range(wq.shape[2])]) for h in range(len(wq))])


# ------------------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("distance", [0, -1, -40, -32768, 17])
def test_closed_forms_equal_explicit_kernels(distance):
    wq, wk = random_rows(heads=4, kv_heads=2)
    cos, sin = angles(distance=distance)
    kernels = explicit(wq, wk, cos, sin)
    torch.testing.assert_close(fk.kernel_energy(wq, wk, cos, sin), kernels.square().sum((-1, -2)), rtol=1e-6, atol=0)
    whole = kernels.sum(1)
    norm = whole.square().sum((-1, -2))
    half = ((whole + whole.mT) / 2).square().sum((-1, -2))
    torch.testing.assert_close(fk.symmetry(wq, wk, cos, sin), (half / norm - 0.5).abs(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_of_kernels_is_the_models_rotated_product(family):
    """x^T M(n) y for layer inputs x and y is q . k as the model turns them. Norms are left out on both sides: what a norm
    divides by depends on the input, and only its weight is in the kernel."""
    parts = find_parts(tiny(family))
    attention = parts.attention(1)
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, generator=g) for _ in range(2))
    wq, wk = fk.rotary_rows(parts, 1)
    i, j = 50, 20
    kernels = explicit(wq, wk, *fk.rotation(parts, 1, j - i, wq)).sum(1)
    q, k = _projected(attention, x, y)
    for which, norm in (("q", fk.query_norm(attention)), ("k", fk._norm(attention, "k"))):
        if norm is not None:
            weight = 1 + norm.weight if family.startswith("gemma") else norm.weight
            q, k = (q * weight, k) if which == "q" else (q, k * weight)
    rotated = 2 * fk.rotary_pairs(parts, 1)
    q, k = (parts.rotate(t[None, :, None, :rotated], *parts.rope(torch.tensor([[p]]), 1))[0, :, 0] for t, p in ((q, i), (k, j)))
    wanted = (q * k.repeat_interleave(2, 0)).sum(-1)
    torch.testing.assert_close(torch.einsum("d,hde,e->h", x, kernels, y), wanted, rtol=1e-3, atol=1e-4)


def _projected(attention, x, y):
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj(x)[:32].view(4, 8), attention.qkv_proj(y)[32:48].view(2, 8)
    return attention.q_proj(x).view(4, 8), attention.k_proj(y).view(2, 8)


def test_neighbouring_pairs_and_yarn_scaling():
    """The same product in a model that pairs channels 2m and 2m+1, and in one whose rotations scale."""
    import transformers

    numbers = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    cohere = transformers.CohereForCausalLM(transformers.CohereConfig(**numbers))
    yarn = tiny("llama", rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                          "original_max_position_embeddings": 64})
    for model, pairing in ((cohere, "neighbours"), (yarn, "halves")):
        parts = find_parts(model.requires_grad_(False))
        assert parts.pairing == pairing
        x, y = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
        wq, wk = fk.rotary_rows(parts, 0)
        kernels = explicit(wq, wk, *fk.rotation(parts, 0, 11 - 30, wq)).sum(1)
        q, k = _projected(parts.attention(0), x, y)
        q, k = (parts.rotate(t[None, :, None], *parts.rope(torch.tensor([[p]]), 0))[0, :, 0] for t, p in ((q, 30), (k, 11)))
        wanted = (q * k.repeat_interleave(2, 0)).sum(-1)
        torch.testing.assert_close(torch.einsum("d,hde,e->h", x, kernels, y), wanted, rtol=1e-3, atol=1e-5)


def test_scores_of_known_energies():
    P = 8
    first, last, uniform, none = torch.zeros(4, P, dtype=torch.float64)
    first[0] = last[-1] = 1.0
    uniform += 2.0
    none += 1e-10
    s_dist, s_erank, lps = fk.energy_scores(torch.stack((first, last, uniform, none)))
    torch.testing.assert_close(s_dist, torch.tensor([0, 1, 0.5, 0], dtype=torch.float64))
    torch.testing.assert_close(s_erank, torch.tensor([1 - 1 / P, 1 - 1 / P, 0, 0], dtype=torch.float64), atol=1e-6, rtol=0)
    assert lps[1] == pytest.approx((1 - 1 / P) ** 0.6) and lps[0] == 0 and lps[3] == 0
    drawn = torch.rand(100, P, generator=torch.Generator().manual_seed(0))
    effective = P * (1 - fk.energy_scores(drawn)[1])
    assert (effective >= 1).all() and (effective <= P + 1e-6).all()


def test_scale_of_the_weights_changes_no_share():
    wq, wk = random_rows()
    cos, sin = angles()
    for a, b in zip(fk.energy_scores(fk.kernel_energy(wq, wk, cos, sin)),
                    fk.energy_scores(fk.kernel_energy(5 * wq, 0.3 * wk, cos, sin))):
        torch.testing.assert_close(a, b)


def test_a_round_key_gram_makes_energy_independent_of_distance():
    wq, wk = random_rows(pairs=3)
    wk = torch.zeros_like(wk)
    for m, c in enumerate((1.0, 2.0, 0.5)):  # orthogonal rows of equal length: G^k = c^2 I
        wk[0, 0, m, 2 * m], wk[0, 1, m, 2 * m + 1] = c, c
    trace_q = wq.square().sum((1, -1))
    trace_k = wk.square().sum((1, -1))
    for distance in (0, -3, -500):
        energy = fk.kernel_energy(wq, wk, *angles(3, distance))
        torch.testing.assert_close(energy, trace_q * trace_k / 2)


def test_symmetry_of_known_kernels():
    wq, wk = random_rows(heads=1)
    none = angles(distance=0)
    assert fk.symmetry(wk, wk, *none).item() == pytest.approx(0.5)
    wq[..., :8], wk[..., 8:] = 0, 0  # queries and keys read different inputs: W_K W_Q^T = 0
    assert fk.symmetry(wq, wk, *none).item() == 0
    for seed in range(20):
        q, k = random_rows(heads=3, kv_heads=3, seed=seed)
        sym = fk.symmetry(q, k, *angles())
        assert (sym >= 0).all() and (sym <= 0.5 + 1e-12).all()


def test_heads_of_a_group_differ_and_dead_heads_score_zero():
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj.weight[:8] = 0
    scores = fk.head_scores(find_parts(model))
    assert scores.rps.shape == (2, 4)
    assert all(getattr(scores, name)[1, 0] == 0 for name in ("s_dist", "s_erank", "lps", "sym", "rps"))
    assert scores.rps[0].unique().numel() == 4
    torch.testing.assert_close(scores.rps, scores.lps - 0.5 * scores.sym)
    torch.testing.assert_close(scores.lps, scores.s_dist**0.4 * scores.s_erank**0.6)
    z = scores.by("rps", per_layer=True)
    torch.testing.assert_close(z.mean(-1), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.std(-1, correction=0), torch.ones(2))


def test_best_heads_come_first():
    assert fk.best_heads(torch.tensor([[0.1, 0.5], [0.5, 0.9]])) == [(1, 1), (0, 1), (1, 0), (0, 0)]


def test_a_bias_is_warned_about_and_nothing_else():
    with pytest.warns(UserWarning, match="have a bias, which frequency kernels leave out"):
        fk.head_scores(find_parts(tiny("qwen2")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fk.head_scores(find_parts(tiny("llama")))


def test_models_without_usable_rotations_are_refused():
    parts = find_parts(tiny("llama", head_dim=2))
    with pytest.raises(Refused, match="rotates 1 pair of channels a head; expected at least 2"):
        fk.head_scores(parts)
    model = tiny("llama")
    model.model.layers[1].self_attn.use_rope = False
    with pytest.raises(Refused, match="layer 1 of LlamaForCausalLM has no rotary positions"):
        fk.head_scores(find_parts(model))


def test_quantised_and_adapted_weights_are_read_by_what_they_do():
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.inner(x)

    model = tiny("llama")
    wanted = fk.head_scores(find_parts(model))
    attention = model.model.layers[0].self_attn
    attention.q_proj = Wrapped(attention.q_proj)
    torch.testing.assert_close(fk.head_scores(find_parts(model)).rps, wanted.rps)


def test_scores_are_remembered_until_the_weights_change(monkeypatch):
    model, calls = tiny("llama"), []
    real = fk.head_scores
    monkeypatch.setattr(fk, "head_scores", lambda parts, distance: calls.append(distance) or real(parts, distance))
    before = fk.known_head_scores(find_parts(model))
    assert fk.known_head_scores(find_parts(model)) is before and len(calls) == 1
    fk.known_head_scores(find_parts(model), -5)
    assert calls == [fk.DISTANCE, -5]
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[:8] *= torch.arange(1.0, 9.0)[:, None]
    after = fk.known_head_scores(find_parts(model))
    assert len(calls) == 3 and not torch.equal(after.rps, before.rps)


# -------------------------------------------------------------------------------------------------------- the budget


def test_head_tokens_by_hand():
    """Mean 20 of 100, half of it sure: 10 a head. 8 heads have 80 to give: the best takes all 100, then nothing is left."""
    budget = LongContextHeads(budget=0.2)
    assert [budget.head_tokens(20, 100, place, 8, 0) for place in range(8)] == [90, *[10] * 7]
    more = LongContextHeads(budget=0.4, alpha=0.25)  # 240 to give, rooms of 90
    assert [more.head_tokens(40, 100, place, 8, 0) for place in range(8)] == [100, 100, 70, *[10] * 5]
    assert [more.head_tokens(40, 100, place, 8, 16) for place in range(8)] == [100, 100, 40, *[16] * 5]
    assert more.head_tokens(40, 100, None, 8, 0) == 40


@pytest.mark.parametrize(
    ("mean", "length", "alpha", "protected"), [(1, 9, 0.5, 0), (7, 7, 0.2, 3), (5, 80, 0.0, 5), (33, 50, 0.9, 2)])
def test_the_mean_over_the_model_is_what_was_asked(mean, length, alpha, protected):
    budget = LongContextHeads(alpha=alpha)
    counts = [budget.head_tokens(mean, length, place, 12, protected) for place in range(12)]
    assert sum(counts) == 12 * mean
    assert counts == sorted(counts, reverse=True) and min(counts) >= min(mean, max(1, protected)) and max(counts) <= length


def test_alpha_one_is_uniform():
    for layer in range(2):
        masks = [CachePolicy(KNorm(), budget).plan(random_context(30, layer=layer)).mask
                 for budget in (LongContextHeads(budget=0.4, alpha=1.0), Uniform(budget=0.4))]
        assert torch.equal(*masks)


def test_the_best_heads_keep_everything_and_a_kv_head_is_as_good_as_its_best_query_head():
    x = [random_context(40, layer=i) for i in range(2)]
    scores = fk.head_scores(x[0].parts).rps.view(2, 2, 2).amax(-1)
    counts = torch.stack([CachePolicy(KNorm(), LongContextHeads(budget=0.4)).plan(c).counts[0] for c in x])
    best = fk.best_heads(scores)[0]
    assert counts[best] == 40 and counts.sum() == 4 * 16 and (counts >= 8).all()


def test_rows_have_budgets_of_their_own_and_pads_never_stay():
    x = random_context(30, rows=2, pads=(0, 10))
    plan = CachePolicy(KNorm(), LongContextHeads(budget=0.3)).plan(x)
    assert not (plan.mask & ~x.valid).any()
    assert (plan.counts[1] <= 20).all() and (plan.counts[0] != plan.counts[1]).any()


def test_layers_with_a_window_take_no_part():
    model = tiny("gemma3", layers=4)
    parts = find_parts(model)
    budget = LongContextHeads(budget=0.5)
    assert [parts.is_sliding(i) for i in range(4)] == [True, False, True, False]
    ranked = []
    for layer in range(4):
        places, n = budget.places(random_context(20, layer=layer, n_layers=4, parts=parts))
        assert n == 4
        ranked += places
    assert ranked.count(None) == 4 and sorted(p for p in ranked if p is not None) == [0, 1, 2, 3]


def test_in_a_model_the_mean_is_met_and_reported():
    model = tiny("llama", layers=4)
    with Recipe.parse("snapkv(window=4) @ long-context-heads(budget=0.5)").on(model) as run:
        model.generate(tiny_ids(1, 40), max_new_tokens=2, do_sample=False, pad_token_id=2)
    kept = torch.tensor(run.achieved.kept)
    assert kept.sum() == kept.numel() * 20 and run.achieved.kept_fraction == pytest.approx(0.5)
    assert kept.max() == 40 and math.isclose(float(kept.min()), 10)


def test_a_store_of_equal_lengths_is_refused():
    with pytest.raises(Refused, match="long-context-heads keeps a different number of tokens per head, which store=dense"):
        Recipe.parse("knorm(store=dense) @ long-context-heads(budget=0.5)")
    with pytest.raises(Refused, match="did you mean 'lps'"):
        LongContextHeads(score="lpz")
