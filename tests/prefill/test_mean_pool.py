"""Mean pooling: rows keep their share, budgets are kept, constant blocks are exact."""

from __future__ import annotations

import pytest
import torch

from longspan.prefill.base import ReadContext, pooled_map, readable
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.oracle import block_mass
from longspan.registry import Refused


def context(T=256, D=16, seed=0) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, h, T, D, generator=draw) for h in (4, 2))
    return ReadContext(q, k, k, 1.0)


def test_each_row_keeps_its_share():
    x = context()
    weights, kept = pooled_map(x, 16), MeanPool(p=0.7, block=16).plan(x).block_map
    assert ((weights * kept).sum(-1) >= 0.7 - 1e-6).all()
    assert kept[..., 0].all() and kept.diagonal(dim1=-2, dim2=-1).all()


def test_budgets():
    x = context()
    counts = MeanPool(k=3, block=16).plan(x).counts
    assert counts.max() <= 5 and counts[..., 4:].min() >= 3  # first block and diagonal come on top
    row = readable(x, 16).sum(-1)
    counts = MeanPool(density=0.25, block=16).plan(x).counts
    assert (counts >= torch.ceil(row * 0.25)).all() and (counts <= torch.ceil(row * 0.25) + 2).all()


def test_pooled_attention_is_exact_where_blocks_are_constant():
    x = context(T=64)
    flat = [t.unflatten(2, (4, 16)).mean(3, keepdim=True).expand(-1, -1, -1, 16, -1).flatten(2, 3) for t in (x.q, x.k)]
    x = ReadContext(*flat, x.v, 1.0)
    # the last row of the last block sees whole blocks only, so its mass is the pooled softmax itself
    logits = x.q[:, :, -1:] @ x.k.repeat_interleave(2, 1).mT
    exact = logits.softmax(-1).unflatten(-1, (4, 16)).sum(-1)[:, :, 0]
    assert torch.allclose(pooled_map(x, 16)[:, :, -1], exact, atol=1e-5)
    assert torch.allclose(block_mass(x, 16)[:, :, :, :1].sum(-1)[:, :, 0], torch.ones(1, 4), atol=1e-5)


def test_refusals():
    for bad in ({"p": 0.0}, {"p": 1.5}, {"density": 0.0}, {"k": 0}, {"block": 0}, {"k": 3, "density": 0.5}):
        with pytest.raises(Refused):
            MeanPool(**bad)
