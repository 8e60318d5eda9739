"""What selectors share: block means, top-p and top-k, the last rows, and the refusals."""

from __future__ import annotations

import pytest
import torch

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.prefill.a_shape import AShape
from longspan.prefill.base import (
    ReadContext,
    diagonal_sums,
    forced,
    keep_top_k,
    keep_top_p,
    last_rows_attention,
    masked_softmax,
    plan_from_blocks,
    pooled,
    pooled_map,
    readable,
)
from longspan.prefill.flexprefill import FlexPrefill
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.oracle import OracleTopP
from longspan.prefill.vertical_slash import VerticalSlash
from longspan.prefill.xattention import XAttention

SELECTORS = [
    AShape(sink=3, window=20, block=16),
    VerticalSlash(vertical=30, slash=50, block=16),
    MeanPool(p=0.5, block=16),
    MeanPool(density=0.3, block=16),
    XAttention(threshold=0.5, block=16, stride=4),
    FlexPrefill(gamma=0.5, block=16, min_budget=16),
    FlexPrefill(gamma=0.5, tau=1.0, block=16, min_budget=16),
    OracleTopP(p=0.5, block=16),
]
FULL = [
    AShape(sink=0, window=333, block=16),
    VerticalSlash(vertical=333, slash=50, block=16),
    VerticalSlash(vertical=30, slash=333, block=16),
    MeanPool(p=1.0, block=16),
    MeanPool(k=21, block=16),
    MeanPool(density=1.0, block=16),
    XAttention(threshold=1.0, block=16, stride=4),
    FlexPrefill(gamma=1.0, block=16, min_budget=16),
    FlexPrefill(block=16, min_budget=333),
    OracleTopP(p=1.0, block=16),
]


def context(T=300, S=None, B=2, heads=4, key_heads=2, D=16, pad=None, dtype=torch.float32, seed=0) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    S = S or T
    sizes = ((heads, T), (key_heads, S), (key_heads, S))
    q, k, v = (torch.randn(B, h, n, D, generator=draw).to(dtype) for h, n in sizes)
    valid = None
    if pad is not None:
        valid = torch.ones(B, S, dtype=torch.bool)
        valid[0, slice(pad) if pad > 0 else slice(pad, None)] = False
    return ReadContext(q * 2, k, v, D**-0.5, valid=valid)


def everything(x: ReadContext) -> torch.Tensor:
    return torch.arange(x.k_len) <= (x.k_len - x.q_len + torch.arange(x.q_len))[:, None]


@pytest.mark.parametrize("selector", FULL, ids=str)
@pytest.mark.parametrize("S", [300, 333])
def test_full_budgets_are_dense(selector, S):
    x = context(S=S)
    plan = selector.plan(x)
    assert plan.density == 1.0
    exact = block_sparse_attention(x.q, x.k, x.v, plan, backend="reference")
    logits = (x.q @ x.k.repeat_interleave(2, 1).mT * x.scale).masked_fill(~everything(x), -torch.inf)
    assert torch.allclose(exact, logits.softmax(-1) @ x.v.repeat_interleave(2, 1), atol=1e-5)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("T", [300, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_are_sparse_causal_and_executable(selector, T, dtype):
    x = context(T=T, S=300, dtype=dtype)
    plan = selector.plan(x)
    assert 0 < plan.density < 1 and plan.q_len == T and plan.k_len == 300
    assert not (plan.token_mask() & ~everything(x)).any()
    own = torch.arange(T) + 300 - T
    assert plan.token_mask()[..., torch.arange(T), own].all()  # every query reads at least itself
    assert torch.isfinite(block_sparse_attention(x.q, x.k, x.v, plan).float()).all()


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("pad", [40, -40])
def test_padding_changes_nothing_for_the_tokens(selector, pad):
    """A padded row is planned like its tokens alone (here padding fills whole blocks), whatever the padding holds."""
    pad = pad // 40 * 48
    x = context(T=304, pad=pad)
    tokens = slice(pad, None) if pad > 0 else slice(None, pad)
    x.q[0, :, ~x.valid[0]] = x.k[0, :, ~x.valid[0]] = 50.0
    alone = ReadContext(x.q[:1, :, tokens], x.k[:1, :, tokens], x.v[:1, :, tokens], x.scale)
    if pad < 0 and isinstance(selector, (VerticalSlash, FlexPrefill)):
        pytest.skip("looks at the last rows, which are padding here")
    mask = selector.plan(x).token_mask()
    own = mask[0][:, x.valid[0]][..., x.valid[0]]
    assert torch.equal(own.expand(4, -1, -1), selector.plan(alone).token_mask()[0].expand(4, -1, -1))
    out = block_sparse_attention(x.q, x.k, x.v, selector.plan(x), valid=x.valid)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_padding_on_the_right_is_survived(selector):
    x = context(T=300, pad=-150)
    x.k[0, :, 150:] = 1e4
    out = block_sparse_attention(x.q, x.k, x.v, selector.plan(x), valid=x.valid)
    assert torch.isfinite(out).all() and not out[0, :, 150:].any()


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_short_prompts_are_dense_and_plans_repeat(selector):
    assert selector.plan(context(T=32)).density == 1.0
    assert selector.plan(context(T=1, S=300)).density == 1.0
    one, two = (selector.plan(context()) for _ in range(2))
    assert torch.equal(one.token_mask(), two.token_mask())


def test_bad_input_is_refused():
    x = context()
    bad = x.q.clone()
    bad[0, 0, 5, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        MeanPool().plan(ReadContext(bad, x.k, x.v, x.scale))
    with pytest.raises(ValueError, match="multiple"):
        MeanPool().plan(ReadContext(x.q[:, :3], x.k, x.v, x.scale))
    with pytest.raises(ValueError, match="valid"):
        MeanPool().plan(ReadContext(x.q, x.k, x.v, x.scale, valid=torch.ones(1, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="1 <= T"):
        MeanPool().plan(ReadContext(x.q[:, :, :0], x.k, x.v, x.scale))


# ------------------------------------------------------------------------------------------------------------- helpers


def test_pooled_is_the_mean_of_the_tokens():
    x = torch.randn(2, 3, 50, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(pooled(x, 16)[:, :, 3], x[:, :, 48:].mean(2), atol=1e-6)
    assert torch.allclose(pooled(x, 16)[:, :, 1], x[:, :, 16:32].mean(2), atol=1e-6)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[0, :20] = False
    x[0, :, :20] = torch.nan
    means = pooled(x, 16, valid)
    assert not means[0, :, 0].any() and torch.allclose(means[0, :, 1], x[0, :, 20:32].mean(1), atol=1e-6)
    assert pooled(x.bfloat16(), 16).dtype == torch.float32


def test_top_p_keeps_the_smallest_sufficient_set():
    weights = torch.rand(50, 17, generator=torch.Generator().manual_seed(0))
    weights[:, 12:] = 0.0
    for p in (0.1, 0.5, 0.9, 0.999):
        kept = keep_top_p(weights, p)
        mass = (weights * kept).sum(-1)
        assert (mass >= p * weights.sum(-1) * (1 - 1e-6)).all()
        least = weights.masked_fill(~kept, torch.inf).min(-1).values
        assert (mass - least < p * weights.sum(-1)).all() and not kept[:, 12:].any()
    assert keep_top_p(weights, 1.0).all()
    assert not keep_top_p(torch.zeros(3, 4), 0.5).any()


def test_top_p_counts_what_comes_first():
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    first = torch.tensor([True, False, False, False])
    assert keep_top_p(weights, 0.45, first).tolist() == [True, False, False, True]
    assert keep_top_p(weights, 0.05, first).tolist() == [True, False, False, False]
    both = torch.tensor([True, True, False, False])
    assert keep_top_p(weights, 0.05, both).tolist() == [True, True, False, False]


def test_ties_go_to_the_lower_index():
    assert keep_top_p(torch.full((4,), 0.25), 0.5).tolist() == [True, True, False, False]
    assert keep_top_k(torch.ones(2, 4), torch.tensor([1, 3])).tolist() == [[True, False, False, False],
                                                                          [True, True, True, False]]


def test_last_rows_and_diagonals():
    x = context(T=70, S=90)
    attention = last_rows_attention(x, 20)
    logits = (x.q @ x.k.repeat_interleave(2, 1).mT * x.scale).masked_fill(~everything(x), -torch.inf)
    assert torch.allclose(attention, logits.softmax(-1)[:, :, -20:], atol=1e-6)
    sums = diagonal_sums(attention)
    distance = (70 + torch.arange(20))[:, None] - torch.arange(90)
    for o in (0, 1, 19, 45, 70, 89):
        assert torch.allclose(sums[..., o], attention.masked_fill(distance != o, 0.0).sum((-1, -2)), atol=1e-6)
    assert last_rows_attention(x, 500).shape[-2] == 70  # fewer queries than asked for: all of them
    masked = last_rows_attention(context(T=70, pad=10), 500)
    assert not masked[0, :, :10].any() and not masked[0, ..., :10].any()
    assert torch.allclose(masked[0, :, 10:].sum(-1), torch.ones(4, 60), atol=1e-5)


def test_pooled_map_is_a_causal_distribution():
    weights = pooled_map(context(T=100, S=300), 16)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 7), atol=1e-5)
    assert not weights.masked_fill(readable(context(T=100, S=300), 16), 0.0).any()


def test_masked_softmax_of_nothing_is_zero():
    assert masked_softmax(torch.zeros(2, 3), torch.tensor([[True, True, False], [False] * 3])).tolist() == [
        [0.5, 0.5, 0.0], [0.0] * 3]  # fmt: skip


def test_plan_from_blocks_forces_the_first_tokens_and_the_diagonal():
    x = context(T=64, pad=20)
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    mask = plan_from_blocks(x, nothing, 16).block_map
    assert mask[0, 0].int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert torch.equal(forced(x, 16) & readable(x, 16), mask)
