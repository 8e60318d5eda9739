"""LU-KV: the hull, the greedy allocation against exhaustive search, the profile's table, and what is kept online."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from layer_contexts import random_context
from profiled import provide_profiles
from tiny_models import tiny, tiny_ids

from longspan.cache.budgets import lu_kv
from longspan.cache.budgets.lu_kv import LuKV, allocate, fitted, head_counts, marginal_losses, whole
from longspan.cache.policy import CachePolicy
from longspan.cache.scores.knorm import KNorm
from longspan.cache.scores.snapkv import SnapKV
from longspan.models import profiles
from longspan.models.profiles import Evidence, Profile
from longspan.recipe import Recipe
from longspan.registry import Refused

FREE = LuKV(n_sink=0, window=0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setattr(lu_kv, "_warned", set())


def random_evidence(layers=2, heads=2, length=40, *, seed=0, agree=0.5, perfect=False):
    """Utilities with a heavy tail, and scores that agree with them more or less."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(layers, heads, length, generator=g, dtype=torch.float64)  # noqa: E731
    utility = draw() ** 4 * (0.1 + draw()[..., :1])
    scores = utility.clone() if perfect else agree * utility / utility.mean() + draw()
    return Evidence(tuple(range(layers)), layers, scores, utility, torch.zeros(layers, heads, length, dtype=torch.bool))


def loss_curve(shown, layer, head, stays=None):
    """C(0..n) by the definition: what discarding the j lowest-ranked costs."""
    keep = torch.ones_like(shown.scores[layer, head], dtype=torch.bool) if stays is None else ~stays
    order = shown.scores[layer, head][keep].argsort(descending=True, stable=True)
    return np.concatenate([[0.0], np.cumsum(shown.utility[layer, head][keep][order].flip(0).numpy())])


def hull_by_chain(costs):
    """The lower hull of (j, C(j)) at every j, by a monotone chain; and its vertices."""
    chain = []
    for point in enumerate(costs):
        while len(chain) > 1:
            (ax, ay), (bx, by) = chain[-2:]
            if (bx - ax) * (point[1] - ay) - (by - ay) * (point[0] - ax) > 0:
                break
            chain.pop()
        chain.append(point)
    xs, ys = zip(*chain)
    return np.interp(np.arange(len(costs)), xs, ys), list(xs)


def given_up(budget, shown):
    """(99, L, H) whole entries."""
    return np.rint(budget.ratios(shown) * shown.scores.shape[-1]).astype(int)


# --------------------------------------------------------------------------------------------------------- offline


@pytest.mark.parametrize("seed", range(5))
def test_marginals_are_the_slopes_of_the_lower_hull(seed):
    shown = random_evidence(length=30, seed=seed, agree=0.1)
    costs = loss_curve(shown, 0, 0)
    slopes = marginal_losses(shown.scores[0, 0], shown.utility[0, 0], torch.zeros(30, dtype=torch.bool))
    hull, (chain, vertices) = np.concatenate([[0.0], np.cumsum(slopes)]), hull_by_chain(costs)
    assert len(slopes) == 30 and (np.diff(slopes) >= 0).all()
    assert (hull <= costs + 1e-12).all() and len(vertices) < 25
    np.testing.assert_allclose(hull[vertices], costs[vertices], atol=1e-12)
    np.testing.assert_allclose(hull, chain, atol=1e-12)


def test_the_hull_of_a_convex_curve_is_itself():
    shown = random_evidence(length=30, perfect=True)
    slopes = marginal_losses(shown.scores[1, 1], shown.utility[1, 1], torch.zeros(30, dtype=torch.bool))
    assert slopes.tolist() == shown.utility[1, 1].sort().values.tolist()


@pytest.mark.parametrize("budget", [LuKV(), FREE, LuKV(n_sink=2, window=6)])
def test_a_perfect_score_keeps_the_best_entries_of_the_middle_everywhere(budget):
    """With P = U the curves are convex, and the allocation is the global top of all layers and heads."""
    shown = random_evidence(3, 2, 40, perfect=True)
    s, w = budget.n_sink, budget.window
    middle = shown.utility[..., s : 40 - w]
    for x in (10, 50, 80):
        n = round(x / 100 * 3 * 2 * 40)
        worst = middle.flatten().argsort()[:n]
        wanted = torch.zeros(middle.numel(), dtype=torch.int64).index_fill(0, worst, 1).view(middle.shape).sum(-1)
        assert given_up(budget, shown)[x - 1].tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_the_allocation_is_that_of_exhaustive_search(seed):
    """Exactly optimal on the hulls; on the true curves worse by at most one hull's gap, and optimal at vertices."""
    shown = random_evidence(2, 2, 7, seed=seed, agree=0.2)
    costs = [loss_curve(shown, layer, head) for layer in range(2) for head in range(2)]
    hulls = [hull_by_chain(c) for c in costs]
    marginals = [marginal_losses(shown.scores[i, j], shown.utility[i, j], torch.zeros(7, dtype=torch.bool))
                 for i in range(2) for j in range(2)]
    splits = list(itertools.product(range(8), repeat=4))
    gap = max((c - h).max() for c, (h, _) in zip(costs, hulls))
    exact = 0
    for amount, found in enumerate(allocate(marginals, range(29))):
        possible = [split for split in splits if sum(split) == amount]
        total = lambda curves, split: sum(curve[j] for curve, j in zip(curves, split))  # noqa: E731
        best = min(total([h for h, _ in hulls], split) for split in possible)
        assert total([h for h, _ in hulls], found) == pytest.approx(best, abs=1e-12)
        optimum = min(total(costs, split) for split in possible)
        assert total(costs, found) <= optimum + gap + 1e-12
        if all(j in vertices for j, (_, vertices) in zip(found, hulls)):
            assert total(costs, found) == pytest.approx(optimum, abs=1e-12)
            exact += 1
    assert exact >= 5


@pytest.mark.parametrize("budget", [LuKV(), FREE, LuKV(mode="per-layer")])
def test_totals_are_exact_and_solutions_nested(budget):
    shown = random_evidence(3, 4, 50)
    table = given_up(budget, shown)
    most = 50 - max(budget.n_sink + budget.window, round(0.01 * 50))
    for x in range(1, 100):
        assert table[x - 1].sum() == min(round(x / 100 * 3 * 4 * 50), 3 * 4 * most)
    assert (np.diff(table, axis=0) >= 0).all()
    assert table.max() == most


def test_per_layer_gives_every_layer_the_same():
    shown = random_evidence(3, 4, 50)
    shown.utility[0] *= 100
    table = given_up(LuKV(mode="per-layer"), shown)
    assert (table.sum(-1) == table.sum(-1)[:, :1]).all()
    assert (given_up(LuKV(), shown)[49].sum(-1) != table[49].sum(-1)).any()


def test_only_ratios_of_utilities_count():
    shown = random_evidence(3, 2, 50)
    larger = Evidence(shown.layers, 3, shown.scores, 8 * shown.utility, shown.protected)
    assert (LuKV().ratios(larger) == LuKV().ratios(shown)).all()
    shown.utility[1] *= 10
    before = Evidence(shown.layers, 3, shown.scores, larger.utility / 8, shown.protected)
    assert (LuKV().ratios(shown)[:, 1].sum(-1) <= LuKV().ratios(before)[:, 1].sum(-1) + 1e-12).all()
    assert (LuKV().ratios(shown)[49, 1] < LuKV().ratios(before)[49, 1]).any()


def test_a_head_that_nothing_needs_is_emptied_first():
    shown = random_evidence(2, 2, 50)
    shown.utility[1, 0, 4:49] = 0
    table = given_up(LuKV(), shown)
    others = table.copy()
    others[:, 1, 0] = 0
    full = table[:, 1, 0] == 45
    assert (others.sum((1, 2))[~full] == 0).all() and full.any() and not full.all()


def test_what_the_score_protects_is_no_loss():
    shown = random_evidence(1, 2, 40)
    shown.protected[..., -10:] = True
    assert given_up(LuKV(), shown).max() == 40 - 4 - 10


def test_layers_that_do_not_compress_stand_at_the_mean():
    part = random_evidence(1, 2, 40)
    table = LuKV().ratios(Evidence((1,), 3, part.scores, part.utility, part.protected))
    assert table.shape == (99, 3, 2)
    assert table[:, 0].tolist() == table[:, 2].tolist() == [[x / 100] * 2 for x in range(1, 100)]
    assert (table[:, 1] == LuKV().ratios(part)[:, 0]).all()


def test_shares_are_averaged_not_counts():
    short, long = random_evidence(2, 2, 40), random_evidence(2, 2, 400, seed=1)
    fitted_ = LuKV().fit(iter([short, long]))["ratios"]
    assert fitted_.shape == (99, 2, 2) and fitted_.dtype == torch.float32
    np.testing.assert_allclose(fitted_, (LuKV().ratios(short) + LuKV().ratios(long)) / 2, atol=1e-7)


def test_bad_evidence_is_refused():
    with pytest.raises(Refused, match="no evidence"):
        LuKV().fit([])
    for name in ("scores", "utility"):
        shown = random_evidence()
        getattr(shown, name)[0, 1, 3] = torch.nan
        with pytest.raises(Refused, match=f"{name} of a calibration text hold NaN"):
            LuKV().fit([shown])


# ---------------------------------------------------------------------------------------------------------- online


def profile_with(table):
    return Profile(profiles.Key("m", "lu-kv", "{}", "knorm"), {"ratios": torch.tensor(table, dtype=torch.float32)})


def random_table(layers, heads, seed=0):
    """Shares that grow with the row and average to it, nearly."""
    lean = 1 + np.random.default_rng(seed).uniform(0, 3, (1, layers, heads))
    share = np.arange(1, 100)[:, None, None] / 100
    table = share**lean
    return np.clip(table + (share - table.mean((1, 2), keepdims=True)), 0, 1)


def test_layers_keep_their_rounded_ideal():
    table = random_table(5, 3)
    for length, budget in ((100, 20), (333, 111), (480, 96), (1000, 500)):
        kept = fitted((1 - table[round(100 * (1 - budget / length)) - 1]) * length, budget * 15, length)
        counts = whole(kept, 10**9)
        assert counts.sum(1).tolist() == np.rint(kept.sum(1)).tolist()
        assert (abs(counts - kept) < 1).all()


@pytest.mark.parametrize("seed", range(4))
def test_budgets_are_never_exceeded_and_nearly_spent(seed):
    rng = np.random.default_rng(seed)
    L, H = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    found = profile_with(random_table(L, H, seed))
    for length in (7, 60, 333, 1000):
        for budget in sorted({1, 2, length // 20 + 1, length // 5 + 1, length // 2, length - 1}):
            counts = head_counts(found, budget, length)
            assert counts.min() >= 1 and counts.max() <= length
            assert budget * L * H - L / 2 - 1 <= counts.sum() <= budget * L * H


def test_a_constant_table_is_uniform():
    table = np.broadcast_to(np.arange(1, 100)[:, None, None] / 100, (99, 4, 3))
    for length, budget in ((100, 20), (480, 96), (777, 100), (777, 3)):
        assert abs(head_counts(profile_with(table), budget, length) - budget).max() <= 1


def test_the_row_is_the_nearest_percent():
    table = np.zeros((99, 1, 2))
    table[79] = [[0.7, 0.9]]
    assert head_counts(profile_with(table), 200, 1000).tolist() == [[300, 100]]
    assert head_counts(profile_with(table), 196, 1000).tolist() == [[294, 98]]  # 80.4 %: scaled to what was asked
    assert head_counts(profile_with(table), 190, 1000).tolist() == [[190, 190]]  # row 81


def test_nothing_is_known_beyond_the_last_row():
    assert head_counts(profile_with(random_table(2, 2)), 5, 1000).tolist() == [[5, 5]] * 2


def test_rows_that_keep_more_than_they_say_are_scaled():
    """Short calibration texts have nothing left to give at high rates."""
    table = np.minimum(np.arange(1, 100)[:, None, None] / 100, 0.9) * np.ones((1, 2, 2))
    assert head_counts(profile_with(table), 50, 1000).tolist() == [[50, 50]] * 2


def stored(table, score="knorm", budget=None, **more):
    """A context and its budget, whose profile lies where it is looked for."""
    x = random_context(60, score=score, **more)
    budget = budget or LuKV(budget=0.5)
    key = profiles.key_of(x.parts.model, budget, score)
    profiles.save(Profile(key, {"ratios": torch.as_tensor(table, dtype=torch.float32)}))
    return x, budget


def test_heads_keep_their_best_entries():
    x, budget = stored(random_table(2, 2))
    mask = CachePolicy(KNorm(), budget).plan(x).mask
    found = profiles.find(x.parts.model, budget, "knorm")
    assert mask.sum(-1)[0].tolist() == head_counts(found, 30, 60)[0].tolist() != [30, 30]
    assert mask[..., :4].all() and mask[..., -1:].all()
    scores = KNorm().score(x)[..., 4:-1]
    inside = mask[..., 4:-1]
    assert (scores.masked_fill(~inside, torch.inf).amin(-1) >= scores.masked_fill(inside, -torch.inf).amax(-1)).all()


def test_larger_budgets_contain_smaller_ones():
    table = random_table(2, 2)
    masks = []
    for n in range(8, 60, 3):
        x, budget = stored(table, budget=LuKV(budget=f"{n} tokens"))
        masks.append(CachePolicy(KNorm(), budget).plan(x).mask)
    for small, large in itertools.pairwise(masks):
        grown = small.sum(-1) <= large.sum(-1)
        assert not (small & ~large)[grown].any()


def test_a_budget_of_everything_touches_nothing():
    x, budget = stored(random_table(2, 2), budget=LuKV(budget=1.0))
    assert CachePolicy(KNorm(), budget).plan(x).mask.all()


def test_rows_have_lengths_of_their_own():
    x, budget = stored(random_table(2, 2), rows=2, pads=(0, 20))
    found = profiles.find(x.parts.model, budget, "knorm")
    mask = CachePolicy(KNorm(), budget).plan(x).mask
    assert mask.sum(-1).tolist() == [head_counts(found, n // 2, n)[0].tolist() for n in (60, 40)]
    assert not (mask & ~x.valid).any()
    assert mask[1, :, 20:24].all()


def test_what_a_score_protects_stays():
    x, budget = stored(random_table(2, 2), score="snapkv(window=8)")
    mask = CachePolicy(SnapKV(window=8), budget).plan(x).mask
    assert mask[..., -8:].all() and mask[..., :4].all()


def test_protected_tokens_are_dropped_with_one_warning():
    """After averaging, a head may be left with less than it should always keep: the newest of that go."""
    table = np.zeros((99, 2, 2))
    table[:, :, 0], table[:, :, 1] = 0.95, 0.05
    x, budget = stored(table)
    with pytest.warns(UserWarning, match="fewer tokens in some heads than the 5 it should always keep"):
        mask = CachePolicy(KNorm(), budget).plan(x).mask
    assert mask[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CachePolicy(KNorm(), budget).plan(x)


def test_texts_with_nothing_between_are_left_alone():
    x, budget = stored(random_table(2, 2), budget=LuKV(budget=0.5, n_sink=50, window=10))
    with pytest.warns(UserWarning, match="compresses no text as short as the 60 tokens"):
        assert CachePolicy(KNorm(), budget).plan(x).mask.all()


def test_tables_of_other_models_are_refused():
    x, budget = stored(random_table(3, 2))
    with pytest.raises(Refused, match=r"table is \(99, 3, 2\), expected \(99, 2, 2\)"):
        CachePolicy(KNorm(), budget).plan(x)
    x, budget = stored(2 * random_table(2, 2))
    with pytest.raises(Refused, match="outside of 0 to 1"):
        CachePolicy(KNorm(), budget).plan(x)


def test_without_a_profile_the_command_is_named():
    x = random_context(60, score="knorm")
    with pytest.raises(Refused, match=r"longspan profile 'knorm @ lu-kv\(budget=0\.5\)'"):
        CachePolicy(KNorm(), LuKV(budget=0.5)).plan(x)


@pytest.mark.parametrize("text", ["knorm @ lu-kv(budget=0.5)", "h2o @ lu-kv(budget=0.5)", 'keydiff @ lu-kv(budget="2 KiB")',
                                  "criticalkv(base=snapkv(window=4)) @ lu-kv(budget=0.4, mode=per-layer)",
                                  "snapkv(window=4, schedule=per-chunk(size=16)) @ lu-kv(budget=0.4)"])
def test_generates_under_an_unchanged_model(text):
    model, recipe = tiny("llama"), Recipe.parse(text)
    provide_profiles(recipe, model)
    with recipe.on(model), torch.no_grad():
        model.generate(tiny_ids(1, 48), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    done = recipe.achieved
    asked = recipe.cache.budget.amount.tokens(48, done.full_bytes / 48 + 2 * 2 * 4)
    kept = np.array(done.kept)
    assert kept.sum() <= 4 * asked and kept.sum() >= 4 * asked - 2
    assert len(set(kept.flatten())) > 1
