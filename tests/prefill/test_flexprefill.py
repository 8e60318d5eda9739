"""FlexPrefill: the distance, the choice of pattern, and the coverage of both patterns."""

from __future__ import annotations

import math

import pytest
import torch

from longspan.prefill.base import ReadContext, diagonal_sums, in_blocks, last_rows_attention, pooled_map
from longspan.prefill.flexprefill import FlexPrefill, js_distance, pattern_distance, query_aware_blocks
from longspan.registry import Refused


def context(T=320, D=16, seed=0, spread=1.0) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, h, T, D, generator=draw) * spread for h in (4, 2))
    return ReadContext(q, k, k, D**-0.5)


def test_distance_is_a_bounded_symmetric_metric():
    a, b = torch.rand(2, 50, 9, generator=torch.Generator().manual_seed(0)) ** 4
    a[:, :3] = 0.0
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    distance = js_distance(a, b)
    assert torch.isfinite(distance).all() and (distance > 0).all() and (distance < math.sqrt(math.log(2))).all()
    assert torch.allclose(distance, js_distance(b, a), atol=1e-6)
    assert js_distance(a, a).max() < 1e-3
    apart = js_distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert math.isclose(float(apart), math.sqrt(math.log(2)), rel_tol=1e-6)


def test_trusted_heads_are_those_whose_blocks_are_flat():
    x = context(spread=3.0)
    x.q[:, :2] = 1.0  # key head 0: constant queries, keys constant per block, so block means are exact
    x.k[:, 0] = in_blocks(x.k[:, 0].mT, 16).mean(-1, keepdim=True).expand(-1, -1, -1, 16).flatten(-2).mT
    distance = pattern_distance(x, last_rows_attention(x, 16), 16)
    assert (distance[0, :2] < 0.1).all() and (distance[0, 2:] > 0.1).all()


def test_query_aware_rows_hold_gamma_of_the_whole_map():
    weights = pooled_map(context(spread=2.0), 16)
    for gamma in (0.3, 0.9):
        kept = query_aware_blocks(weights, gamma)
        mass = (weights * kept).sum((-1, -2))
        n = weights.shape[-2]
        assert (mass >= gamma * n - 1e-4).all()
        least = weights.masked_fill(~kept, torch.inf).amin((-1, -2))
        assert (mass - least < gamma * n + 1e-4).all()
    plan = FlexPrefill(tau=1.0, gamma=0.9, block=16, min_budget=1).plan(context(spread=2.0))
    assert ((plan.block_map & query_aware_blocks(weights, 0.9)) == query_aware_blocks(weights, 0.9)).all()


def test_vertical_slash_heads_get_the_blocks_gamma_needs():
    x = context(spread=2.0)
    x.k[0, 0, 100] = x.q[0, 0].mean(0) * 0 + 6.0
    x.q[0, 0] = x.q[0, 0].abs() + 1.0  # head 0 looks at key 100 alone
    kept = FlexPrefill(tau=0.0, gamma=0.9, block=16, min_budget=1).plan(x).block_map[0]
    columns = last_rows_attention(x, 16).sum(-2)[0]
    assert kept[0, 7:, 100 // 16].all()
    for h in range(4):
        ranked = columns[h].sort(descending=True).values
        needed = int((ranked.cumsum(0) < 0.9 * ranked.sum()).sum()) + 1
        best = in_blocks(columns[h], 16).sum(-1).topk(needed // 16 + 1).indices
        assert kept[h, -1, best].all()
    assert kept[:, :, 0].all() and kept.diagonal(dim1=-2, dim2=-1).all()


def test_block_diagonals_are_those_of_the_largest_sums():
    x = context()
    kept = FlexPrefill(tau=0.0, gamma=0.01, block=16, min_budget=1).plan(x).block_map[0]
    offsets = in_blocks(diagonal_sums(last_rows_attention(x, 16)), 16).sum(-1)[0]
    for h in range(4):
        best = int(offsets[h].argmax())
        assert kept[h].diagonal(-best).all()


def test_min_budget():
    x = context()
    little, more = (FlexPrefill(tau=0.0, gamma=0.01, block=16, min_budget=m).plan(x).density for m in (16, 96))
    assert little < more
    assert FlexPrefill(block=16, min_budget=320).plan(x).density == 1.0  # no longer than the least budget: dense


def test_refusals():
    for bad in ({"gamma": 0.0}, {"gamma": 1.2}, {"tau": -0.1}, {"min_budget": 0}, {"block": 0}):
        with pytest.raises(Refused):
            FlexPrefill(**bad)
