"""Vertical-slash: planted columns and diagonals are found, forced ones are read, budgets are kept."""

from __future__ import annotations

import pytest
import torch

from longspan.prefill.base import ReadContext
from longspan.prefill.vertical_slash import VerticalSlash, blocks_of_offsets, vertical_slash_scores
from longspan.registry import Refused


def context(T=600, seed=0, **kwargs) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, h, T, 32, generator=draw) * 0.1 for h in (2, 1))
    return ReadContext(q, k, k, 1.0, **kwargs)


def test_scores_sum_to_the_number_of_queries():
    for x in (context(), context(valid=(torch.arange(600) >= 100)[None])):
        columns, offsets = vertical_slash_scores(x, 64)
        assert torch.allclose(columns.sum(-1), torch.tensor(64.0), atol=1e-3)
        assert torch.allclose(offsets.sum(-1), torch.tensor(64.0), atol=1e-3)
    columns, _ = vertical_slash_scores(context(T=40), 64)  # fewer queries than asked for: all of them
    assert torch.allclose(columns.sum(-1), torch.tensor(40.0), atol=1e-3)


def test_a_planted_column_is_kept():
    x = context()
    x.q[0, 1, :, 0] = 5.0  # head 1 only
    x.k[0, 0, 217, 0] = 5.0
    columns = VerticalSlash(vertical=31, slash=100, block=16).plan(x).column_map
    assert columns[0, 1, 0, 217] and columns[0, :, 0, :30].all()
    assert columns.sum(-1).unique().tolist() == [31]


def test_a_planted_diagonal_is_kept():
    x, offset = context(), 333
    turn = torch.arange(600)[:, None] * torch.linspace(0.1, 2.0, 16)
    x.k[0, 0] = torch.cat((turn.cos(), turn.sin()), -1)
    x.q[0] = 2 * torch.cat(((turn - offset * turn[1]).cos(), (turn - offset * turn[1]).sin()), -1)
    mask = VerticalSlash(vertical=30, slash=101, block=16).plan(x).token_mask()[0]
    rows = torch.arange(offset, 600)
    assert mask[:, rows, rows - offset].all()
    assert mask[:, torch.arange(99, 600)[:, None], torch.arange(99, 600)[:, None] - torch.arange(100)].all()


@pytest.mark.parametrize(("T", "S"), [(64, 64), (40, 70)])
def test_blocks_of_offsets_are_those_a_diagonal_crosses(T, S):
    offsets = torch.rand(1, 3, S, generator=torch.Generator().manual_seed(0)) < 0.05
    found = blocks_of_offsets(offsets, T, 8)
    rows = S - T + torch.arange(T)
    pairs = rows[:, None] - torch.arange(S)
    tokens = offsets[..., pairs.clamp(min=0)] & (pairs >= 0)
    for u in range(found.shape[2]):
        for v in range(found.shape[3]):
            crossed = tokens[0, :, u * 8 : (u + 1) * 8, v * 8 : (v + 1) * 8].any((-1, -2))
            assert torch.equal(found[0, :, u, v], crossed), (u, v)


def test_budgets_scale_with_the_length():
    assert VerticalSlash().budgets(131_072) == (1000, 6096)
    assert VerticalSlash().budgets(8192) == (62, 381)
    assert VerticalSlash().budgets(1024) == (30, 50)
    assert VerticalSlash(vertical=5, slash=7).budgets(2000) == (30, 50)
    assert VerticalSlash(vertical=5000, slash=7000).budgets(2000) == (2000, 2000)
    with pytest.raises(Refused):
        VerticalSlash(last_q=0)
    with pytest.raises(Refused):
        VerticalSlash(vertical=0)


def test_padding_is_no_column():
    plan = VerticalSlash(block=16).plan(context(valid=(torch.arange(600) >= 100)[None]))
    assert not plan.column_map[..., :100].any() and plan.column_map[..., 100:130].all()
