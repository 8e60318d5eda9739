"""OBCache's scores against brute force, finite differences and the scores they replace."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from generating import left_padded
from layer_contexts import random_context
from masked_oracle import check_against_oracle
from tiny_models import tiny, tiny_ids

from longspan.cache.budgets.adakv import AdaKV
from longspan.cache.budgets.uniform import Uniform
from longspan.cache.policy import CachePolicy
from longspan.cache.scores.criticalkv import CriticalKV
from longspan.cache.scores.h2o import H2O
from longspan.cache.scores.obcache import VARIANTS, OBCache, output_error, row_error, value_factor, weights_and_logits
from longspan.cache.scores.snapkv import SnapKV
from longspan.cache.scores.tova import TOVA
from longspan.recipe import Recipe
from longspan.registry import Refused

N, W, D = 12, 5, 6
PLAIN = {"kernel": 1, "n_recent": 0}


def layer(seed=0, softcap=None):
    """One head's queries, keys and values in float64, and a causal mask of its last rows."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (W, N, N))
    allowed = torch.ones(W, N, dtype=torch.bool).tril(N - W)
    return 2 * q, k, v, allowed


def attend(q, k, v, allowed, softcap=None):
    logits = q @ k.T / D**0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    a = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return a, a @ v


def closed_form(variant, q, k, v, allowed, softcap=None):
    a, z = weights_and_logits(q @ k.T / D**0.5, allowed, softcap)
    return row_error(variant, a, z, v, a @ v) * value_factor(variant, v)


# -------------------------------------------------------------------------------------------------- the closed forms


def test_value_score_is_the_error_of_zeroing_the_value():
    q, k, v, allowed = layer()
    _, out = attend(q, k, v, allowed)
    for p in range(N):
        without = v.clone()
        without[p] = 0
        error = (out - attend(q, k, without, allowed)[1]).square().sum()
        assert abs(closed_form("V", q, k, v, allowed)[p] - error) < 1e-10


def test_joint_score_is_value_plus_key_plus_cross_term_and_never_negative():
    q, k, v, allowed = layer()
    a, z = weights_and_logits(q @ k.T / D**0.5, allowed)
    cross = (a.square() * z * (v.square().sum(-1) - (a @ v) @ v.T)).sum(0)
    summed = closed_form("V", q, k, v, allowed) + closed_form("K", q, k, v, allowed) + 2 * cross
    torch.testing.assert_close(closed_form("VK", q, k, v, allowed), summed, rtol=1e-10, atol=1e-12)
    norms = torch.stack([(a[:, p, None] * (v[p] + z[:, p, None] * (v[p] - a @ v))).square().sum() for p in range(N)])
    torch.testing.assert_close(closed_form("VK", q, k, v, allowed), norms, rtol=1e-10, atol=1e-12)
    for variant in VARIANTS:
        assert (closed_form(variant, q, k, v, allowed) >= 0).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("variant", ["K", "VK"])
def test_key_and_joint_scores_are_the_first_order_truth(variant, softcap):
    q, k, v, allowed = layer()
    t, score = 1e-4, closed_form(variant, q, k, v, allowed, softcap)
    _, out = attend(q, k, v, allowed, softcap)
    for p in range(N):
        keys, values = k.clone(), v.clone()
        keys[p] *= 1 - t
        if variant == "VK":
            values[p] *= 1 - t
        moved = (attend(q, keys, values, allowed, softcap)[1] - out).square().sum() / t**2
        torch.testing.assert_close(moved, score[p], rtol=1e-3, atol=1e-9)


def test_exact_is_true_removal_and_zeroing_is_not():
    q, k, v, allowed = layer()
    score = closed_form("exact", q, k, v, allowed)
    _, out = attend(q, k, v, allowed)
    for p in range(N):
        gone = allowed.clone()
        gone[:, p] = False
        removed = (attend(q, k, v, gone)[1] - out).square().sum()
        assert abs(score[p] - removed) < 1e-9
        keys, values = k.clone(), v.clone()
        keys[p] = values[p] = 0
        assert abs((attend(q, keys, values, allowed)[1] - out).square().sum() - removed) > 1e-6


def test_equal_values_and_a_zero_value():
    q, k, v, allowed = layer()
    same = v[:1].expand(N, D)
    assert closed_form("K", q, k, same, allowed).abs().max() < 1e-12
    assert closed_form("exact", q, k, same, allowed).abs().max() < 1e-12
    v[3] = 0
    assert closed_form("V", q, k, v, allowed)[3] == 0
    assert closed_form("K", q, k, v, allowed)[3] > 1e-6


def test_a_constant_on_every_logit_changes_key_scores_alone():
    q, k, v, allowed = layer()
    logits = q @ k.T / D**0.5
    for variant in ("V", "K", "VK", "exact"):
        a, z = weights_and_logits(logits, allowed)
        b, y = weights_and_logits(logits + 3.0, allowed)
        torch.testing.assert_close(a, b)
        same = torch.allclose(row_error(variant, a, z, v, a @ v), row_error(variant, b, y, v, b @ v), rtol=1e-9)
        assert same == (variant in ("V", "exact"))


def test_scaling_and_rotating_the_values():
    q, k, v, allowed = layer()
    turn = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    for variant in ("V", "K", "VK", "exact"):
        score = closed_form(variant, q, k, v, allowed)
        torch.testing.assert_close(closed_form(variant, q, k, 3 * v, allowed), 9 * score)
        torch.testing.assert_close(closed_form(variant, q, k, v @ turn, allowed), score)


def test_masked_pairs_have_logit_zero_and_a_row_that_sees_nothing_says_nothing():
    q, k, v, allowed = layer()
    allowed[0] = False
    a, z = weights_and_logits(q @ k.T / D**0.5, allowed)
    assert (a[~allowed] == 0).all() and (z[~allowed] == 0).all() and torch.isfinite(a).all()
    for variant in VARIANTS:
        rest = closed_form(variant, q[1:], k, v, allowed[1:])
        torch.testing.assert_close(closed_form(variant, q, k, v, allowed), rest)


def test_a_row_with_one_key_has_nothing_to_fall_back_on():
    q, k, v, _ = layer()
    alone = torch.zeros(W, N, dtype=torch.bool)
    alone[:, 2] = True
    assert (closed_form("exact", q, k, v, alone) == 0).all()


# ------------------------------------------------------------------------------------------------------- as a method


def scored(score, x, budget=10):
    if score.can("all-queries"):
        score.observe(x)
    x.budget, x.protected = torch.full((len(x.k),), budget), score.protected(x)
    first = max(0, x.q.shape[2] - score.window_rows())
    return score.score(replace(x, q=x.q[:, :, first:], q_valid=x.q_valid[:, first:], q_positions=x.q_positions[:, first:]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kv_heads_score_is_the_sum_over_its_query_heads(variant):
    x = random_context(20, window=4)
    found = scored(OBCache(variant=variant, window=4, **PLAIN), x)
    for h in range(2):
        wanted = 0
        for g in (2 * h, 2 * h + 1):
            allowed = torch.ones(4, 20, dtype=torch.bool).tril(16)
            logits = x.q[0, g].double() @ x.k[0, h].double().T * x.scale
            a, z = weights_and_logits(logits, allowed)
            v = x.v[0, h].double()
            wanted = wanted + row_error(variant, a, z, v, a @ v) * value_factor(variant, v)
        torch.testing.assert_close(found[0, h].double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_query_head_per_kv_head_is_multi_head_attention(variant):
    """Repeating a KV head for its queries gives scores per query head that add up to the shared one."""
    shared = random_context(20)
    own = replace(shared, k=shared.k.repeat_interleave(2, 1), v=shared.v.repeat_interleave(2, 1),
                  valid=shared.valid.repeat_interleave(2, 1), positions=shared.positions.repeat_interleave(2, 1))
    score = OBCache(variant=variant, window=6, **PLAIN)
    torch.testing.assert_close(scored(score, own).unflatten(1, (2, 2)).sum(2), scored(score, shared))


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_rows_are_read_in_blocks(rows, monkeypatch):
    x = random_context(20, rows=2, pads=(0, 3))
    wanted = output_error(x, "VK")
    monkeypatch.setattr("longspan.cache.scores.obcache.ROWS", rows)
    torch.testing.assert_close(output_error(x, "VK"), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_lies_in_padding_is_never_seen(variant):
    x = random_context(20, rows=2, pads=(0, 3))
    wanted = scored(OBCache(variant=variant, window=4), x)
    for t in (x.k, x.v):
        t[1, :, :3] = torch.nan
    x.q[1, :, :3] = torch.nan
    torch.testing.assert_close(scored(OBCache(variant=variant, window=4), x)[x.valid], wanted[x.valid])
    full = OBCache(variant=variant, fullhist=True, window=4)
    assert torch.isfinite(scored(full, x)[x.valid]).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [(0, 19, 20), (0, 8, 9, 20)])
def test_accumulating_equals_one_look_at_all_rows(variant, cuts):
    """Prefill of N tokens and one decode step, or any other pieces, against all rows of N + 1 tokens at once."""
    score = OBCache(variant=variant, fullhist=True, **PLAIN)
    whole, noted = random_context(20), {}
    for a, b in itertools.pairwise(cuts):
        score.observe(replace(
            whole, k=whole.k[:, :, :b], v=whole.v[:, :, :b], valid=whole.valid[:, :, :b], positions=whole.positions[:, :, :b],
            q=whole.q[:, :, a:b], q_valid=whole.q_valid[:, a:b], q_positions=whole.q_positions[:, a:b], per_key=noted))
    at_once = scored(OBCache(variant=variant, window=20, **PLAIN), random_context(20))
    torch.testing.assert_close(score.score(replace(whole, per_key=noted)), at_once, rtol=1e-5, atol=1e-5)


def kept(score, x, budget=0.5):
    if score.can("all-queries"):
        score.observe(x)
    made = budget if not isinstance(budget, float) else Uniform(budget=budget)
    return CachePolicy(score, made).plan(x).mask


@pytest.mark.parametrize("budget", [0.4, 0.7])
@pytest.mark.parametrize("pads", [(0, 0), (0, 3)])
def test_plain_attention_is_h2o_tova_and_snapkv_index_for_index(budget, pads):
    attention = {"variant": "attention"}
    flavours = [
        (OBCache(fullhist=True, n_recent=0, kernel=1, **attention), H2O(recent=0.0)),
        (OBCache(window=1, n_recent=1, kernel=1, shared=True, **attention), TOVA()),
        (OBCache(window=4, kernel=5, pool="mean", **attention), SnapKV(window=4)),
        (OBCache(window=4, kernel=7, **attention), SnapKV(window=4, kernel=7, pool="max")),
    ]
    for seed in range(5):
        for ours, other in flavours:
            a, b = (kept(s, random_context(20, rows=2, pads=pads, seed=seed), budget) for s in (ours, other))
            assert torch.equal(a, b), (str(ours), seed)
    x = random_context(20, rows=2, pads=pads)
    snapkv = kept(SnapKV(window=4, kernel=7, pool="max"), x, budget)
    assert not torch.equal(kept(OBCache(variant="VK", window=4), x, budget), snapkv)


def test_shared_scores_rank_positions_even_where_heads_hold_different_ones():
    x = random_context(20)
    score = OBCache(window=1, n_recent=0, kernel=1, shared=True)
    own = scored(OBCache(window=1, n_recent=0, kernel=1), random_context(20))
    assert (scored(score, x) == scored(score, x)[:, :1]).all()
    torch.testing.assert_close(scored(score, x)[:, 0], own.sum(1))
    held = random_context(20)
    held.positions[:, 0] += 1  # head 0 holds the tokens from 1 on, head 1 those from 0 on
    held.q_positions += 1
    found = scored(score, held)
    torch.testing.assert_close(found[0, 0, :-1], found[0, 1, 1:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_budget_that_covers_the_text_and_a_single_token_are_no_ops(variant):
    for length, budget in ((20, 1.0), (20, "20 tokens"), (1, 0.01)):
        made = budget if isinstance(budget, float) else Uniform(budget=budget)
        assert kept(OBCache(variant=variant, window=4, n_recent=0), random_context(length), made).all()


def test_what_stays_is_protected_however_large_scores_are():
    x = random_context(20)
    x.v *= 1e6  # scores around 1e12: adding one to the largest would change nothing
    mask = kept(OBCache(variant="V", window=4, n_sink=2), x, 0.3)
    assert mask[:, :, :2].all() and mask[:, :, -4:].all() and (mask.sum(-1) == 6).all()
    assert kept(OBCache(variant="V", window=4, n_sink=2), x, AdaKV(budget=0.4))[:, :, -4:].all()


def test_bad_input():
    with pytest.raises(Refused, match=r"obcache\(window=0\): expected at least 1"):
        OBCache(window=0)
    with pytest.raises(Refused, match="did you mean"):
        OBCache(variant="VKK")
    with pytest.raises(Refused, match="expected an odd width, such as 7"):
        OBCache(kernel=6)
    with pytest.raises(Refused, match=r"budget of 5 tokens .* smaller than the 6 tokens that obcache\(window=4, n_sink=2\)"):
        kept(OBCache(window=4, n_sink=2), random_context(20), Uniform(budget="5 tokens"))
    with pytest.raises(Refused, match="obcache already weighs by the values"):
        CriticalKV(base=OBCache())
    for broken in (torch.nan, torch.inf):
        x = random_context(20)
        x.v[0, 1, 3, 0] = broken
        with pytest.raises(Refused, match=r"obcache\(window=4\) gave NaN or infinity in layer 0"):
            kept(OBCache(window=4), x)


def test_a_window_longer_than_the_text_reads_the_rows_there_are():
    long, all_rows = (scored(OBCache(window=n, **PLAIN), random_context(20)) for n in (64, 20))
    assert torch.equal(long, all_rows)


def test_what_a_setting_needs_follows_its_knobs():
    assert OBCache().can("query-window") and not OBCache().can("all-queries") and OBCache().window_rows() == 16
    assert OBCache(fullhist=True).can("all-queries") and OBCache(fullhist=True).window_rows() == 0
    assert OBCache(shared=True).can("shares-heads") and not OBCache().can("shares-heads")
    assert OBCache(window=9).recent == 9 and OBCache(window=9, n_recent=2).recent == 2
    recipe = "obcache(variant='VK', n_recent=4, fullhist=True, budget=0.2)".replace("'", '"')
    assert str(Recipe.parse(recipe).cache) == recipe


# -------------------------------------------------------------------------------------------------------- in a model

FLAVOURS = ["obcache(variant=VK, window=4{})", "obcache(variant=K, fullhist=True, kernel=1, window=4{})",
            "obcache(variant=V, window=1, n_recent=0, kernel=1, shared=True{})", "obcache(variant=exact, n_sink=4, window=2{})"]


@pytest.mark.parametrize("more", ["", ", schedule=every(steps=1)", ", schedule=per-chunk(size=7)", ", store=quantised(group=8)"])
@pytest.mark.parametrize("budget", ["uniform", "adakv", "pyramid", "long-context-heads"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_flavour_with_every_budget_schedule_and_store(flavour, budget, more):
    ids, mask = left_padded(tiny_ids(1, 33), tiny_ids(1, 28, seed=1))
    recipe = Recipe.parse(f"{flavour.format(more)} @ {budget}(budget=0.5)")
    cache = check_against_oracle(tiny("llama"), recipe, ids, 24, mask, pieces=[24, 1, 4, 3, 1])
    assert cache.achieved().kept_fraction < 1.0
