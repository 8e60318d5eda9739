"""The two halves of attention, apart, against the definition and against autograd."""

from __future__ import annotations

import pytest
import torch

from longspan.kernels.attend import attend_reference
from longspan.parallel import engine
from longspan.parallel.engine import WholeSequence, attention_backward, attention_forward, backward_reference


def tensors(q_len=13, k_len=13, dtype=torch.float64, heads=4, kv_heads=2):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, t, 6, generator=draw, dtype=torch.float64).to(dtype)
            for n, t in ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len), (heads, q_len))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", [attention_backward, backward_reference])
def test_backward_is_that_of_autograd(causal, function, monkeypatch):
    monkeypatch.setattr(engine, "PLAIN_SCORES", 4 * 2 * 13 * 5)  # chunks of five rows
    q, k, v, dout = (t.requires_grad_() for t in tensors())
    wanted = torch.autograd.grad(attend_reference(q, k, v, causal=causal)[0], (q, k, v), dout)
    q, k, v, dout = (t.detach() for t in (q, k, v, dout))
    out, lse = attention_forward(q, k, v, causal)
    found = function(dout, q, k, v, out, lse, causal)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", [attention_backward, backward_reference])
def test_parts_of_the_keys_add_up_to_the_whole(function):
    q, k, v, dout = tensors(5, 14)
    out, lse = attention_forward(q, k, v, False)
    whole = function(dout, q, k, v, out, lse, False)
    parts = [function(dout, q, k[:, :, a:b], v[:, :, a:b], out, lse, False) for a, b in ((0, 4), (4, 14))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=0, atol=1e-12)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat((parts[0][i], parts[1][i]), 2), whole[i], rtol=0, atol=1e-12)


def test_statistics_stay_in_float32():
    q, k, v, dout = tensors(dtype=torch.bfloat16)
    out, lse = attention_forward(q, k, v, True)
    assert lse.dtype == torch.float32 and out.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"must be torch\.float32, got torch\.bfloat16"):
        attention_backward(dout, q, k, v, out, lse.bfloat16(), True)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attention_backward(dout[:, :, :5], q[:, :, :5], k, v, out[:, :, :5], lse[:, :, :5], True)


def test_documents_are_read_apart():
    q, k, v, dout = tensors()
    cut = WholeSequence(True, (4, 13))
    out, lse = cut.forward(q, k, v)
    grads = cut.backward(dout, q, k, v, out, lse)
    alone = attention_forward(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], True)
    torch.testing.assert_close((out[:, :, 4:], lse[:, :, 4:]), alone, rtol=0, atol=1e-12)
    tail = attention_backward(dout[:, :, 4:], *(t[:, :, 4:] for t in (q, k, v)), *alone, True)
    for a, b in zip(grads, tail, strict=True):
        torch.testing.assert_close(a[:, :, 4:], b, rtol=0, atol=1e-12)
