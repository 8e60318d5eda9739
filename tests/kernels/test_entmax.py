"""α-entmax of rows: the definition against bisection in float64, the C version, thresholds and their brackets, derivatives."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels import entmax as rows
from longspan.kernels import native
from longspan.kernels.entmax import entmax, jacobian_product, threshold
from longspan.registry import Refused

ALPHAS = (1.1, 1.25, 1.4, 1.5, 1.7, 2.0)
HAS_COMPILER = native.supported() and any(map(shutil.which, native.COMPILERS))
BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler"))]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bisected(scores, alpha):
    """An oracle of its own: 200 halvings of [max - 1, max] in float64."""
    z = scores.double() * (alpha - 1)
    low, high = z.amax(-1, keepdim=True) - 1, z.amax(-1, keepdim=True)
    for _ in range(200):
        tau = (low + high) / 2
        above = ((z - tau).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, tau, low), torch.where(above, high, tau)
    return (z - low).clamp(min=0) ** (1 / (alpha - 1))


def generators(n, count, seed=0):
    """The kinds of rows that the bracket is checked on."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, n, generator=g, dtype=torch.float64)
    chi = torch.randn(count, n, 3, generator=g, dtype=torch.float64).square().sum(-1)
    spike = normal.clone()
    spike[:, n // 3] += 30.0
    return {"gaussian 1": normal, "gaussian 3": 3 * normal, "gaussian 10": 10 * normal, "student t3": normal / (chi / 3).sqrt(),
            "spike": spike, "constant": torch.full((count, n), 1.7, dtype=torch.float64)}


# ---------------------------------------------------------------------------------------------------------------- forward


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_equals_bisection_in_float64(alpha, backend):
    for n, size in ((1, 1.0), (5, 3.0), (64, 0.01), (333, 1.0), (1000, 8.0)):
        scores = draw(7, n, seed=n) * size
        want = bisected(scores, alpha)
        got = entmax(scores, alpha, backend=backend)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=0)
        assert float((got.double().sum(-1) - 1).abs().max()) < 1e-5
        if backend == "reference":
            torch.testing.assert_close(entmax(scores.double(), alpha), want, atol=1e-11, rtol=0)


@pytest.mark.parametrize("alpha", [2.5, 4.0])
def test_alpha_above_two(alpha):
    scores = draw(6, 50).double()
    torch.testing.assert_close(entmax(scores, alpha), bisected(scores, alpha), atol=1e-6, rtol=0)
    assert float((entmax(scores.float(), alpha).sum(-1) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers(backend, dtype):
    for n in (3, 70):
        scores = draw(4, n).to(dtype)
        got = entmax(scores, 1.5, backend=backend)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), bisected(scores, 1.5), atol=4e-3, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_zeros_are_exact_and_where_the_threshold_says(alpha, backend):
    scores = draw(20, 200) * 2
    got, found = entmax(scores, alpha, backend=backend), threshold(scores.double(), alpha, tolerance=1e-12)
    x = scores.double() * (alpha - 1) - found.top[:, None] - found.tau[:, None]
    assert not got[x <= -1e-6].any() and bool((got[x > 1e-4] > 0).all()) and bool((x <= -1e-6).any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_shift_permutation_and_duplicates(alpha, backend):
    scores = draw(5, 90) * 2
    p = entmax(scores, alpha, backend=backend)
    torch.testing.assert_close(entmax(scores + 3.25, alpha, backend=backend), p, atol=2e-6, rtol=0)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(entmax(scores[:, order], alpha, backend=backend), p[:, order], atol=1e-6, rtol=0)
    # A doubled key: both copies get the same, the rest is as if its terms counted twice.
    twice = entmax(torch.cat((scores, scores.amax(-1, keepdim=True)), 1), alpha, backend=backend)
    best = scores.argmax(-1, keepdim=True)
    assert torch.equal(twice.gather(1, best), twice[:, -1:])
    alone = entmax(torch.tensor([[2.0, -9.0, 2.0]]), alpha, backend=backend)
    torch.testing.assert_close(alone, torch.tensor([[0.5, 0.0, 0.5]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_known_answers(backend):
    assert entmax(torch.tensor([[3.0]]), 1.5, backend=backend).tolist() == [[1.0]]
    for n in (2, 7, 64, 1000):
        p = entmax(torch.full((1, n), -4.0), 1.5, backend=backend)
        torch.testing.assert_close(p, torch.full((1, n), 1 / n), atol=1e-7, rtol=1e-5)
        tau = threshold(torch.full((1, n), -4.0).double(), 1.5, tolerance=1e-12).tau
        assert float(tau) == pytest.approx(-(n**-0.5), abs=1e-9)
    for gap in (2.0, 2.5, 50.0):  # α = 1.5: z differs by at least 1
        assert entmax(torch.tensor([[gap, 0.0, -1.0]]), 1.5, backend=backend).tolist() == [[1.0, 0.0, 0.0]]
    assert 0 < float(entmax(torch.tensor([[1.9, 0.0]]), 1.5, backend=backend)[0, 1]) < 0.01
    torch.testing.assert_close(entmax(torch.tensor([[0.3, 0.1, -2.0]]), 2.0, backend=backend), torch.tensor([[0.6, 0.4, 0.0]]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_masked_and_broken_rows(alpha, backend):
    scores = draw(4, 40)
    scores[0] = -math.inf
    scores[1, ::2] = -math.inf
    scores[2, 5] = math.nan
    scores[3, 5] = math.inf
    leaf = scores.clone().requires_grad_()
    p = entmax(leaf, alpha, backend=backend)
    assert not p[0].any() and not p[1, ::2].any() and bool(p[2].isnan().all())
    assert bool(p[3].isnan().any())
    torch.testing.assert_close(p[1, 1::2].detach(), entmax(scores[1:2, 1::2], alpha)[0], atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(p[:2].square().sum(), leaf)
    assert not grad[0].any() and not grad[1, ::2].any() and bool(grad[:2].isfinite().all())


def test_near_softmax():
    scores = draw(6, 80) * 2
    torch.testing.assert_close(entmax(scores, 1.001), scores.softmax(-1), atol=1e-2, rtol=0)


def test_empty_rows_and_any_shape():
    assert entmax(torch.zeros(3, 0)).shape == (3, 0) and entmax(torch.zeros(0, 4)).shape == (0, 4)
    scores = draw(2, 3, 4, 30)
    turned = scores.transpose(1, 3)
    assert torch.equal(entmax(turned), entmax(turned.contiguous()))
    assert torch.equal(entmax(scores[0, 0, 0]), entmax(scores)[0, 0, 0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.sampled_from(ALPHAS))
def test_rows_are_distributions(numbers, alpha):
    p = entmax(torch.tensor(numbers), alpha)
    assert bool((p >= 0).all()) and float(p.sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(p.double(), bisected(torch.tensor(numbers), alpha), atol=2e-5, rtol=0)


# -------------------------------------------------------------------------------------------------------------- threshold


@pytest.mark.parametrize("bins", [4, 8])
@pytest.mark.parametrize("n", [1024, 16384])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_histogram_brackets_the_threshold(n, bins, alpha):
    for name, scores in generators(n, 8).items():
        found = threshold(scores, alpha, bins=bins, tolerance=1e-12)
        exact = rows.by_sorting(rows.below_top(scores, alpha)[0], alpha)
        torch.testing.assert_close(found.tau, exact, atol=1e-9, rtol=0, msg=name)
        assert bool((found.low <= exact + 1e-12).all()) and bool((exact <= found.low + 1 / bins + 1e-12).all()), name


def test_a_histogram_of_centres_or_without_its_maximum_fails_the_bracket():
    """What the bracket check is worth."""
    scores = generators(1024, 60)["gaussian 1"]
    x, _ = rows.below_top(scores, 1.5)
    exact, counts = rows.by_sorting(x, 1.5), rows.histogram(x, 8)
    forgotten = counts.clone()
    forgotten[:, -1] += 1  # the maximum, counted at 1, is not taken out of its bin
    low = rows.histogram_root(forgotten, 1.5)
    shifted = rows.histogram_root(counts, 1.5, place=0.5)
    assert bool((low > exact).any()) and bool((shifted > exact).any())
    assert bool((rows.histogram_root(counts, 1.5) <= exact).all())


def test_how_many_steps_a_start_needs():
    cases = generators(1024, 30)
    constant = cases.pop("constant")
    for name, scores in cases.items():
        own = threshold(scores, 1.5).iterations.double()
        middle = threshold(scores, 1.5, start="middle").iterations
        halved = threshold(scores, 1.5, start="middle", steps="bisection").iterations.double()
        assert float(own.mean()) <= 2.1 and int(own.max()) <= 3, name
        assert float(own.mean()) <= float(middle.double().mean()), name
        assert float(halved.mean()) >= 15, name
    assert int(threshold(constant, 1.5).iterations.max()) <= 4


@pytest.mark.parametrize("start", rows.STARTS)
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.25, 1.8, 3.0])
def test_every_start_finds_the_threshold(alpha, start):
    for scores in generators(200, 5).values():
        found = threshold(scores, alpha, start=start, tolerance=1e-11)
        x, _ = rows.below_top(scores, alpha)
        p = (x - found.tau[:, None]).clamp(min=0) ** (1 / (alpha - 1))
        assert float((p.sum(-1) - 1).abs().max()) < (1e-8 if alpha <= 2 else 1e-5)
        assert int(found.iterations.max()) < 60


def test_thresholds_of_rows_without_keys():
    found = threshold(torch.full((2, 5), -math.inf))
    assert found.top.tolist() == [0, 0] and found.iterations.tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------------------- derivative


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.7, 2.0, 2.5])
def test_gradients_in_float64(alpha):
    scores = (draw(3, 12).double() * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: entmax(s, alpha), scores, eps=1e-7, atol=1e-5)
    (grad,) = torch.autograd.grad((entmax(scores, alpha) * draw(3, 12, seed=1)).sum(), scores)
    assert float(grad.sum(-1).abs().max()) < 1e-12


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("n", [1, 16, 45, 5000])
def test_the_c_gradient_is_the_reference(alpha, n):
    scores, grad = (draw(6, n) * 2).requires_grad_(), draw(6, n, seed=2)
    (got,) = torch.autograd.grad(entmax(scores, alpha, backend="cpu"), scores, grad)
    want = jacobian_product(bisected(scores.detach(), alpha), grad.double(), alpha)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
    assert float(got.sum(-1).abs().max()) < 1e-4


# -------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("alpha", [1.0, 0.0, -1.5, math.inf, math.nan, "1.5", True, None])
def test_values_of_alpha_that_are_refused(alpha):
    for call in (entmax, threshold):
        with pytest.raises(Refused, match=r"alpha=.*above 1.*softmax"):
            call(torch.zeros(2, 3), alpha)


def test_bad_input():
    with pytest.raises(ValueError, match="floating-point"):
        entmax(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="floating-point"):
        entmax(torch.tensor(1.0))
    with pytest.raises(ValueError, match="one of reference, cpu"):
        entmax(torch.zeros(3), backend="cuda")
    for scores, alpha in ((torch.zeros(3, dtype=torch.float64), 1.5), (torch.zeros(3), 2.5)):
        with pytest.raises(ValueError, match="use backend 'reference'"):
            entmax(scores, alpha, backend="cpu")
    with pytest.raises(ValueError, match="bins of at least 1"):
        threshold(torch.zeros(2, 3), bins=0)
    with pytest.raises(ValueError, match="'top'"):
        threshold(torch.zeros(2, 3), start="top")
