"""Token Sparse Attention: the budget, the choice of tokens and layers, its edges, and whole models under it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny, tiny_ids

from longspan.models import find_parts, profiles
from longspan.models.profiles import Profile
from longspan.prefill import token_sparse
from longspan.prefill.base import ReadContext
from longspan.prefill.reading import read_rows
from longspan.prefill.token_sparse import (
    TokenSparseAttention,
    low_drift_layers,
    recent_scores,
    tokens_that_stay,
    with_window,
)
from longspan.prefill.token_sparse_calibration import layer_drift, train
from longspan.recipe import Recipe
from longspan.registry import Refused

SMALL = {"window": 8, "min_tokens": 16, "pool": 3, "layers": "all"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


def context(B=1, T=96, heads=4, key_heads=2, D=16, seed=0, valid=None, dtype=torch.float32) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, h, T, D, generator=draw).to(dtype) for h in (heads, key_heads, key_heads))
    return ReadContext(q * 2, k, v, D**-0.5, layer=1, n_layers=2, valid=valid)


def plain(x: ReadContext) -> torch.Tensor:
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, scale=x.scale, enable_gqa=True)


def attention(x: ReadContext) -> torch.Tensor:
    logits = x.q.float() @ x.k.float().repeat_interleave(x.heads // x.k.shape[1], 1).mT * x.scale
    mask = torch.ones(x.q_len, x.k_len, dtype=torch.bool).tril()
    if x.valid is not None:
        mask = mask & x.valid[:, None, None]
    return logits.masked_fill(~mask, -torch.inf).softmax(-1)


# -------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("logits", [1 << 22, 700, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_the_last_queries_mean_attention_to_the_prefix(logits, dtype, monkeypatch):
    monkeypatch.setattr(token_sparse, "LOGITS", logits)  # pieces of all keys, of a few, and of one
    x = context(B=2, dtype=dtype)
    found = recent_scores(x, 8)
    assert found.dtype == torch.float32 and found.shape == (2, 4, 88)
    assert torch.allclose(found, attention(x)[:, :, -8:, :88].mean(2), atol=1e-6)
    assert (found.sum(-1) < 1).all()  # normalised over all keys, the window's own included


def test_padding_scores_nothing_and_takes_no_share():
    valid = (torch.arange(96) >= 30)[None]
    x = context(valid=valid)
    x.k[:, :, :30] = 50.0
    alone = context(T=66)
    alone = replace(alone, q=x.q[:, :, 30:], k=x.k[:, :, 30:], v=x.v[:, :, 30:])
    found = recent_scores(x, 8)
    assert not found[..., :30].any() and torch.allclose(found[..., 30:], recent_scores(alone, 8), atol=1e-6)


def test_no_more_scores_are_held_than_allowed(monkeypatch):
    monkeypatch.setattr(token_sparse, "LOGITS", 4 * 8 * 10)
    seen = []
    inner = token_sparse._logits
    monkeypatch.setattr(token_sparse, "_logits", lambda *a: seen.append(inner(*a)) or seen[-1])
    recent_scores(context(), 8)
    assert max(t.numel() for t in seen) <= 4 * 8 * 10 and sum(t.shape[-1] for t in seen) == 96 + 88


# -------------------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("tau", [0.005, 0.05, 0.2, 0.6, 0.999])
def test_the_fewest_smallest_scores_that_reach_tau_are_left_out(tau):
    scores = torch.rand(3, 4, 200, generator=torch.Generator().manual_seed(0)) ** 4
    share = scores.mean(1)
    share = (share / (share.sum(-1, keepdim=True) + 1e-8)).sort(-1).values.double()
    for row, stay in zip(share, tokens_that_stay(scores, tau, 0).tolist()):
        n = 200 - stay
        assert row[:n].sum() >= tau - 1e-6 and row[: n - 1].sum() < tau + 1e-6


def test_uniform_scores_leave_out_the_share_tau():
    """K = 0: every token of the prefix gets the same, and ceil(tau M) of them go."""
    x = context(T=208)
    x.k.zero_()
    for tau in (0.1, 0.25, 0.5):
        n = 200 - int(tokens_that_stay(recent_scores(x, 8), tau, 0))
        assert abs(n - math.ceil(tau * 200)) <= 1
        kept = TokenSparseAttention(tau=tau, window=8, min_tokens=0, pool=1, layers="all").choose(x)
        assert kept.shape == (1, 4, 200 - n + 8)


def test_one_token_that_holds_tau_alone_leaves_nothing_out():
    scores = torch.tensor([[[0.3, 0.3, 0.4]]])
    assert tokens_that_stay(scores, 0.2, 0).tolist() == [3]
    assert tokens_that_stay(scores, 0.35, 0).tolist() == [1]  # the two smallest reach it first
    assert tokens_that_stay(scores, 0.35, 2).tolist() == [2]  # but never below the least
    assert tokens_that_stay(scores, 1 - 1e-9, 0).tolist() == [0]


def test_larger_tau_keeps_fewer():
    x = context()
    sizes = [TokenSparseAttention(tau=tau, **{**SMALL, "min_tokens": 0}).choose(x).shape[-1] for tau in (0.05, 0.2, 0.6)]
    assert sizes[0] > sizes[1] > sizes[2] > 8


# -------------------------------------------------------------------------------------------------------------- choice


def test_each_head_keeps_its_best_tokens_and_the_window():
    x = context()
    kept = TokenSparseAttention(tau=0.4, **SMALL).choose(x)
    assert (kept.diff(dim=-1) > 0).all() and kept.shape[:2] == (1, 4)
    assert torch.equal(kept[..., -8:], torch.arange(88, 96).expand(1, 4, 8))
    smooth = F.avg_pool1d(recent_scores(x, 8), 3, 1, 1)
    k = kept.shape[-1] - 8
    assert k == int(tokens_that_stay(smooth, 0.4, 16))
    assert torch.equal(kept[..., :k], smooth.topk(k).indices.sort(-1).values)
    assert not torch.equal(kept[0, 0], kept[0, 1])  # per query head, also within a group


def test_smoothing_counts_the_zeros_beyond_the_ends():
    scores = torch.tensor([[[3.0, 0.0, 0.0, 6.0]]])
    assert F.avg_pool1d(scores, 3, 1, 1).tolist() == [[[1.0, 1.0, 2.0, 2.0]]]
    x = context()
    expected = F.pad(recent_scores(x, 8), (1, 1)).unfold(-1, 3, 1).mean(-1)
    kept = TokenSparseAttention(tau=0.4, **SMALL).choose(x)
    k = kept.shape[-1] - 8
    assert torch.equal(kept[..., :k], expected.topk(k).indices.sort(-1).values)


def test_ties_go_to_the_earlier_token():
    assert with_window(torch.ones(1, 2, 6), 3, 2).tolist() == [[[0, 1, 2, 6, 7]] * 2]
    assert with_window(torch.ones(1, 2, 6), 6, 2).tolist() == [[list(range(8))] * 2]
    assert with_window(torch.ones(1, 2, 6), 0, 2).tolist() == [[[6, 7]] * 2]


def test_rows_of_a_call_are_attention_among_the_chosen():
    x, method = context(), TokenSparseAttention(tau=0.3, **SMALL)
    kept = method.choose(x)
    out, pairs = read_rows(x, None, [method])
    there = torch.zeros(1, 4, 96, dtype=torch.bool).scatter(2, kept, True)
    mask = there[..., None, :] & torch.ones(96, 96, dtype=torch.bool).tril()
    k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.v))
    expected = torch.nan_to_num((x.q @ k.mT * x.scale).masked_fill(~mask, -torch.inf).softmax(-1)) @ v
    assert torch.allclose(out[there], expected[there], atol=1e-5) and not out[~there].any() and (~there).any()
    assert pairs < x.causal_pairs


def test_nothing_to_leave_out_is_dense():
    x = context()
    dense = [TokenSparseAttention(tau=0.0, **SMALL), TokenSparseAttention(tau=0.3, **{**SMALL, "min_tokens": 88}),
             TokenSparseAttention(tau=0.3, **{**SMALL, "window": 96}), TokenSparseAttention(tau=0.3, **{**SMALL, "window": 200})]
    for method in dense:  # tau 0; L = min_tokens + W; W = L; W > L
        assert method.choose(x) is None
        assert torch.equal(read_rows(x, None, [method])[0], plain(x))
    least = TokenSparseAttention(tau=0.3, **{**SMALL, "min_tokens": 87})
    assert least.choose(x).shape[-1] == 95  # eligible: one token may go
    one = context(T=1)
    assert TokenSparseAttention(tau=0.3, window=1, min_tokens=0, layers="all").choose(one) is None
    every = with_window(recent_scores(x, 8), 88, 8)  # k_keep = M, gathered and put back all the same

    class Everything(TokenSparseAttention):
        def choose(self, x):
            return every

    assert torch.allclose(read_rows(x, None, [Everything(**SMALL)])[0], plain(x), atol=1e-6)


def test_no_state_is_carried_from_layer_to_layer():
    method = TokenSparseAttention(tau=0.5, **SMALL)
    first, second = context(seed=1), context(seed=2)
    one = method.choose(first)
    other = method.choose(second)
    skipped = set(range(96)) - set(one[0, 0].tolist())
    assert skipped & set(other[0, 0].tolist())
    assert torch.equal(method.choose(first), one)


def test_groups_are_repeated_heads():
    x, method = context(), TokenSparseAttention(tau=0.4, **SMALL)
    repeated = replace(x, k=x.k.repeat_interleave(2, 1), v=x.v.repeat_interleave(2, 1))
    assert torch.equal(method.choose(x), method.choose(repeated))
    assert torch.allclose(read_rows(x, None, [method])[0], read_rows(repeated, None, [method])[0], atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- batch


def test_a_batch_keeps_what_the_neediest_row_needs():
    method, both = TokenSparseAttention(tau=0.5, **{**SMALL, "min_tokens": 0}), context(B=2)
    both.k[1, :, 5] = both.q[1, :, -8:].mean((0, 1)) * 4  # the second row's attention is spread differently
    alone = [method.choose(replace(both, q=both.q[b : b + 1], k=both.k[b : b + 1], v=both.v[b : b + 1])) for b in range(2)]
    assert alone[0].shape != alone[1].shape
    assert method.choose(both).shape[-1] == max(t.shape[-1] for t in alone)


def test_padding_is_never_chosen_and_bounds_what_a_batch_keeps():
    valid = torch.ones(2, 96, dtype=torch.bool)
    valid[0, :60] = False
    x, method = context(B=2, valid=valid), TokenSparseAttention(tau=0.05, **SMALL)
    x.k[0, :, :60] = 9.0
    kept = method.choose(x)
    assert kept.shape[-1] == 28 + 8  # the first row has 28 tokens before its window
    assert valid[0][kept[0]].all() and (kept.diff(dim=-1) > 0).all()
    right = TokenSparseAttention(tau=0.05, **{**SMALL, "window": 40})
    with pytest.raises(ValueError, match="padding among the last 40"):
        right.choose(x)


def test_padded_rows_are_read_as_they_are_alone():
    valid = torch.ones(2, 96, dtype=torch.bool)
    valid[0, :50] = False
    x, method = context(B=2, valid=valid), TokenSparseAttention(tau=0.4, **SMALL)
    x.q[0, :, :50] = x.k[0, :, :50] = x.v[0, :, :50] = 7.0
    out, _ = read_rows(x, None, [method])
    for b, first in ((0, 50), (1, 0)):
        alone = ReadContext(*(t[b : b + 1, :, first:] for t in (x.q, x.k, x.v)), x.scale, layer=1, n_layers=2)
        assert torch.equal(out[b : b + 1, :, first:], read_rows(alone, None, [method])[0])
        assert not torch.equal(out[b : b + 1, :, first:], plain(alone))
    assert not out[0, :, :50].any()


# -------------------------------------------------------------------------------------------------------------- layers


def test_low_drift_layers_by_rank_and_by_quantile():
    drift = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7])
    assert low_drift_layers(drift, 0.5, "rank") == [1, 3]
    assert low_drift_layers(drift, 0.5, "quantile") == [1, 2, 3]  # one more where the number is odd
    assert low_drift_layers(drift[:4], 0.5, "rank") == low_drift_layers(drift[:4], 0.5, "quantile") == [1, 3]
    assert low_drift_layers(drift, 1.0) == [0, 1, 2, 3, 4] and low_drift_layers(drift, 0.0) == []
    assert low_drift_layers(drift, 0.6) == [1, 2, 3]


def test_layers_as_written():
    x = replace(context(), n_layers=38)
    written = lambda **knobs: TokenSparseAttention(**knobs).sparse_layers(x)  # noqa: E731
    assert written(layers="14,15,20..37") == [14, 15, *range(20, 38)]
    assert written(layers="all") == list(range(38)) and written(layers="late") == list(range(19, 38))
    assert written() == list(range(19, 38))  # no model, no profile: the later half
    with pytest.raises(Refused, match=r"no layer 40; expected layers of 0\.\.37"):
        written(layers="3,40")
    sparse = TokenSparseAttention(tau=0.3, window=8, min_tokens=16, layers="0")
    assert sparse.choose(context()) is None and sparse.choose(replace(context(), layer=0)) is not None


def test_drift_is_the_mean_relative_change_of_the_hidden_states():
    model, ids = tiny("llama", layers=3), tiny_ids(1, 20)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    hooks = [len(layer._forward_hooks) for layer in model.model.layers]
    found = layer_drift(model, ids[0].tolist())
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks
    for i in range(2):  # the last state is normalised, so the last layer isn't compared
        expected = ((states[i + 1] - states[i]).norm(dim=-1) / (states[i].norm(dim=-1) + 1e-8)).mean()
        assert math.isclose(found[i], expected, rel_tol=1e-5)
    assert found.dtype == torch.float32 and found.shape == (3,) and found[2] > 0
    half = layer_drift(tiny("llama", layers=3).bfloat16(), ids[0].tolist())
    assert half.dtype == torch.float32 and torch.allclose(half, found, rtol=0.1)


def test_a_measured_drift_is_found_and_used():
    model = tiny("llama", layers=4)
    x = replace(context(), n_layers=4, parts=find_parts(model))
    method = TokenSparseAttention()
    assert method.sparse_layers(x) == [2, 3]
    tensors = train(model, [tiny_ids(1, 30)[0].tolist(), tiny_ids(1, 10, seed=1)[0].tolist()], [method], {})
    assert train(model, [], [method], tensors) is tensors  # there already
    longer, shorter = (layer_drift(model, tiny_ids(1, n, seed=s)[0].tolist()) for n, s in ((30, 0), (10, 1)))
    assert torch.allclose(tensors["drift"], (longer * 30 + shorter * 10) / 40)
    profiles.save(Profile(profiles.trained_key(model, method), {"drift": torch.tensor([0.1, 0.2, 0.3, 0.4])}))
    assert method.sparse_layers(x) == [0, 1]
    assert TokenSparseAttention(delta=0.75).sparse_layers(x) == [0, 1, 2]
    with pytest.raises(Refused, match="longspan profile token-sparse-attention"):
        TokenSparseAttention(profile="nowhere.safetensors").sparse_layers(x)


def test_nothing_to_measure_is_refused():
    with pytest.raises(Refused, match="no tokens"):
        train(tiny("llama"), [], [], {})
    broken = tiny("llama")
    broken.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(Refused, match="NaN"):
        train(broken, [[5, 6, 7]], [], {})


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(("knobs", "message"), [
    ({"tau": -0.1}, "at least 0"), ({"tau": 1.0}, "below 1"), ({"tau": 2.0}, "at most 1"), ({"window": 0}, "at least 1"),
    ({"pool": 4}, "nearest is 5"), ({"pool": 0}, "at least 1"), ({"min_tokens": -1}, "at least 0"), ({"delta": 1.5}, "at most 1"),
    ({"rule": "ranks"}, "did you mean 'rank'"), ({"layers": "3.."}, "ranges such as"), ({"layers": "9..3"}, "ranges such as"),
    ({"layers": "-1"}, "ranges such as"),
])  # fmt: skip
def test_knobs_outside_their_range_are_refused(knobs, message):
    with pytest.raises(Refused, match=message):
        TokenSparseAttention(**knobs)


def test_bad_tensors_are_refused():
    method, x = TokenSparseAttention(tau=0.3, **SMALL), context()
    with pytest.raises(ValueError, match="multiple of Hkv"):
        method.choose(replace(x, k=x.k[:, :1].expand(1, 3, 96, 16), v=x.v[:, :1].expand(1, 3, 96, 16)))
    with pytest.raises(ValueError, match="whole prompt, T = S; got T=40, S=96"):
        method.choose(replace(x, q=x.q[:, :, -40:]))
    for value in (torch.nan, torch.inf):
        bad = x.k.clone()
        bad[0, 0, 3, 0] = value
        with pytest.raises(ValueError, match="NaN or infinite"):
            method.choose(replace(x, k=bad))
    huge = replace(x, q=x.q * 1e30, k=x.k * 1e30)  # finite, but their products aren't
    with pytest.raises(ValueError, match="NaN or infinite"):
        method.choose(huge)
    for window in (96, 0):
        with pytest.raises(ValueError, match="window"):
            recent_scores(x, window)


# ----------------------------------------------------------------------------------------------------------- in a model

TEXT = "token-sparse-attention(tau=0.4, window=8, min_tokens=16, pool=3, layers={layers})"


@pytest.mark.parametrize("selector", ["", " + xattention(block=16, stride=4, threshold=0.7)",
                                      " + flexprefill(block=16, min_budget=16, gamma=0.7)",
                                      " + vertical-slash(block=16, vertical=30, slash=50)", " + mean-pool(block=16, p=0.7)"])
def test_the_cache_stays_whole_and_decoding_is_dense(selector):
    model, ids = tiny("llama", layers=3), tiny_ids(1, 120)
    recipe = Recipe.parse(TEXT.format(layers='"1,2"') + selector)
    with recipe.on(model) as run, torch.no_grad():
        cache = run.new_cache(None)
        model(ids, past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [120] * 3
        assert all(layer.store.tail.keys.shape[2] == 120 for layer in cache.layers)
        density = run.pairs.density
        assert density < 0.9
        model(tiny_ids(1, 1, seed=5), past_key_values=cache)
        model(tiny_ids(1, 9, seed=6), past_key_values=cache)  # a question
        assert cache.get_seq_length() == 130
    with Recipe.parse("token-sparse-attention" + selector).on(model) as run, torch.no_grad():
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=2)
        assert run.cache.get_seq_length() == 122 and run.achieved.kept_fraction == 1.0


def test_dense_layers_are_the_plain_models_bit_for_bit():
    model, ids = tiny("llama", layers=2), tiny_ids(2, 100)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(ids).logits
        for text in ("token-sparse-attention(tau=0.0)", "token-sparse-attention", TEXT.format(layers='"1"')):
            with Recipe.parse(text).on(model) as run:
                found = model(ids, attention_mask=mask, past_key_values=run.new_cache(None)).logits
                assert torch.equal(found, expected) is ("tau=0.4" not in text)


def test_left_padded_rows_of_a_model_get_what_they_get_alone():
    model, recipe = tiny("llama", layers=2), Recipe.parse(TEXT.format(layers="all"))
    rows = [tiny_ids(1, n, seed=n) for n in (60, 90)]
    ids, mask = torch.full((2, 90), 2), torch.zeros(2, 90, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, 90 - row.shape[1] :], mask[b, 90 - row.shape[1] :] = row[0], 1
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "output_logits": True,
             "return_dict_in_generate": True}  # fmt: skip
    with recipe.on(model):
        both = model.generate(ids, attention_mask=mask, **asked)
    for b, row in enumerate(rows):
        with recipe.on(model):
            alone = model.generate(row, **asked)
        assert torch.equal(both.sequences[b, 90:], alone.sequences[0, row.shape[1] :])
        assert torch.allclose(both.logits[0][b], alone.logits[0][0], atol=1e-4)


def test_what_it_writes_is_read_back():
    text = 'token-sparse-attention(tau=0.1, layers="3,5..7")'
    assert str(Recipe.parse(text)) == text
    assert str(Recipe.parse(f"xattention + {text}")) == f"xattention + {text}"


def test_the_drift_of_the_bundled_model_comes_with_the_package():
    (path,) = profiles.SHIPPED.glob("*layer-drift*")
    shipped = profiles.load(path)
    assert shipped.key.shipped == path and shipped.key.settings == "{}"  # what a model's key would name
    assert shipped.tensors["drift"].shape == (30,) and not profiles.missing(shipped, [TokenSparseAttention()])
    assert len(low_drift_layers(shipped.tensors["drift"], 0.5)) == 15
