"""The short convolution against its sum, and its start at nothing."""

import torch

from longspan.layers import Context
from longspan.layers.sidepaths.short_conv import ShortConv


def test_equals_the_sum_over_taps():
    module = ShortConv(kernel=3).build(4, 1, 1, 4, 0, 1)
    module.weight.data = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    y, state = module(x, Context.of(2, 6))
    for t in range(6):
        want = sum(module.weight[:, u] * x[:, t - u] for u in range(3) if t - u >= 0)
        torch.testing.assert_close(y[:, t], want)
    assert torch.equal(state.inputs, x[:, 4:])
    assert module(x[:1], Context.of(1, 6))[1].nbytes == 2 * 4 * 4


def test_starts_at_nothing_with_a_live_gradient():
    module = ShortConv().build(4, 1, 1, 4, 0, 1)
    y, _ = module(torch.randn(1, 5, 4), Context.of(1, 5))
    assert not y.any()
    y.sum().backward()
    assert (module.weight.grad != 0).all()


def test_padding_without_end_forgets_nothing():
    module = ShortConv(kernel=3).build(4, 1, 1, 4, 0, 1)
    module.weight.data.fill_(1.0)
    x = torch.randn(1, 2, 4)
    ctx = Context.of(1, 2)
    _, state = module(x, ctx)
    for _ in range(5):
        ctx = Context.of(1, 1, valid=torch.tensor([[False]]), before=ctx.after)
        y, state = module(torch.full((1, 1, 4), 9.0), ctx, state)
        assert not y.any()
    assert torch.equal(state.inputs, x)
