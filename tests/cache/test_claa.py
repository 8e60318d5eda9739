"""CLAA and FastKV: window scores, the maximum over layers, what is kept and what goes on, and the oracle."""

from __future__ import annotations

import pytest
import torch
from generating import left_padded, new_tokens
from layer_contexts import plain_attention, random_context
from pruned_oracle import pruned_logits, read_pruned
from tiny_models import tiny, tiny_ids

from longspan.cache.policies import pruning
from longspan.cache.policies.claa import CLAA, fold
from longspan.cache.policies.fastkv import FastKV
from longspan.cache.policies.pruning import REFERENCE, window_scores
from longspan.context import Context
from longspan.models import Loaded, Prompt
from longspan.models.drop import PROMPT_ROWS
from longspan.recipe import Recipe
from longspan.registry import Refused

LAYERS, N, W = 6, 40, 4
CLAA3 = "claa(rho=0.5, W=4, n=2, l_p=3)"
FASTKV3 = "fastkv(rho=0.5, W=4, l_p=3)"


def pruned(model, text, ids=None, mask=None, more=0, note=None):
    """Logits and cache of a prompt read under a recipe, with `note` laid down for all layers."""
    ids = tiny_ids(1, N) if ids is None else ids
    with Recipe.parse(text).on(model) as run:
        cache = run.new_cache(Prompt(ids[:, : ids.shape[1] - more], ids.shape[1] - more))
        if note is not None:
            cache.across[REFERENCE] = note
        logits, _ = read_pruned(run, model, ids, ids.shape[1] - more, mask, cache=cache)
        return logits, cache, run.achieved


def plan_all(policy, contexts):
    """The plans of every layer in turn, and which tokens go on."""
    across = {}
    for x in contexts:
        x.across = across
    return [policy.plan(x).mask for x in contexts], across.get(PROMPT_ROWS)


def stack_of(n_layers, **more):
    """One random context for every layer of a model."""
    return [random_context(layer=i, n_layers=n_layers, seed=100 + i, **more) for i in range(n_layers)]


# ---------------------------------------------------------------------------------------------------------- the scores


@pytest.mark.parametrize("pads", [(), (0, 7)])
def test_scores_are_summed_pooled_and_summed_over_the_group(pads):
    x = random_context(30, rows=2 if pads else 1, pads=pads)
    scores = window_scores(x, W, 5)
    for row in range(len(x.k)):
        first, n = int(x.seen[row]), int(x.seen[row]) - W
        votes = plain_attention(x)[row, :, -W:, 30 - first : 30 - W].sum(1)  # (Hq, N-W)
        padded = torch.nn.functional.pad(votes, (2, 2))
        mean = sum(padded[:, i : i + n] for i in range(5)) / 5
        wanted = mean.view(2, x.group, n).sum(1)
        torch.testing.assert_close(scores[row, :, 30 - first : 30 - W], wanted.float(), atol=1e-5, rtol=0)
        assert not scores[row, :, 30 - W :].any()


def test_a_row_of_the_window_gives_at_most_one():
    """Check 3: each of W rows sums to 1 over what it sees, so all scores of a layer sum to at most W Hq."""
    x = random_context(30)
    total = float(window_scores(x, W, 1).sum())
    within = float(x.attention[..., -W:, -W:].sum())  # what the window's rows give to the window's own columns
    assert total + within == pytest.approx(W * 4, abs=1e-4) and 0 < total < W * 4


def test_pooling_damps_the_edges():
    """Check 9: zeros stand beyond both ends and count, so equal votes don't give equal scores."""
    x = random_context(30)
    x.q = torch.zeros_like(x.q)  # every entry that is seen gets the same
    scores = window_scores(x, W, 7)[0, 0]
    middle = scores[3 : 26 - 3]
    assert torch.allclose(middle, middle[0].expand_as(middle))
    for at, left in ((0, 4), (1, 5), (2, 6), (25, 4), (24, 5)):
        assert float(scores[at] / middle[0]) == pytest.approx(left / 7, abs=1e-5)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_importance_is_the_largest_of_all_layers_and_heads(n):
    """Check 4: at least every layer's and head's score, equal to one of them, and never lowered by more layers."""
    draw = torch.Generator().manual_seed(0)
    scores = tuple(torch.rand(2, 3, 20, generator=draw) for _ in range(5))
    found = fold(scores[-n:])
    every = torch.stack(scores[-n:])
    assert (found >= every.amax((0, 2))).all() and (found[None, :, None] == every).any(0).any(1).all()
    assert (fold(scores[-n - 1 :]) >= found).all()
    assert torch.allclose(fold(scores[-n:], "mean"), every.mean((0, 2)))


# ------------------------------------------------------------------------------------------------------- CLAA and FastKV


def test_one_layer_and_one_head_rank_as_fastkv_does():
    """Check 2: with n = 1 and one KV head the maximum and the sum are the same; with more heads they aren't."""
    one = stack_of(2, kv_heads=1, length=30)
    knobs = {"rho": 0.5, "W": W, "l_p": 1}
    assert torch.equal(plan_all(CLAA(n=1, **knobs), one)[1], plan_all(FastKV(**knobs), one)[1])
    two = stack_of(2, kv_heads=2, length=30)
    assert not torch.equal(plan_all(CLAA(n=1, **knobs), two)[1], plan_all(FastKV(**knobs), two)[1])


def test_the_maximum_saves_a_token_that_the_sum_loses():
    """One head that looks hard at a token beats two that look a little at another."""
    scores = torch.tensor([[[0.9, 0.6, 0.1], [0.0, 0.5, 0.1]]])
    assert fold((scores,)).argmax() == 0 and scores.sum(1).argmax() == 1


def test_an_earlier_layer_can_save_a_token_and_one_too_early_cant():
    contexts = stack_of(4, length=30)
    scores = [window_scores(x, W, 7) for x in contexts]
    for n in (1, 2, 3):
        _, chosen = plan_all(CLAA(rho=0.5, W=W, n=n, l_p=3), contexts)
        best = torch.cat(scores[4 - n :], 1).amax(1)[0, : 30 - W].topk(15 - W).indices
        assert set(chosen[0].nonzero()[:, 0].tolist()) == {*best.tolist(), *range(30 - W, 30)}


def test_compression_starts_when_enough_layers_were_seen():
    contexts = stack_of(6, length=30)
    masks, chosen = plan_all(CLAA(rho=0.5, W=W, n=3, l_p=4), contexts)
    assert [int(m[0, 0].sum()) for m in masks] == [30, 30, 15, 15, 15, 30]
    assert int(chosen.sum()) == 15
    masks, _ = plan_all(FastKV(rho=0.5, W=W, l_p=4), contexts)
    assert [int(m[0, 0].sum()) for m in masks] == [15, 15, 15, 15, 15, 30]
    for x, mask in zip(contexts[:5], masks):
        own = window_scores(x, W, 7)[0, :, : 30 - W].topk(15 - W).indices
        for head in range(2):
            assert set(mask[0, head].nonzero()[:, 0].tolist()) == {*own[head].tolist(), *range(30 - W, 30)}


def test_the_pruning_layer_is_in_proportion():
    assert [CLAA().prune_layer(n) for n in (32, 30, 28, 40)] == [15, 14, 13, 19]
    assert FastKV(l_p=7).prune_layer(30) == 7


@pytest.mark.parametrize(("policy", "low", "high"), [(CLAA(rho=0.2), 0.2, 0.3), (FastKV(rho=0.2), 0.2, 0.2)])
def test_expected_entries(policy, low, high):
    assert low * 1000 <= policy.expected(1000) <= high * 1000


# --------------------------------------------------------------------------------------------------------------- a model


@pytest.mark.parametrize("text", [CLAA3, FASTKV3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_family_equals_the_oracle(text, family, padded):
    model = tiny(family, layers=LAYERS)
    ids, mask = tiny_ids(1, N + 5), None
    if padded:
        ids, mask = left_padded(ids, tiny_ids(1, N - 4, seed=1))
    found, cache, _ = pruned(model, text, ids, mask, more=5)
    wanted = pruned_logits(model, cache, ids, N, 3, mask)[:, N - 1 :]
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("text", [CLAA3, FASTKV3])
def test_kept_tokens_and_their_keys(text):
    """Check 7: T ascending tokens with the last W; their keys and values are those of the full prefill."""
    model, T = tiny("llama", layers=LAYERS), N // 2
    with Recipe.parse("full").on(model) as run:
        _, whole = read_pruned(run, model, tiny_ids(1, N), N)
    _, cache, achieved = pruned(model, text)
    whole_k = [layer.store.view() for layer in whole.policy_layers]
    first = 1 if text == CLAA3 else 0
    for i, heads in enumerate(cache.kept_positions()):
        view = cache.policy_layers[i].store.view()
        for h, at in enumerate(heads):
            assert at.tolist() == sorted(set(at.tolist())) and at.tolist()[-W:] == list(range(N - W, N))
            assert len(at) == (N if i < first else T)
            if i <= 3:
                assert torch.equal(view.k[0, h], whole_k[i].k[0, h, at.long()])
                assert torch.equal(view.v[0, h], whole_k[i].v[0, h, at.long()])
            if i == 4:  # computed of the same hidden states, at the same positions
                torch.testing.assert_close(view.k[0, h], whole_k[i].k[0, h, at.long()], atol=1e-5, rtol=0)
    later = cache.kept_positions()[4:]
    assert all(torch.equal(at, later[0][0]) for heads in later for at in heads)
    assert achieved.tokens_computed == pytest.approx((4 + 2 * 0.5) / 6)


@pytest.mark.parametrize("text", ["claa(rho=1.0, W=4, n=2, l_p=3)", "fastkv(rho=1.0, W=4)", "claa(rho=0.2, W=40, n=2)"])
def test_nothing_to_prune_is_the_full_prefill(text, monkeypatch):
    """Check 1, and N <= W: bit for bit, and no score is ever made."""
    monkeypatch.setattr(pruning, "window_scores", lambda *_: pytest.fail("scored although all is kept"))
    model, ids = tiny("llama", layers=LAYERS), tiny_ids(1, N + 4)
    found, cache, achieved = pruned(model, text, ids, more=4)
    with Recipe.parse("full").on(model) as run:
        wanted, whole = read_pruned(run, model, ids, N)
    assert torch.equal(found, wanted) and (achieved.kept_fraction, achieved.tokens_computed) == (1.0, 1.0)
    for own, other in zip(cache.policy_layers, whole.policy_layers):
        assert torch.equal(own.store.view().k, other.store.view().k)


def test_padded_rows_of_different_lengths_get_what_they_get_alone():
    model = tiny("llama", layers=LAYERS)
    rows = [tiny_ids(1, n, seed=n) for n in (40, 33, 21, 3)]  # the last is shorter than the window
    ids, mask = left_padded(*rows)
    for text in (CLAA3, FASTKV3):
        with Recipe.parse(text).on(model) as run:
            together = new_tokens(model, ids, attention_mask=mask)
            counts = [layer.store.lengths()[:, 0].tolist() for layer in run.cache.policy_layers]
            assert counts[5] == [20 + 7, 16 + 7, 10 + 7, 3 + 7]
            assert together == [new_tokens(model, row)[0] for row in rows]


def test_a_ranking_of_ones_own_guides_every_layer():
    """The reference-guided run: the same pruning, r in place of all scores."""
    model, r = tiny("llama", layers=LAYERS), torch.rand(N, generator=torch.Generator().manual_seed(3))
    best = {*r[: N - W].topk(N // 2 - W).indices.tolist(), *range(N - W, N)}
    for text, first in ((CLAA3, 1), (FASTKV3, 0)):
        _, cache, _ = pruned(model, text, note=r)
        for heads in cache.kept_positions()[first:]:
            assert all(set(at.tolist()) == best for at in heads)
    with pytest.raises(ValueError, match=r"ranking laid down has shape \(39,\), expected 40 tokens"):
        pruned(model, CLAA3, note=r[1:])


def test_two_prompts_in_a_row_dont_mix_their_scores():
    model = tiny("llama", layers=LAYERS)
    with Recipe.parse(CLAA3).on(model) as run:
        read_pruned(run, model, tiny_ids(1, 30, seed=5), 30)
        _, second = read_pruned(run, model, tiny_ids(1, N), N)
        assert PROMPT_ROWS not in second.across
    _, alone, _ = pruned(model, CLAA3)
    assert all(torch.equal(a, b) for x, y in zip(second.kept_positions(), alone.kept_positions()) for a, b in zip(x, y))


@pytest.mark.parametrize("store", ["quantised(bits=8)", "ragged"])
def test_other_stores(store):
    model, ids = tiny("llama", layers=LAYERS), tiny_ids(1, N + 4)
    plain, _, _ = pruned(model, CLAA3, ids, more=4)
    found, cache, achieved = pruned(model, f"{CLAA3[:-1]}, store={store})", ids, more=4)
    torch.testing.assert_close(found, plain, atol=0.3 if "quantised" in store else 1e-5, rtol=0)
    assert achieved.kept[-1] == [20.0, 20.0] and cache.get_seq_length() == N + 4


# -------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("text", "words"), [
    ("claa(kernel=4)", r"claa\(kernel=4\): expected an odd width, such as 5"),
    ("fastkv(kernel=2)", r"fastkv\(kernel=2\): expected an odd width"),
    ("claa(n=4, l_p=2)", r"claa\(n=4\): only 3 layers have been read when layer 2 prunes; expected n of at most 3"),
    ("claa(rho=1.5)", r"claa\(rho=1.5\): expected at most 1.0"),
    ("claa(fold=sum)", "unknown choice 'sum'"),
    ("claa(schedule=every(steps=8))", "it drops prompt tokens once, when the prompt ends"),
    ("claa(budget=0.2)", "budget"),
])
def test_recipes_that_make_no_sense_are_refused(text, words):
    with pytest.raises(Refused, match=words):
        Recipe.parse(text)


@pytest.mark.parametrize(("text", "words"), [
    ("claa(rho=0.1, W=4, n=2, l_p=3)", "keeping 4 of 40 tokens leaves no room beside the 4 newest, which always stay; raise"),
    ("fastkv(rho=0.0, W=4)", "keeping 0 of 40 tokens leaves no room"),
    ("fastkv(W=4, l_p=6)", r"fastkv\(l_p=6\): the model has 6 layers; expected at most 5"),
    ("claa(W=4, n=4)", r"claa\(n=4\): only 4 layers|^$"),
    ("claa(W=4, n=5)", r"claa\(n=5\): only 4 layers have been read when layer 3 prunes"),
])
def test_prompts_that_cant_be_pruned_so_are_refused(text, words):
    if text == "claa(W=4, n=4)":  # layer 3 of 6 has just the four layers that it takes
        assert pruned(tiny("llama", layers=LAYERS), text)[2].tokens_computed < 1
        return
    with pytest.raises(Refused, match=words):
        pruned(tiny("llama", layers=LAYERS), text)


def test_nan_is_refused():
    model = tiny("llama", layers=LAYERS)
    model.model.layers[2].self_attn.k_proj.weight.data[0] = float("nan")
    with pytest.raises(Refused, match="claa gave NaN in layer 2"):
        pruned(model, CLAA3)


def test_a_saved_context_goes_on(tmp_path):
    """A document is pruned once; saved, loaded and asked, it answers as before."""
    loaded = Loaded(tiny("llama", layers=LAYERS), None, "tiny", "none", tmp_path)
    context = Context.from_ids(loaded, tiny_ids(1, N)[0].tolist(), CLAA3)
    again = Context.load(context.save(tmp_path / "document"), loaded)
    assert again.achieved.tokens_computed == pytest.approx(context.achieved.tokens_computed, abs=1e-6)
    assert context.achieved.tokens_computed < 1 and again.cache.get_seq_length() == N
    assert again.nlls([5, 6, 7], [8, 9]) == pytest.approx(context.nlls([5, 6, 7], [8, 9]), abs=1e-5)
