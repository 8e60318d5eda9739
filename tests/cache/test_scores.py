"""Scores and budgets against their definitions, written out plainly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from layer_contexts import parts_of, plain_attention, random_context

from longspan import grammar
from longspan.cache.base import column_sums, newest, oldest, protect, top_mask
from longspan.cache.budgets.adakv import AdaKV
from longspan.cache.budgets.pyramid import Pyramid
from longspan.cache.budgets.uniform import Uniform
from longspan.cache.policy import CachePolicy
from longspan.cache.scores.criticalkv import CriticalKV, projected_norm
from longspan.cache.scores.expected_attention import ExpectedAttention
from longspan.cache.scores.full import Full
from longspan.cache.scores.h2o import H2O
from longspan.cache.scores.keydiff import KeyDiff
from longspan.cache.scores.knorm import KNorm
from longspan.cache.scores.random import Random
from longspan.cache.scores.snapkv import SnapKV
from longspan.cache.scores.streaming_llm import StreamingLLM
from longspan.cache.scores.tova import TOVA
from longspan.registry import Refused, cards

PADS = (0, 3)


def scored(score, x, budget=10):
    """Scores of `x` after everything the room does before it asks for them."""
    if score.can("all-queries"):
        score.observe(x)
    x.budget, x.protected = torch.full((len(x.k),), budget), score.protected(x)
    first = max(0, x.q.shape[2] - score.window_rows())
    x = replace(x, q=x.q[:, :, first:], q_valid=x.q_valid[:, first:], q_positions=x.q_positions[:, first:])
    return score.score(x)


def ranking(scores, valid):
    return scores.masked_fill(~valid, -torch.inf).argsort(dim=-1, descending=True, stable=True)


def small(name):
    """The method called `name` with knobs that suit twenty tokens."""
    sizes = {"window": 4, "n_sink": 2, "n_future": 8}
    card = next(c for c in cards() if c.name == name)
    knobs = [f"{k.name}={sizes[k.name]}" for k in card.knobs if k.name in sizes]
    return grammar.build(grammar.parse(f"{name}({', '.join(knobs)})")[0].call)


SCORES = [c.name for c in cards(kind="score") if c.module.startswith("longspan") and not c.can("profile")]


@pytest.mark.parametrize("name", SCORES)
def test_every_score_is_finite_and_of_the_right_shape(name):
    x = random_context(20, rows=2, pads=PADS)
    scores = scored(small(name), x)
    assert scores.shape == x.valid.shape
    assert torch.isfinite(scores[x.valid]).all()


@pytest.mark.parametrize("name", SCORES)
def test_padding_and_batching_change_no_score(name):
    """A left-padded row in a batch scores its tokens as it does alone."""
    score = small(name)
    both = random_context(20, rows=2, pads=PADS)
    alone = random_context(17, seed=1)
    for field in ("k", "v"):
        getattr(both, field)[1, :, 3:] = getattr(alone, field)[0]
    both.q[1, :, 3:] = alone.q[0]
    batched, single = scored(score, both)[1, :, 3:], scored(score, alone)[0]
    torch.testing.assert_close(batched, single, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_one_group_equals_multi_head_attention(name):
    """With G=1 nothing is averaged: repeating every KV head for its queries' group gives the same scores per head."""
    grouped, full = random_context(20, heads=2, kv_heads=2), random_context(20, heads=4, kv_heads=4)
    for field in ("k", "v"):
        setattr(full, field, getattr(grouped, field).repeat_interleave(2, 1))
    full.q = grouped.q.repeat_interleave(2, 1)
    full.parts = _repeated_output(grouped)
    if name == "random":
        pytest.skip("draws differ from head to head by design")
    torch.testing.assert_close(scored(small(name), full)[:, ::2], scored(small(name), grouped), atol=1e-5, rtol=1e-4)


class _repeated_output:
    """A model's parts whose heads stand twice."""

    def __init__(self, x):
        self.parts = x.parts

    def o_proj(self, layer):
        return self.parts.o_proj(layer).repeat_interleave(2, 1)

    def __getattr__(self, name):
        return getattr(self.parts, name)


# ----------------------------------------------------------------------------------------------------- one by one


def test_column_sums_are_those_of_the_attention_matrix():
    x = random_context(20, rows=2, pads=PADS)
    wanted = plain_attention(x).sum(2).view(2, 2, 2, 20)
    torch.testing.assert_close(column_sums(x, rows=7).double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.attention.sum(3).double(), wanted, atol=1e-5, rtol=1e-5)


def test_softcap_enters_the_attention():
    x = random_context(12, softcap=2.0)
    k = x.k.double().repeat_interleave(2, 1)
    scores = 2.0 * torch.tanh(x.q.double() @ k.mT * x.scale / 2.0)
    wanted = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1).view(1, 2, 2, 12, 12)
    torch.testing.assert_close(x.attention.double(), wanted, atol=1e-6, rtol=1e-5)


def test_h2o_sums_to_the_number_of_queries_per_query_head():
    x = random_context(20, rows=2, pads=PADS)
    H2O().observe(x)
    per_head = column_sums(x).sum(-1)
    torch.testing.assert_close(per_head, torch.tensor([20.0, 17.0])[:, None, None].expand(2, 2, 2), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.per_key["received"].sum(-1), torch.tensor([[20.0] * 2, [17.0] * 2]), atol=1e-4, rtol=0)


def test_h2o_accumulates_over_pieces():
    whole, piece = random_context(20), random_context(20)
    H2O().observe(whole)
    q, positions = whole.q, whole.q_positions
    for a, b in ((0, 8), (8, 9), (9, 20)):
        seen = random_context(20, per_key=piece.per_key)
        for field in ("k", "v", "valid", "positions"):
            setattr(seen, field, getattr(whole, field)[:, :, :b])
        seen.q, seen.q_positions, seen.q_valid = q[:, :, a:b], positions[:, a:b], whole.q_valid[:, a:b]
        H2O().observe(seen)
    torch.testing.assert_close(piece.per_key["received"], whole.per_key["received"], atol=1e-5, rtol=1e-5)


def test_h2o_keeps_half_for_the_newest():
    x = random_context(20)
    scores = scored(H2O(), x, budget=10)
    assert (scores[..., -5:] > scores[..., :-5].amax(-1, keepdim=True)).all()
    torch.testing.assert_close(scores[..., :-5], x.per_key["received"][..., :-5])


def test_observed_attention_is_the_mean_over_queries_that_see_the_token():
    """s[t] / (N - t), as kvpress defines observed attention; in a padded row t counts real tokens."""
    x = random_context(20, rows=2, pads=PADS)
    scores = scored(H2O(normalise=True, recent=0.0), x)
    sums = plain_attention(x).sum(2).view(2, 2, 2, 20).mean(2)
    for row, pad in enumerate(PADS):
        n = 20 - pad
        for t in range(n):
            torch.testing.assert_close(scores[row, :, pad + t].double(), sums[row, :, pad + t] / (n - t), atol=1e-5, rtol=1e-4)


def test_tova_is_snapkv_of_one_query_without_pooling_averaged_over_heads():
    x = random_context(20, rows=2, pads=PADS)
    tova = scored(TOVA(), random_context(20, rows=2, pads=PADS, window=1))
    one = random_context(20, rows=2, pads=PADS, window=1)
    snap = scored(SnapKV(window=1, kernel=1), one).mean(1, keepdim=True)
    real = x.valid & ~newest(x, 1)
    torch.testing.assert_close(tova[real], snap.expand_as(tova)[real])
    assert (tova == tova[:, :1]).all()
    assert (tova[..., -1] > tova[..., :-1].amax(-1)).all()


def test_snapkv_by_hand():
    x = random_context(20, window=4)
    votes = plain_attention(x).mean(2)  # (B,Hq,S)
    votes[..., -4:] = 0.0
    padded = torch.nn.functional.pad(votes, (1, 1))
    for pool, pooled in (("mean", padded.unfold(-1, 3, 1).mean(-1)), ("max", padded.unfold(-1, 3, 1).amax(-1))):
        scores = scored(SnapKV(window=4, kernel=3, pool=pool), random_context(20, window=4))
        wanted = pooled.view(1, 2, 2, 20).mean(2)
        torch.testing.assert_close(scores[..., :-4].double(), wanted[..., :-4], atol=1e-6, rtol=1e-5)
        assert (scores[..., -4:] > scores[..., :-4].amax(-1, keepdim=True)).all()


def test_knorm_ranks_alike_before_and_after_rotation():
    x = random_context(20)
    cos, sin = x.parts.rope(x.positions, 0)
    before = random_context(20)
    before.k = x.parts.unrotate(x.k, cos, sin)
    assert not torch.allclose(before.k, x.k, atol=0.1)
    assert (ranking(scored(KNorm(), before), x.valid) == ranking(scored(KNorm(), x), x.valid)).all()


def test_keydiff_does_not_see_the_length_of_keys():
    x = random_context(20, rows=2, pads=PADS)
    before = scored(KeyDiff(), x)
    x.k = x.k * torch.rand(2, 2, 20, 1).add(0.5)
    torch.testing.assert_close(scored(KeyDiff(), x), before, atol=1e-6, rtol=1e-5)
    x.k[0, 0, 5] = -x.k[0, 0, 5]
    assert not torch.allclose(scored(KeyDiff(), x)[0, 0, 5], before[0, 0, 5], atol=1e-2)


def test_streaming_llm_does_not_see_content():
    a, b = random_context(20, rows=2, pads=PADS, seed=1), random_context(20, rows=2, pads=PADS, seed=2)
    scores = scored(StreamingLLM(), a)
    assert (scores == scored(StreamingLLM(), b)).all()
    kept = CachePolicy(StreamingLLM(n_sink=2), Uniform(budget=0.5)).plan(a).mask
    assert kept[0, 0].nonzero()[:, 0].tolist() == [0, 1, *range(12, 20)]
    assert kept[1, 0].nonzero()[:, 0].tolist() == [3, 4, *range(14, 20)]  # 17 real tokens: 8 stay, sinks after the pads


def test_random_is_a_fixed_draw_per_position():
    x = random_context(20)
    scores = scored(Random(seed=1), x)
    assert (scores == scored(Random(seed=1), random_context(20, seed=5))).all()
    assert not (scores == scored(Random(seed=2), x)).any()
    assert not (scores == scored(Random(seed=1), random_context(20, layer=1))).any()
    longer = scored(Random(seed=1), random_context(300))
    assert (longer[..., :20] == scores).all()
    assert 0.45 < scored(Random(seed=0), random_context(4000, window=1)).mean() < 0.55


def test_full_scores_keep_everything_whatever_the_budget_order():
    x = random_context(20)
    assert CachePolicy(Full(), Uniform(budget=1.0)).plan(x).mask.all()


class TestExpectedAttention:
    def test_one_future_position_and_no_covariance_is_a_softmax(self):
        x = random_context(20, rows=2, pads=PADS)
        score = ExpectedAttention(n_future=1, use_covariance=False, n_sink=2, epsilon=0.0)
        scores = scored(score, x)
        parts = x.parts
        before = parts.unrotate(x.q, *parts.rope(x.q_positions, 0))
        for row, pad in enumerate(PADS):
            mu = before[row, :, pad + 2 :].mean(1)  # the first two queries are left out
            n = 20 - pad
            turned = parts.rotate(mu[:, None], *parts.rope(torch.tensor([n]), 0))[:, 0]
            k = x.k[row, :, pad:].repeat_interleave(2, 0)
            logits = (turned[:, None] @ k.mT)[:, 0] / math.sqrt(8)
            attention = torch.cat([torch.zeros(4, 2), logits[:, 2:].softmax(-1)], -1).view(2, 2, n).mean(1)
            wanted = attention * x.v[row, :, pad:].norm(dim=-1)
            torch.testing.assert_close(scores[row, :, pad + 2 :], wanted[:, 2:], atol=1e-6, rtol=1e-4)
            assert (scores[row, :, pad : pad + 2] > scores[row, :, pad + 2 :].amax(-1, keepdim=True)).all()

    def test_the_exponent_is_the_expectation_over_gaussian_queries(self):
        """E exp(q.k/sqrt d) by a million samples of a Gaussian query at one future position, within one percent."""
        x = random_context(30, head_dim=8, heads=2, kv_heads=2)
        x.q = 0.5 * x.q
        score = ExpectedAttention(n_future=1, n_sink=0)
        score.observe(x)
        exponent = score.exponent(x)[0, 0, 0]
        before = x.parts.unrotate(x.q, *x.parts.rope(x.q_positions, 0))[0, 0].double()
        mean, covariance = before.mean(0), torch.cov(before.T, correction=0)
        samples = torch.distributions.MultivariateNormal(mean, covariance + 1e-9 * torch.eye(8, dtype=torch.float64))
        torch.manual_seed(0)
        q = samples.sample((1_000_000,)).float()
        turned = x.parts.rotate(q, *x.parts.rope(torch.tensor([30]), 0))
        keys = x.k[0, 0, ::6]
        sampled = (turned @ keys.T / math.sqrt(8)).exp().mean(0)
        torch.testing.assert_close(exponent[::6].exp(), sampled, rtol=0.01, atol=0)

    def test_the_mean_rotation_is_the_mean_of_rotations(self):
        x = random_context(20)
        score = ExpectedAttention(n_future=5, n_sink=0)
        score.observe(x)
        turned, covariance = score.future_queries(x)
        before = x.parts.unrotate(x.q, *x.parts.rope(x.q_positions, 0))[0]
        mean = before.mean(1)
        basis = torch.eye(8)
        rotations = torch.stack([x.parts.rotate(basis, *(t.expand(8, -1) for t in x.parts.rope(torch.tensor(p), 0)))
                                 for p in range(20, 25)]).mean(0)  # rows: R e_i
        torch.testing.assert_close(turned[0], mean @ rotations, atol=1e-5, rtol=1e-4)
        own = torch.stack([torch.cov(q.T, correction=0) for q in before])
        torch.testing.assert_close(covariance[0], rotations.T @ own @ rotations, atol=1e-5, rtol=1e-4)

    def test_statistics_add_up_over_pieces(self):
        whole, parts = random_context(20), random_context(20)
        score = ExpectedAttention(n_future=4)
        score.observe(whole)
        for a, b in ((0, 3), (3, 4), (4, 20)):
            piece = random_context(20, stats=parts.stats)
            piece.q, piece.q_positions, piece.q_valid = (
                whole.q[:, :, a:b], whole.q_positions[:, a:b], whole.q_valid[:, a:b])
            score.observe(piece)
        for name, value in whole.stats.items():
            torch.testing.assert_close(parts.stats[name], value, atol=1e-5, rtol=1e-5)


class TestCriticalKV:
    def test_projected_norm_is_that_of_the_output_contribution(self):
        x = random_context(10)
        weight = x.parts.o_proj(0)  # (hidden, Hq, D)
        for h in range(2):
            both = [(x.v[0, h] @ weight[:, q].T).abs().sum(-1) for q in (2 * h, 2 * h + 1)]
            torch.testing.assert_close(projected_norm(x)[0, h], sum(both) / 2, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("base", [SnapKV(window=4), H2O(), KNorm(), KeyDiff()])
    def test_equal_projected_norms_keep_the_base_set(self, base):
        x, y = random_context(20), random_context(20)
        x.v = y.v = torch.ones_like(x.v)
        kept = []
        for score, ctx in ((base, x), (CriticalKV(base=base), y)):
            if score.can("all-queries"):
                score.observe(ctx)
            kept.append(CachePolicy(score, Uniform(budget=0.5)).plan(ctx).mask)
        assert (kept[0] == kept[1]).all()

    def test_half_is_fixed_by_the_base_score_and_the_rest_weighed_by_the_values(self):
        x = random_context(20, window=4)
        base = scored(SnapKV(window=2), random_context(20, window=2))
        x = random_context(20, window=2)
        scores = scored(CriticalKV(base=SnapKV(window=2)), x, budget=10)
        fixed = top_mask(base, torch.full((1, 2), 5))
        rest = (base + 1e-4) * projected_norm(x)
        torch.testing.assert_close(scores[~fixed], rest[~fixed])
        assert (scores.masked_fill(~fixed, torch.inf).amin(-1) > scores.masked_fill(fixed, -torch.inf).amax(-1)).all()

    def test_scores_below_zero_are_weighed_by_the_values_the_right_way_round(self):
        """Keys of one length, so that the base says nothing: the values that matter more stay."""
        x = random_context(20)
        x.k = x.k / x.k.norm(dim=-1, keepdim=True)
        scores, norms = scored(CriticalKV(base=KNorm(), fixed=0.0), x), projected_norm(x)
        assert (scores.argsort(-1) == norms.argsort(-1)).float().mean() > 0.9

    def test_refuses_a_base_with_a_value_norm(self):
        with pytest.raises(Refused, match="expected-attention already weighs by the values"):
            CriticalKV(base=ExpectedAttention())
        with pytest.raises(Refused, match="criticalkv already weighs"):
            CriticalKV(base=CriticalKV())

    def test_passes_on_what_its_base_needs(self):
        assert CriticalKV(base=H2O()).can("all-queries") and not CriticalKV().can("all-queries")
        assert CriticalKV(base=SnapKV(window=7)).window_rows() == 7
        assert CriticalKV(base=StreamingLLM(n_sink=3)).protected(random_context(20)) == 3


# --------------------------------------------------------------------------------------------------------- budgets


def kept_by(budget, scores, **more):
    x = random_context(scores.shape[-1], kv_heads=scores.shape[1], heads=scores.shape[1], **more)
    return budget.keep(scores, x)


@pytest.mark.parametrize("ratio", [0.1, 0.33, 0.5, 0.9])
def test_kept_counts(ratio):
    """B per head; AdaKV H*B per layer; Pyramid within one token of B in the mean over layers."""
    scores = torch.randn(1, 4, 40, generator=torch.Generator().manual_seed(0))
    B = int(ratio * 40 + 1e-9)
    assert (kept_by(Uniform(budget=ratio), scores).sum(-1) == B).all()
    assert kept_by(AdaKV(budget=ratio), scores).sum() == 4 * B
    counts = [int(kept_by(Pyramid(budget=ratio), scores, layer=i, n_layers=6).sum(-1)[0, 0]) for i in range(6)]
    assert abs(sum(counts) / 6 - B) <= 1
    assert counts == sorted(counts, reverse=True)


def test_adakv_at_its_two_ends():
    scores = torch.randn(1, 4, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    assert (kept_by(AdaKV(budget=0.3, alpha=1.0), scores) == kept_by(Uniform(budget=0.3), scores)).all()
    everywhere = top_mask(scores.flatten(1), torch.tensor([48])).view_as(scores)
    assert (kept_by(AdaKV(budget=0.3, alpha=0.0), scores) == everywhere).all()
    shares = kept_by(AdaKV(budget=0.3), scores).sum(-1)[0]
    assert shares[3] > shares[0] >= int(0.2 * 12)


def test_adakv_is_sure_of_what_the_score_protects():
    scores = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(0))
    scores[:, 0] -= 100
    assert kept_by(AdaKV(budget=0.5, alpha=0.0), scores, protected=4).sum(-1).tolist() == [[4, 16]]


def test_pyramid_by_hand():
    """N=100, B=30, no window, beta 20: first 58.5, last 1.5, in equal steps."""
    scores = torch.randn(1, 1, 100, generator=torch.Generator().manual_seed(0))
    counts = [int(kept_by(Pyramid(budget=0.3), scores, layer=i, n_layers=4).sum()) for i in range(4)]
    assert counts == [round(58.5 - i * 19.0) for i in range(4)]
    clipped = [int(kept_by(Pyramid(budget=0.7), scores, layer=i, n_layers=3).sum()) for i in range(3)]
    assert clipped == [100, 70, 40]


@pytest.mark.parametrize(("beta", "protected"), [(1.0, 0), (20.0, 12), (20.0, 3)])
def test_pyramid_is_uniform_where_it_has_no_slope(beta, protected):
    """beta 1; or a last layer that would keep less than the window (12 of 12, or 0.6 of 3)."""
    scores = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(0))
    for layer in range(4):
        kept = kept_by(Pyramid(budget=0.3, beta=beta), scores, layer=layer, n_layers=4, protected=protected)
        assert (kept == kept_by(Uniform(budget=0.3), scores)).all()


def test_pyramid_of_one_layer_keeps_the_mean():
    scores = torch.randn(1, 2, 100, generator=torch.Generator().manual_seed(0))
    assert (kept_by(Pyramid(budget=0.3), scores, n_layers=1).sum(-1) == 30).all()


BUDGETS = [c.name for c in cards(kind="budget") if c.module.startswith("longspan") and not c.can("profile")]


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_never_change_the_order_within_a_head(name):
    """In every head each kept score is at least as high as each dropped one, and pads are never kept."""
    x = random_context(30, rows=2, pads=PADS, heads=8, kv_heads=4, layer=1, n_layers=3)
    scores = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(0)).masked_fill(~x.valid, -torch.inf)
    kept = grammar.build(grammar.parse(f"{name}(budget=0.4)")[0].call).keep(scores, x) & x.valid
    lowest_kept = scores.masked_fill(~kept, torch.inf).amin(-1)
    highest_dropped = scores.masked_fill(kept | ~x.valid, -torch.inf).amax(-1)
    assert (lowest_kept >= highest_dropped).all()
    assert kept.sum() > 0


# ----------------------------------------------------------------------------------------------------- shared pieces


def test_protect_lifts_above_everything():
    scores = torch.tensor([[[-5.0, 3.0, -torch.inf, 1.0]]])
    lifted = protect(scores, torch.tensor([True, False, True, False]))
    assert lifted[0, 0, 0] == lifted[0, 0, 2] == 4.0
    assert lifted[0, 0, 1:2].tolist() == [3.0]
    assert torch.isfinite(protect(torch.full((1, 1, 3), -torch.inf), torch.tensor([True, False, False]))[0, 0, 0])


def test_newest_and_oldest_skip_padding():
    x = random_context(8, rows=2, pads=PADS)
    assert newest(x, 2)[0, 0].nonzero()[:, 0].tolist() == [6, 7]
    assert newest(x, torch.tensor([1, 3]))[:, 0].sum(-1).tolist() == [1, 3]
    assert oldest(x, 2)[1, 0].nonzero()[:, 0].tolist() == [3, 4]


def test_ties_go_to_the_earlier_entry():
    assert top_mask(torch.tensor([1.0, 2.0, 1.0, 1.0]), torch.tensor(2)).tolist() == [True, True, False, False]


def test_parts_helper_is_a_real_model():
    assert parts_of().n_kv_heads == 2
