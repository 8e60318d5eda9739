"""The reverse KL: its values, its gradient, widening in chunks, and what it refuses."""

import math

import pytest
import torch

from longspan.training import Diverged
from longspan.training.divergence import reverse_kl
from longspan.training.peak import PeakMemory


def plain_kl(a, b):
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)



def test_reverse_is_not_forward():
    p, t = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert reverse_kl(p, t).item() == pytest.approx(0.3681, abs=5e-5)
    assert reverse_kl(t, p).item() == pytest.approx(0.5108, abs=5e-5)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_divergence_and_its_gradient_are_the_formulas(chunk):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(7, 11, generator=g, dtype=torch.float64).mul_(3).requires_grad_() for _ in range(2))
    weights = torch.rand(7, generator=g, dtype=torch.float64)
    got = reverse_kl(a, b, chunk)
    torch.testing.assert_close(got, plain_kl(a, b), atol=1e-12, rtol=0)
    assert (got >= 0).all() and got.dtype == torch.float64
    found, none = torch.autograd.grad((got * weights).sum(), (a, b), allow_unused=True)
    want, = torch.autograd.grad((plain_kl(a, b.detach()) * weights).sum(), a)
    assert none is None
    torch.testing.assert_close(found, want, atol=1e-8, rtol=0)
    la, lb = a.log_softmax(-1), b.log_softmax(-1)
    torch.testing.assert_close(found, weights[:, None] * la.exp() * (la - lb - got[:, None]), atol=1e-8, rtol=0)


def test_equal_logits_and_impossible_tokens():
    a = torch.randn(5, 9)
    assert reverse_kl(a, a.clone()).tolist() == [0.0] * 5
    gone = a.clone()
    gone[:, 2] = -math.inf
    gone.requires_grad_()
    losses = reverse_kl(gone, a)
    keep = [v for v in range(9) if v != 2]
    want = torch.tensor([float((p.exp() * (p - q)).sum()) for p, q in zip(
        gone[:, keep].detach().log_softmax(-1), a.log_softmax(-1)[:, keep])])
    torch.testing.assert_close(losses.detach(), want, atol=1e-6, rtol=1e-5)
    losses.sum().backward()
    assert gone.grad.isfinite().all()


def test_half_precision_is_widened_a_chunk_at_a_time():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 50, generator=g).bfloat16() for _ in range(2))
    with PeakMemory() as seen:
        got = reverse_kl(a.requires_grad_(), b, 4)
    assert got.dtype == torch.float32 and seen.largest == 4 * 50 and seen.peak < 8 * 4 * 50 * 4
    torch.testing.assert_close(got, plain_kl(a.float(), b.float()), atol=1e-6, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reverse_kl(a, b, 4), got)


def test_nan_and_shapes():
    bad = torch.zeros(2, 3)
    bad[1, 1] = math.nan
    for pair in ((bad, torch.zeros(2, 3)), (torch.zeros(2, 3), bad)):
        with pytest.raises(Diverged, match="NaN"):
            reverse_kl(*pair)
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 3\)"):
        reverse_kl(torch.zeros(2, 3), torch.zeros(3, 3))
