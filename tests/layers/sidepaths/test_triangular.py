"""The triangular filter against its taps, its frequency response and its limits, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F

from longspan.layers.sidepaths.triangular import bandwidth, box, newest_tri_box, taps, tri_box
from longspan.registry import Refused


def noise(time=40, dim=3, batch=2, dtype=torch.float32, seed=0):
    return torch.randn(batch, time, dim, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def convolved(x, kernel):
    """The causal convolution of every channel, computed in float64."""
    channels = x.double().transpose(1, 2)
    weight = kernel.double().flip(0).expand(channels.shape[1], 1, -1)
    return F.conv1d(F.pad(channels, (len(kernel) - 1, 0)), weight, groups=channels.shape[1]).transpose(1, 2)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 17, 64, 65, 1025, 4097, 10_000])
def test_equals_convolution_with_the_taps(window):
    x = noise(4096, 2, 1)
    kernel = taps(window, torch.float64)
    torch.testing.assert_close(tri_box(x, window).double(), convolved(x, kernel[:4096]), atol=1e-6, rtol=0)
    torch.testing.assert_close(newest_tri_box(x, window), tri_box(x, window)[:, -1:], atol=1e-6, rtol=0)


def test_a_mean_that_grows_loses_no_digits():
    """A difference of two prefix sums in float32 would be wrong by more than 1e-3 here."""
    x = noise(50_000, 1, 1) + 1000.0
    want = convolved(x, taps(2, torch.float64))
    torch.testing.assert_close(tri_box(x, 2).double(), want, atol=2e-4, rtol=0)


def test_impulse_response_is_the_taps_which_sum_to_one():
    for window in (2, 5, 33):
        impulse = torch.zeros(1, 100, 1, dtype=torch.float64)
        impulse[0, 0] = 1.0
        kernel = taps(window, torch.float64)
        found = tri_box(impulse, window)[0, :, 0]
        torch.testing.assert_close(found[: len(kernel)], kernel, atol=1e-15, rtol=0)
        assert not found[len(kernel) :].any() and len(kernel) == 2 * (window - 1) + 1
        assert kernel.sum().item() == pytest.approx(1.0) and kernel.argmax().item() == window - 1
        assert kernel.max().item() == pytest.approx(1 / window)
        assert (kernel * torch.arange(len(kernel))).sum().item() == pytest.approx(window - 1)


def test_frequency_response():
    for window in (3, 9, 17):
        kernel, w = taps(window, torch.float64), torch.linspace(0.01, math.pi, 50, dtype=torch.float64)
        waves = torch.exp(-1j * w[:, None] * torch.arange(len(kernel)))
        want = (torch.sin(window * w / 2) / (window * torch.sin(w / 2))).square()
        torch.testing.assert_close((waves * kernel).sum(-1).abs(), want, atol=1e-12, rtol=0)


def test_constant_input():
    window, c = 9, 3.0
    y = tri_box(torch.full((1, 40, 1), c), window)[0, :, 0]
    torch.testing.assert_close(y[2 * window - 2 :], torch.full((40 - 2 * window + 2,), c))
    t = torch.arange(window, dtype=torch.float32)
    torch.testing.assert_close(y[:window], c * (t + 1) * (t + 2) / (2 * window**2))


def test_the_divisor_is_the_window_also_at_the_start():
    x = noise(1)
    assert torch.equal(box(x, 4), x / 4) and torch.equal(tri_box(x, 2), x / 4)
    assert torch.equal(tri_box(x, 1), x)


@pytest.mark.parametrize("window", [2, 5, 33, 100])
def test_earlier_outputs_are_bit_identical(window):
    x = noise()
    y = tri_box(x, window)
    x[:, 17] += 5.0
    assert torch.equal(tri_box(x, window)[:, :17], y[:, :17]) and not torch.equal(tri_box(x, window)[:, 17], y[:, 17])


@pytest.mark.parametrize("window", [2, 3, 9, 33, 300])
def test_never_expands(window):
    for x in (noise(), torch.ones(1, 40, 2), noise().cumsum(1)):
        assert tri_box(x, window).norm() <= x.norm() * (1 + 1e-6)


@pytest.mark.parametrize("window", [2, 3, 9, 100])
def test_documents_are_as_if_alone(window):
    """Also when another one holds what is no number."""
    x, first = noise(batch=1), torch.tensor([[0] * 11 + [11] * 20 + [31] * 9])
    x[:, 11:31] = float("nan")
    y = tri_box(x, window, first)
    for a, b in ((0, 11), (31, 40)):
        torch.testing.assert_close(y[:, a:b], tri_box(x[:, a:b], window))


def test_low_precision_is_filtered_in_float32():
    x = (noise(65_536, 1, 1) + 4.0).bfloat16()
    y = tri_box(x, 1025)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, tri_box(x.double(), 1025).float(), atol=1e-5, rtol=0)


def test_bandwidths_double_up_to_the_length():
    assert [bandwidth(layer, 20) for layer in range(7)] == [1, 2, 4, 8, 16, 20, 20]
    assert bandwidth(0, 1) == 1 and bandwidth(500, 8192) == 8192


def test_refused():
    for shape in ((4,), (3, 4), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"takes hidden states \(B,T,C\), got"):
            tri_box(torch.zeros(shape), 2)
    for window in (0, -3):
        with pytest.raises(Refused, match=f"W={window}: expected a window of at least 1 token"):
            tri_box(torch.zeros(1, 2, 3), window)
    for length in (-5, 0, float("nan"), 2.0, True):
        with pytest.raises(Refused, match=r"L_ctx=.*: expected a whole number of at least 1"):
            bandwidth(3, length)
