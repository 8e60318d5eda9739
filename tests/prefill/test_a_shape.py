"""A-shape: the first tokens and a window, at block resolution."""

from __future__ import annotations

import pytest
import torch

from longspan.prefill.a_shape import AShape
from longspan.prefill.base import ReadContext
from longspan.registry import Refused


def empty(T: int, S: int) -> ReadContext:
    return ReadContext(torch.zeros(1, 2, T, 4), torch.zeros(1, 1, S, 4), torch.zeros(1, 1, S, 4), 0.5)


@pytest.mark.parametrize(("T", "S"), [(100, 100), (60, 101)])
def test_it_is_the_smallest_block_plan_with_sink_and_window(T, S):
    plan = AShape(sink=10, window=13, block=8).plan(empty(T, S))
    rows, keys = (S - T + torch.arange(T))[:, None], torch.arange(S)
    asked = ((keys < 10) | (rows - keys < 13)) & (keys <= rows)
    read = plan.token_mask()[0, 0]
    assert read[asked].all()
    for u in range(-(-T // 8)):  # every listed block holds a pair asked for
        for v in plan.block_map[0, 0, u].nonzero()[:, 0].tolist():
            assert asked[u * 8 : (u + 1) * 8, v * 8 : (v + 1) * 8].any()


def test_knobs():
    assert AShape(sink=0, window=1, block=8).plan(empty(64, 64)).counts.tolist() == [[[1] * 8]]
    assert {"block-plan", "content-free"} <= set(AShape.card.capabilities)
    for bad in ({"window": 0}, {"sink": -1}, {"block": 0}):
        with pytest.raises(Refused):
            AShape(**bad)
