"""ALiBi: slopes for any number of heads, and the key-only form that gives the same attention."""

import pytest
import torch

from longspan.layers import Context, slopes
from longspan.layers.positions.alibi import Alibi


def test_slopes_of_a_power_of_two():
    torch.testing.assert_close(slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert slopes(1).tolist() == [2.0**-8]


def test_slopes_of_other_numbers_take_every_second_of_the_next():
    torch.testing.assert_close(slopes(3), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))
    got = slopes(12)
    assert torch.equal(got[:8], slopes(8)) and torch.equal(got[8:], slopes(16)[[0, 2, 4, 6]])


def test_slopes_need_a_head():
    with pytest.raises(ValueError, match="at least one head"):
        slopes(0)


def test_bias_is_minus_slope_times_distance():
    module = Alibi().build(8, 4, 2, 2, 0, 1)
    bias = module.bias(torch.tensor([[3, 4]]), torch.tensor([[0, 1, 2, 3, 4]]))
    assert bias.shape == (1, 4, 2, 5)
    torch.testing.assert_close(bias[0, 2, 1], -slopes(4)[2] * torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]))


def test_rows_that_share_their_places_share_the_bias():
    module, ctx = Alibi().build(8, 4, 2, 2, 0, 1), Context.of(5, 3)
    assert module.bias(ctx.positions, ctx.positions).shape == (1, 4, 3, 3)


def test_places_of_key_heads_serve_their_group():
    module, places = Alibi().build(8, 4, 2, 2, 0, 1), torch.tensor([[[0.0, 1.5], [0.0, 3.0]]])
    bias = module.bias(places, places)
    m = slopes(4)
    torch.testing.assert_close(bias[0, :, 1, 0], -torch.stack((m[0] * 1.5, m[1] * 1.5, m[2] * 3, m[3] * 3)))


def test_adding_to_keys_alone_is_the_same_attention():
    places, scores = torch.arange(6)[None], torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    bias = Alibi().build(8, 4, 2, 2, 0, 1).bias(places, places)
    causal = torch.ones(6, 6).tril().log()
    keys_only = scores + slopes(4)[:, None, None] * places.float()
    torch.testing.assert_close((scores + bias + causal).softmax(-1), (keys_only + causal).softmax(-1))
