"""Diagnostics of collapse on matrices whose values are known."""

import math

import pytest
import torch

from longspan.evaluation.representations import anisotropy, propagation, singular_values, spectral_flatness, stable_rank


def with_spectrum(values, rows=40, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rows, dim, generator=g, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64))
    return u * torch.tensor(values, dtype=torch.float64) @ v


def test_of_known_singular_values():
    values = [4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    x = with_spectrum(values).view(4, 10, 8)
    torch.testing.assert_close(singular_values(x), torch.tensor(values, dtype=torch.float64))
    assert stable_rank(x) == pytest.approx(sum(v * v for v in values) / 16)
    assert spectral_flatness(x) == pytest.approx(math.prod(values) ** (1 / 8) / (sum(values) / 8))


def test_extremes():
    same, equal = torch.ones(30, 8), with_spectrum([3.0] * 8)
    assert stable_rank(same) == pytest.approx(1.0, abs=1e-5) and anisotropy(same) == pytest.approx(1.0, abs=1e-5)
    assert stable_rank(equal) == pytest.approx(8.0) and spectral_flatness(equal) == pytest.approx(1.0)
    assert stable_rank(torch.zeros(3, 4)) == spectral_flatness(torch.zeros(3, 4)) == 0.0
    assert anisotropy(torch.eye(2)) == 0.0 and anisotropy(torch.tensor([[1.0], [-2.0]])) == pytest.approx(-1.0)


def test_anisotropy_is_the_mean_cosine_of_different_tokens():
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)) + 0.5
    unit = torch.nn.functional.normalize(x.flatten(0, 1), dim=-1)
    cosines = unit @ unit.T
    assert anisotropy(x) == pytest.approx(((cosines.sum() - 21) / (21 * 20)).item(), abs=1e-5)
    many = torch.randn(3000, 4, generator=torch.Generator().manual_seed(1)) + 1.0
    assert anisotropy(many) == anisotropy(many) != anisotropy(many, seed=1)
    assert anisotropy(many) == pytest.approx(anisotropy(many[:1000]), abs=0.05)
    with pytest.raises(ValueError, match="at least two"):
        anisotropy(torch.ones(1, 4))


def test_propagation_leaves_out_tokens_that_hardly_changed():
    x = torch.zeros(1, 3, 2)
    moved = torch.tensor([[[3e-3, 4e-3], [0.0, 1e-7], [0.0, 1e-2]]])
    found = torch.tensor([[[1e-2, 0.0], [5.0, 5.0], [0.0, 1e-2]]])
    assert propagation(x, moved, x, found) == pytest.approx((2.0 + 1.0) / 2)
    assert math.isnan(propagation(x, x, x, found))
