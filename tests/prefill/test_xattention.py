"""XAttention: the tile identity, exactness at stride 1, and the threshold."""

from __future__ import annotations

import pytest
import torch

from longspan.prefill.base import ReadContext
from longspan.prefill.oracle import block_mass
from longspan.prefill.xattention import XAttention, antidiagonal_scores, grouped
from longspan.registry import Refused


def context(T=256, S=None, D=16, seed=0, valid=None) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, h, n, D, generator=draw) for h, n in ((4, T), (2, S or T)))
    return ReadContext(q, k, k, D**-0.5, valid=valid)


def test_tile_identity():
    """q~_n . k~_m is the sum over the antidiagonal of tile (n, m): sum_s Q[nS+S-1-s] . K[mS+s]."""
    x, s = context(), 4
    tiles = grouped(x.q[:, :2], s, 16, reverse=True) @ grouped(x.k, s, 16).mT
    full = x.q[:, :2] @ x.k.mT
    expected = sum(full[:, :, s - 1 - i :: s, i::s] for i in range(s))
    assert torch.allclose(tiles, expected, atol=1e-4)


@pytest.mark.parametrize(("T", "S"), [(256, 256), (100, 181), (96, 250)])
def test_stride_one_is_the_exact_block_mass(T, S):
    x = context(T, S)
    scores = antidiagonal_scores(x, 1, 16)
    rows = torch.full((-(-T // 16),), 16.0)
    rows[-1] = T - 16 * (len(rows) - 1)
    assert torch.allclose(scores, block_mass(x, 16) * rows[:, None], atol=1e-4)


def test_stride_one_keeps_at_least_the_threshold():
    x = context()
    for threshold in (0.3, 0.6, 0.9):
        kept = XAttention(stride=1, threshold=threshold, block=16).plan(x).block_map
        mass = block_mass(x, 16)
        assert ((mass * kept).sum(-1) >= threshold - 1e-5).all()
        optional = kept.clone()
        optional[..., 0] = False
        optional.diagonal(dim1=-2, dim2=-1).fill_(False)
        least = mass.masked_fill(~optional, torch.inf).min(-1).values  # one block fewer would not do
        assert ((mass * kept).sum(-1) - least < threshold + 1e-5)[optional.any(-1)].all()


def test_scores_are_a_distribution_over_groups():
    scores = antidiagonal_scores(context(), 4, 16)
    assert torch.allclose(scores.sum(-1), torch.tensor(4.0), atol=1e-4)  # four groups of queries in a block
    assert not scores.triu(1).any()


def test_padding_takes_no_share():
    valid = (torch.arange(256) >= 40)[None]
    scores = antidiagonal_scores(context(valid=valid), 4, 16)
    assert not scores[..., :2].any() and torch.isfinite(scores).all()
    assert torch.allclose(scores[:, :, 3:].sum(-1), torch.tensor(4.0), atol=1e-4)
    assert torch.allclose(scores[:, :, 2].sum(-1), torch.tensor(2.0), atol=1e-4)  # tokens 40..47 are two groups


def test_refusals_name_a_stride_that_fits():
    with pytest.raises(Refused, match="the nearest is 8"):
        XAttention(stride=12, block=128)
    for bad in ({"threshold": 0.0}, {"threshold": 1.1}, {"stride": 0}, {"block": 0}):
        with pytest.raises(Refused):
            XAttention(**bad)
