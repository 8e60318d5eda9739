"""The oracle: its block mass is the true one, and nothing of its size holds more."""

from __future__ import annotations

import pytest
import torch

from longspan.prefill.base import ReadContext, keep_top_k
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.oracle import OracleTopP, block_mass
from longspan.registry import Refused


def context(T=150, S=200, valid=None) -> ReadContext:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, h, n, 16, generator=draw) * 2 for h, n in ((4, T), (2, S)))
    return ReadContext(q, k, k, 0.25, valid=valid)


@pytest.mark.parametrize("padded", [False, True])
def test_block_mass_is_attention_summed(padded):
    valid = torch.ones(2, 200, dtype=torch.bool)
    if padded:
        valid[1, :60] = False
    x = context(valid=valid if padded else None)
    logits = x.q @ x.k.repeat_interleave(2, 1).mT * x.scale
    see = (torch.arange(200) <= (50 + torch.arange(150))[:, None]) & valid[:, None, None]
    weights = torch.nan_to_num(logits.masked_fill(~see, -torch.inf).softmax(-1))
    mass = block_mass(x, 16)
    for u, v in ((0, 0), (3, 4), (9, 12), (9, 3)):
        rows = slice(u * 16, min((u + 1) * 16, 150))
        asked = valid[:, 50:][:, rows].sum(-1).clamp(min=1)[:, None]
        expected = weights[:, :, rows, v * 16 : (v + 1) * 16].sum((-1, -2)) / asked
        assert torch.allclose(mass[:, :, u, v], expected, atol=1e-5)


def test_it_keeps_p_and_the_plan_recalls_it():
    x = context()
    plan = OracleTopP(p=0.8, block=16).plan(x)
    assert ((block_mass(x, 16) * plan.block_map).sum(-1) >= 0.8 - 1e-5).all()
    assert (plan.recall(x.q, x.k, scale=x.scale) >= 0.8 - 1e-5).all()


def test_no_choice_of_the_same_size_holds_more():
    x = context()
    mass = block_mass(x, 16)
    other = MeanPool(p=0.6, block=16).plan(x).block_map
    best = keep_top_k(mass, other.sum(-1))
    assert ((mass * best).sum(-1) >= (mass * other).sum(-1) - 1e-6).all()


def test_refusals():
    for bad in ({"p": 0.0}, {"p": 2.0}, {"block": 0}):
        with pytest.raises(Refused):
            OracleTopP(**bad)
