"""The C versions of a decode step's modules against PyTorch's, on random sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels import linear as module
from longspan.kernels.linear import gated_mlp, linear, rms_norm

SIZES = {"rows": st.integers(1, 20), "inputs": st.sampled_from([32, 64, 96, 576]), "outputs": st.integers(1, 70),
         "seed": st.integers(0, 99)}


def draw(*shape, seed, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def close(found, wanted, roundings=1):
    """Within some roundings of bfloat16 (of the largest number) of the float32 value."""
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=roundings * 2**-8 * float(wanted.abs().max()))


@settings(max_examples=60, deadline=None)
@given(**SIZES, bias=st.booleans(), lead=st.booleans())
def test_linear(rows, inputs, outputs, seed, bias, lead):
    x = draw(rows, 1, inputs, seed=seed) if lead else draw(rows, inputs, seed=seed)
    w, b = draw(outputs, inputs, seed=seed + 1), draw(outputs, seed=seed + 2) if bias else None
    with torch.no_grad():
        found = linear(x, w, b)
    assert found.shape == (*x.shape[:-1], outputs)
    close(found, F.linear(x.float(), w.float(), None if b is None else b.float()))


@settings(max_examples=40, deadline=None)
@given(rows=SIZES["rows"], inputs=SIZES["inputs"], inner=st.sampled_from([32, 96, 160]), seed=SIZES["seed"])
def test_gated_mlp(rows, inputs, inner, seed):
    x = draw(rows, inputs, seed=seed)
    gate, up = (draw(inner, inputs, seed=seed + n, scale=inputs**-0.5) for n in (1, 2))
    down = draw(inputs, inner, seed=seed + 3, scale=inner**-0.5)
    with torch.no_grad():
        found = gated_mlp(x, gate, up, down)
    wide = [t.float() for t in (x, gate, up, down)]
    close(found, gated_mlp(*wide), roundings=4)


@settings(max_examples=40, deadline=None)
@given(rows=SIZES["rows"], width=SIZES["inputs"], seed=SIZES["seed"], eps=st.sampled_from([1e-6, 0.1]))
def test_rms_norm(rows, width, seed, eps):
    x, w = draw(2, rows, width, seed=seed)[:1], draw(width, seed=seed + 1)
    with torch.no_grad():
        found = rms_norm(x, w, eps)
    assert found.shape == x.shape
    close(found, rms_norm(x.float(), w.float(), eps))


def test_slices_of_larger_tensors():
    x, w = draw(4, 96, seed=0)[:, 32:64], draw(40, 96, seed=1)[:, :32]
    with torch.no_grad():
        close(linear(x, w), F.linear(x.float(), w.float()))
        close(rms_norm(x, draw(32, seed=2), 1e-5), rms_norm(x.float(), draw(32, seed=2).float(), 1e-5))


def test_nan_stays_nan():
    x, w = draw(2, 32, seed=0), draw(5, 32, seed=1)
    x[1, 3] = torch.nan
    with torch.no_grad():
        assert linear(x, w)[1].isnan().all() and not linear(x, w)[0].isnan().any()
        assert rms_norm(x, w[0], 1e-5)[1].isnan().all()


def test_gradients_take_pytorchs_way():
    x, w = draw(2, 32, seed=0).requires_grad_(), draw(5, 32, seed=1)
    linear(x, w).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("change", [lambda x: x.float(), lambda x: x.half(), lambda x: x.expand(40, -1)])
def test_what_the_kernel_does_not_take_goes_to_pytorch(change, monkeypatch):
    monkeypatch.setattr(module, "_kernel", lambda name: pytest.fail("the kernel was asked for"))
    x = change(draw(1, 32, seed=0))
    w = draw(5, 32, seed=1).to(x.dtype)
    with torch.no_grad():
        assert torch.equal(linear(x, w), F.linear(x, w))
