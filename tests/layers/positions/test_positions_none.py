"""No positions: places are reported, nothing is done with them."""

import torch

from longspan.layers import Context
from longspan.layers.positions.none import NoPositions


def test_neither_rotation_nor_bias():
    module, ctx = NoPositions().build(8, 4, 2, 2, 0, 1), Context.of(1, 3)
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 3, 2)
    places = module.places(torch.zeros(1, 3, 8), ctx)
    assert torch.equal(places, ctx.positions) and module.bias(places, places) is None
    assert all(a is b for a, b in zip(module.rotate(q, k, places), (q, k)))
    assert module.hooks == NoPositions.hooks == frozenset()
