"""SALE: the areas of a query block, the score that decides, exactness at both ends, thresholds, and the refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.block_sparse_cpu import plan_lse
from longspan.kernels.plan import ReadPlan, query_slots
from longspan.prefill import ReadContext
from longspan.prefill.base import dense_plan
from longspan.prefill.sale import Sale, areas_of, check_thresholds, inspect, plan_of, sink_local_lse
from longspan.registry import Refused

SMALL = {"q_block": 16, "k_block": 16, "w": 32, "dense_until": 0}


def context(T=400, S=None, B=1, heads=4, key_heads=2, D=32, valid=None, dtype=torch.float32, seed=0) -> ReadContext:
    """Random rows with a common part in queries and keys, as models have it."""
    g = torch.Generator().manual_seed(seed)
    S = S or T
    q, k, v = (torch.randn(B, h, n, D, generator=g) for h, n in ((heads, T), (key_heads, S), (key_heads, S)))
    shift = torch.randn(2, D, generator=g)
    return ReadContext((q + shift[0]).to(dtype), (k + shift[1]).to(dtype), v.to(dtype), D**-0.5, valid=valid)


def read(x: ReadContext, plan: ReadPlan) -> torch.Tensor:
    return block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale, valid=x.valid)


def dense(x: ReadContext) -> torch.Tensor:
    return read(x, dense_plan(x, 64))


def logits(x: ReadContext) -> torch.Tensor:
    return x.q.double() @ x.k.double().repeat_interleave(x.heads // x.k.shape[1], 1).mT * x.scale


def exact_ras(x: ReadContext, areas) -> torch.Tensor:
    """exp(c q.k - m_i) / l_i of every pair, in float64, straight from the definition."""
    mask = areas.sink_local[:, None].repeat_interleave(areas.q_block, 2).repeat_interleave(areas.k_block, 3)
    mask = mask[:, :, : x.q_len, : x.k_len].clone()
    mask &= torch.arange(x.k_len) <= torch.arange(x.k_len - x.q_len, x.k_len)[:, None]
    score = logits(x)
    inside = score.masked_fill(~mask, -torch.inf)
    m = inside.amax(-1, keepdim=True)
    return (score - m).exp() / (inside - m).exp().sum(-1, keepdim=True)


# --------------------------------------------------------------------------------------------------------------- areas


def test_areas_are_those_of_the_released_kernel():
    """n = 2u + 2 causal blocks, n_seg = max(0, floor((n - 1 - 4) / 4)), middle blocks 1 .. 4 n_seg, local the rest."""
    areas = areas_of(context(T=1024, D=8, heads=2), 64, 32, 128)
    for u in range(16):
        n = 2 * u + 2
        segments = max(0, (n - 1 - 4) // 4)
        assert (int(areas.begin[0, u]), int(areas.end[0, u])) == (1, 1 + 4 * segments)
        expected = [v == 0 or 4 * segments < v < n for v in range(32)]
        assert areas.sink_local[0, u].tolist() == expected
        assert segments == 0 or 4 <= n - 1 - 4 * segments <= 7
        first_row_sees = 64 * u + 1 - 32 * (1 + 4 * segments)
        assert segments == 0 or first_row_sees >= 65


@pytest.mark.parametrize(("T", "S"), [(400, 400), (130, 400), (77, 301), (64, 512), (1, 300)])
def test_the_middle_lies_before_every_row(T, S):
    """Also for prompts in pieces, whose query blocks begin anywhere in a key block."""
    areas = areas_of(context(T=T, S=S, D=8, heads=2), 64, 32, 128)
    begin, last = query_slots(T, S, 64)
    assert bool((areas.end * 32 <= begin + 1).logical_or(areas.end <= areas.begin).all())
    assert bool(areas.sink_local[..., 0].all())
    assert bool(areas.sink_local[0, torch.arange(len(last)), last // 32].all())
    seen = torch.arange(-(-S // 32)) * 32 <= last[:, None]
    assert torch.equal(areas.sink_local[0] | areas.middle[0], seen) and not (areas.sink_local & areas.middle).any()


# -------------------------------------------------------------------------------------------------------- both ends


@pytest.mark.parametrize(("T", "S"), [(400, 400), (450, 450), (100, 390), (1, 300)])
def test_tau_zero_is_dense(T, S):
    x = context(T, S)
    for tau in (0, 9e-6):
        plan = Sale(tau=tau, dense_until=0).plan(x)
        assert plan.density == 1.0
        assert torch.allclose(read(x, plan), dense(x), atol=1e-5)


def test_no_middle_is_dense():
    x = context(T=192)
    plan = Sale(tau=0.5, dense_until=0).plan(x)
    assert plan.density == 1.0 and torch.allclose(read(x, plan), dense(x), atol=1e-5)


def test_short_prompts_are_dense():
    assert Sale(tau=1e9).plan(context(T=1024, D=8, heads=2)).density == 1.0
    assert Sale(tau=1e9).plan(context(T=1025, D=8, heads=2)).density < 1.0
    x = context(T=1)
    assert torch.allclose(read(x, Sale(tau=0.1, dense_until=0).plan(x)), x.v.repeat_interleave(2, 1), atol=1e-6)


def test_a_large_tau_reads_sink_and_local_area_only():
    x = context()
    sale = Sale(tau=1e30, **SMALL)
    areas, plan = sale.areas(x), sale.plan(x)
    assert torch.equal(plan.block_map.expand(1, 4, -1, -1), areas.sink_local[:, None].expand(1, 4, -1, -1))
    mask = plan.token_mask()
    expected = F.scaled_dot_product_attention(x.q, x.k.repeat_interleave(2, 1), x.v.repeat_interleave(2, 1), attn_mask=mask)
    assert torch.allclose(read(x, plan), expected, atol=1e-5) and plan.density < 0.5


# ----------------------------------------------------------------------------------------------------------- the score


def test_shift_identity():
    """Softmax of c E, E = Qs.Ks + qm.Ks, equals softmax of c Q K^T."""
    x = context()
    seen = inspect(x, Sale(**SMALL).areas(x), estimate="exact")
    e = seen.q.values @ seen.k.values.repeat_interleave(2, 1).mT + seen.bias[:, :, None]
    assert torch.allclose((e * x.scale).softmax(-1), logits(x).softmax(-1).float(), atol=1e-5)


def test_sink_local_statistics_are_exact():
    x = context(valid=torch.arange(400)[None] >= 0)
    areas = Sale(**SMALL).areas(x)
    ras = exact_ras(x, areas)
    for y in (x, replace(x, valid=None), replace(x, q=x.q.transpose(2, 3).contiguous().transpose(2, 3))):
        found = (logits(y) - sink_local_lse(y, areas)[..., None].double()).exp()
        assert torch.allclose(found, ras, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "S", "D", "pad"), [(130, 130, 32, 0), (45, 200, 20, 37), (1, 77, 17, 3)])
def test_sums_without_values_are_the_executors(T, S, D, pad, dtype):
    valid = (torch.arange(S) >= pad)[None]
    x = context(T, S, D=D, dtype=dtype, valid=valid if pad else None)
    plan = ReadPlan.dense(q_len=T, k_len=S, q_block=16, k_block=16)
    given = {"scale": x.scale, "valid": x.valid}
    expected = block_sparse_attention(x.q, x.k, x.v, plan, return_lse=True, **given)[1]
    assert torch.equal(plan_lse(x.q, x.k, plan, **given), expected)
    nothing = ReadPlan.from_mask(torch.zeros_like(plan.block_map), q_len=T, k_len=S, q_block=16, k_block=16)
    with pytest.raises(ValueError, match="no key to read"):
        plan_lse(x.q, x.k, nothing, **given)
    with pytest.raises(ValueError, match="the plan is for"):
        plan_lse(x.q, x.k[:, :, 1:], plan, scale=x.scale)


@pytest.mark.parametrize("tau", [0.1, 0.3, 1.0])
def test_with_exact_scores_every_strong_pair_is_read_and_what_is_dropped_is_weak(tau):
    x = context(T=333)
    sale = Sale(tau=tau, estimate="exact", **SMALL)
    areas, plan = sale.areas(x), sale.plan(x)
    ras, read_pairs = exact_ras(x, areas), plan.token_mask()
    causal = torch.arange(333) <= torch.arange(333)[:, None]
    assert bool(read_pairs[(ras > tau * 1.0001) & causal].all())
    weights = logits(x).masked_fill(~causal, -torch.inf).softmax(-1)
    dropped = causal & ~read_pairs
    assert dropped.any() and float(weights[dropped].max()) < tau
    inside = areas.sink_local[:, None].repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :333, :333] & causal
    share = (logits(x).exp() * inside).sum(-1) / (logits(x).exp() * causal).sum(-1)  # l_i / Z_i
    assert bool(((weights * dropped).sum(-1) <= dropped.sum(-1) * tau * share * 1.0001).all())


@pytest.mark.parametrize("estimate", ["int4", "exact"])
@pytest.mark.parametrize("groups", ["per_thread", "per_token"])
def test_row_limits_and_relative_scores_give_the_same_mask(estimate, groups):
    x = context()
    areas = Sale(**SMALL).areas(x)
    seen = inspect(x, areas, groups=groups, estimate=estimate)
    largest = seen.largest_ras()
    for tau in (0.1, 0.3, 1.0):
        found = seen.important(torch.full((4,), tau))
        clear = (largest / tau - 1).abs() > 1e-4
        assert torch.equal(found[clear], largest[clear] > tau)
        assert found.any() and not found[areas.middle[:, None].expand_as(found)].all()


def test_the_estimate_is_near_the_exact_score():
    """Where they differ in what they choose, the exact score is near the threshold."""
    x = context(T=600)
    sale = Sale(tau=0.3, dense_until=0)
    low, exact = (inspect(x, sale.areas(x), estimate=e).largest_ras() for e in ("int4", "exact"))
    middle = sale.areas(x).middle[:, None].expand_as(low)
    gap = (low[middle].log() - exact[middle].log()).abs()
    assert float(gap.mean()) < 0.3 and float(gap.max()) < 1.5
    without_bias = replace(inspect(x, sale.areas(x)), bias=torch.zeros_like(inspect(x, sale.areas(x)).bias)).largest_ras()
    assert float((without_bias[middle].log() - exact[middle].log()).abs().mean()) > 2 * float(gap.mean())


def test_masks_are_monotone_and_within_the_causal_half():
    x, before = context(T=420), None
    for tau in (1.0, 0.3, 0.1, 0.03, 0.0):
        plan = Sale(tau=tau, **SMALL).plan(x)
        if plan.block_map.shape[-1] != 27:
            assert tau == 0 and plan.density == 1.0
            break
        mask = plan.block_map
        assert before is None or bool((mask >= before).all())
        assert bool(mask[..., 0].all()) and bool(mask.diagonal(dim1=-2, dim2=-1).all()) and not mask.triu(1).any()
        before = mask
    assert before.float().mean() > 0.4


def test_groups_of_heads_equal_repeated_keys():
    x = context(T=420)
    repeated = replace(x, k=x.k.repeat_interleave(2, 1), v=x.v.repeat_interleave(2, 1))
    for estimate in ("int4", "exact"):
        sale = Sale(tau=0.2, estimate=estimate, **SMALL)
        assert torch.equal(sale.plan(x).block_map, sale.plan(repeated).block_map)
        assert torch.allclose(read(x, sale.plan(x)), read(repeated, sale.plan(repeated)), atol=1e-5)


def test_heads_have_thresholds_of_their_own():
    x = context()
    areas = Sale(**SMALL).areas(x)
    mask = plan_of(x, torch.tensor([0.0, 0.1, 1e-6, torch.inf]), areas).block_map
    for head, tau in enumerate((0.0, 0.1, 0.0, 1e30)):
        alone = plan_of(x, torch.full((4,), tau), areas).block_map
        assert torch.equal(mask[:, head], alone.expand_as(mask)[:, head])
    assert bool(mask[:, [0, 2]].eq(areas.sink_local | areas.middle).all())


def test_constant_keys_read_where_one_over_the_sum_is_above_tau():
    x = context(T=400)
    x = replace(x, k=x.k[:, :, :1].expand_as(x.k).contiguous())
    areas = Sale(**SMALL).areas(x)
    causal_local = ReadPlan.from_mask(areas.sink_local[:, None], q_len=400, k_len=400, q_block=16, k_block=16).token_mask()
    count = causal_local.sum(-1)[0, 0]
    for tau in (0.0071, 0.0123, 0.018):
        mask = Sale(tau=tau, **SMALL).plan(x).block_map
        row = F.pad((1 / count > tau), (0, -400 % 16)).view(-1, 16).any(-1)
        middle = areas.middle[0] & row[:, None]
        assert torch.equal(mask[0], (areas.sink_local[0] | middle).expand(4, -1, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_much_the_same(dtype):
    x, half = context(T=420), context(T=420, dtype=dtype)
    sale = Sale(tau=0.2, **SMALL)
    same = sale.plan(x).block_map == sale.plan(half).block_map
    assert same.float().mean() > 0.97
    assert torch.allclose(read(half, sale.plan(half)).float(), read(x, sale.plan(half)), atol=0.03)


# ----------------------------------------------------------------------------------------------- pieces, padding, shapes


@pytest.mark.parametrize("pad", [16, 48, 21])
def test_padding_on_the_left_changes_nothing_for_the_tokens(pad):
    alone = context(T=320, seed=1)
    empty = lambda t, fill: torch.cat((torch.full_like(t[:, :, :pad], fill), t), 2)  # noqa: E731
    valid = (torch.arange(320 + pad) >= pad)[None]
    x = ReadContext(empty(alone.q, 50.0), empty(alone.k, -50.0), empty(alone.v, 9.0), alone.scale, valid=valid)
    sale = Sale(tau=0.3, **SMALL)
    out = read(x, sale.plan(x))
    assert torch.isfinite(out).all() and not out[:, :, :pad].any()
    if pad % 16 == 0:
        assert torch.equal(sale.plan(x).token_mask()[..., pad:, pad:], sale.plan(alone).token_mask())
        assert torch.allclose(out[:, :, pad:], read(alone, sale.plan(alone)), atol=1e-5)
    both = ReadContext(*(torch.cat((t, u)) for t, u in ((x.q, x.q), (x.k, x.k), (x.v, x.v))), x.scale,
                       valid=torch.cat((valid, torch.ones_like(valid))))
    assert torch.equal(sale.plan(both).token_mask()[0, :, pad:], sale.plan(x).token_mask()[0, :, pad:])


def test_padding_on_the_right_is_never_chosen():
    x = context(T=400)
    valid = (torch.arange(400) < 300)[None]
    plan = Sale(tau=0.2, **SMALL).plan(replace(x, valid=valid))
    assert torch.isfinite(read(replace(x, valid=valid), plan)).all()
    assert not plan.block_map[..., 19:].any()


@pytest.mark.parametrize("piece", [64, 100])
def test_a_prompt_in_pieces_reads_what_matters(piece):
    x = context(T=400)
    pieces = [replace(x, q=x.q[:, :, a : a + piece], k=x.k[:, :, : a + piece], v=x.v[:, :, : a + piece])
              for a in range(0, 400, piece)]
    exact = [Sale(tau=0, **SMALL).plan(p) for p in pieces]
    assert torch.allclose(torch.cat([read(p, plan) for p, plan in zip(pieces, exact)], 2), dense(x), atol=1e-5)
    outs = []
    for p in pieces:
        sale = Sale(tau=0.1, estimate="exact", **SMALL)
        plan, areas = sale.plan(p), sale.areas(p)
        own = torch.arange(p.k_len - p.q_len, p.k_len)[:, None]
        strong = (exact_ras(p, areas) > 0.1001) & (torch.arange(p.k_len) <= own)
        assert bool(plan.token_mask().expand_as(strong)[strong].all())
        outs.append(read(p, plan))
    assert (torch.cat(outs, 2) - dense(x)).norm() / dense(x).norm() < 0.3


def test_odd_lengths_have_ragged_last_blocks():
    for T in (401, 415, 447):
        x = context(T=T)
        for groups in ("per_thread", "per_token"):
            plan = Sale(tau=0.2, groups=groups, **SMALL).plan(x)
            assert bool(plan.block_map[..., -1, -1].all()) and torch.isfinite(read(x, plan)).all()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("knobs", "match"), [
    ({"q_block": 48}, "q_block=48 is no multiple of k_block=32; the nearest k_block that divides it is 24"),
    ({"w": 100}, "w=100 is no multiple of k_block=32"),
    ({"w": 32}, "the nearest is w=64"),
    ({"q_block": 120, "k_block": 40, "w": 120}, "a segment of 128 keys is no multiple of k_block=40"),
    ({"q_block": 4, "k_block": 4, "w": 8}, "multiple of 8"),
    ({"tau": -0.1}, "at least 0"),
    ({"theta": -1.0}, "at least 0"),
    ({"groups": "per_warp"}, "per_thread|per_token"),
    ({"estimate": "int8"}, "int4"),
])
def test_bad_knobs_are_refused(knobs, match):
    with pytest.raises(Refused, match=match):
        Sale(**knobs)


def test_bad_input_is_refused():
    sale = Sale(tau=0.1, **SMALL)
    for name in ("q", "k"):
        x = context()
        bad = getattr(x, name).clone()
        bad[0, 0, 7, 3] = math.nan
        with pytest.raises(ValueError, match=f"{name} holds NaN"):
            sale.plan(replace(x, **{name: bad}))
    x = context(T=16)
    with pytest.raises(ValueError, match="1 <= T <= S"):
        sale.plan(replace(x, q=x.q[:, :, :0], k=x.k[:, :, :0], v=x.v[:, :, :0]))
    with pytest.raises(ValueError, match="1 <= T <= S"):
        sale.plan(replace(x, k=x.k[:, :, :8], v=x.v[:, :, :8]))
    with pytest.raises(ValueError, match="valid"):
        sale.plan(replace(context(B=2), valid=torch.ones(2, 3, dtype=torch.bool)))
    with pytest.raises(Refused, match=r"\(3,\): expected one for each of 4 query heads"):
        check_thresholds(torch.zeros(3), 4)
    with pytest.raises(Refused, match="at least 0"):
        check_thresholds(torch.tensor([0.1, -0.1]), 2)
