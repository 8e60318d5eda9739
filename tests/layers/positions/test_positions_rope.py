"""Rotation: the exact checks of RoPE, for whole and real places, shared and per head."""

import math

import pytest
import torch

from longspan.layers import Context, inverse_frequencies, rotate
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(x, z, theta=10_000.0):
    """One vector, from the definition with pairs (r, r + d/2)."""
    d, out = len(x), [0.0] * len(x)
    for r in range(d // 2):
        angle = float(z) * theta ** (-2 * r / d)
        a, b = float(x[r]), float(x[r + d // 2])
        out[r], out[r + d // 2] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return torch.tensor(out)


def test_half_split_pairs_by_hand():
    x, places = draw(1, 1, 4, 6), torch.tensor([0.0, 1.0, 2.5, -7.0])
    got = rotate(x, places, inverse_frequencies(6))
    for t in range(4):
        torch.testing.assert_close(got[0, 0, t], by_hand(x[0, 0, t], places[t]))


def test_norm_is_kept_and_place_zero_changes_nothing():
    x = draw(2, 3, 5, 8)
    got = rotate(x, torch.arange(5) * 1000, inverse_frequencies(8))
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(got[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("shift", [1, 977, 9_000])
def test_scores_depend_on_differences_only(shift):
    q, k, f = draw(1, 2, 6, 16), draw(1, 2, 6, 16, seed=1), inverse_frequencies(16)
    places = torch.arange(6)
    base = rotate(q, places, f) @ rotate(k, places, f).mT
    moved = rotate(q, places + shift, f) @ rotate(k, places + shift, f).mT
    torch.testing.assert_close(moved, base, atol=1e-5, rtol=1e-5)


def test_whole_places_stay_exact_far_out():
    q, f = draw(1, 1, 1, 16), inverse_frequencies(16)
    far = torch.tensor([10_000_003])
    exact = rotate(q.double(), far, f)
    torch.testing.assert_close(rotate(q, far, f).double(), exact, atol=1e-6, rtol=0)


def test_places_of_every_rank_and_kind_agree():
    x, f = draw(2, 3, 5, 8), inverse_frequencies(8)
    places = torch.arange(5)
    want = rotate(x, places, f)
    for z in (places.float(), places.expand(2, 5), places.repeat(2, 1), places.expand(2, 3, 5).double()):
        torch.testing.assert_close(rotate(x, z, f), want, atol=1e-6, rtol=1e-6)
    own = draw(2, 3, 5) * 10
    got = rotate(x, own, f)
    torch.testing.assert_close(got[1, 2, 3], by_hand(x[1, 2, 3], own[1, 2, 3]), atol=1e-5, rtol=1e-5)


def test_real_places_are_differentiable():
    x, f = draw(1, 1, 3, 4).double(), inverse_frequencies(4)
    z = draw(1, 1, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: rotate(x, z, f), (z,))


def test_fewer_frequencies_rotate_fewer_channels():
    x = draw(1, 1, 3, 10)
    got = rotate(x, torch.arange(3), inverse_frequencies(4))
    assert torch.equal(got[..., 4:], x[..., 4:])
    torch.testing.assert_close(got[..., :4], rotate(x[..., :4], torch.arange(3), inverse_frequencies(4)))


def test_scale_multiplies_what_is_rotated():
    x, f = draw(1, 1, 3, 4), inverse_frequencies(4)
    torch.testing.assert_close(rotate(x, torch.arange(3), f, scale=1.5), 1.5 * rotate(x, torch.arange(3), f))


def test_low_precision_comes_back_in_its_dtype_with_exact_angles():
    x = draw(1, 1, 2, 8).bfloat16()
    places = torch.tensor([5, 40_001])
    got = rotate(x, places, inverse_frequencies(8))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, rotate(x.float(), places, inverse_frequencies(8)).bfloat16())


def test_module_shares_places_within_a_query_group():
    module = Rope(theta=100.0).build(8, 4, 2, 6, 0, 1)
    q, k, places = draw(1, 4, 3, 6), draw(1, 2, 3, 6, seed=1), draw(1, 2, 3, seed=2)
    turned_q, turned_k = module.rotate(q, k, places)
    f = inverse_frequencies(6, 100.0)
    torch.testing.assert_close(turned_q[:, 3:], rotate(q[:, 3:], places[:, 1:], f))
    torch.testing.assert_close(turned_k, rotate(k, places, f))
    ctx = Context.of(1, 3)
    assert torch.equal(module.places(draw(1, 3, 8), ctx), ctx.positions) and not list(module.parameters())


def test_half_precision_models_keep_their_frequencies():
    module = Rope().build(8, 2, 2, 8, 0, 1)
    q = draw(1, 2, 3, 8)
    want = module.rotate(q, q, torch.tensor([[0, 7, 40_001]]))[0]
    assert torch.equal(module.bfloat16().rotate(q, q, torch.tensor([[0, 7, 40_001]]))[0], want)


def test_refusals():
    with pytest.raises(Refused, match="head dimension 7 is odd"):
        Rope().build(8, 2, 2, 7, 0, 1)
    with pytest.raises(ValueError, match="places"):
        rotate(draw(1, 1, 3, 4), torch.arange(4), inverse_frequencies(4))
    with pytest.raises(ValueError, match="D>=8"):
        rotate(draw(1, 1, 3, 4), torch.arange(3), inverse_frequencies(8))
