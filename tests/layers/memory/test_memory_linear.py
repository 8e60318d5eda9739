"""Linear attention: loop, quadratic and chunked forms agree in outputs and gradients; it recalls and fades."""

import pytest
import torch

from longspan.layers import Context
from longspan.layers.memory.linear import LinearAttention, linear_chunked, linear_loop, linear_quadratic
from longspan.registry import Refused

B, H, G, T, M, E = 2, 4, 2, 11, 3, 5


def problem(dtype=torch.float64, decay=True, starts=False, memory=True):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, T, n, generator=g, dtype=dtype) for h, n in ((H, M), (G, M), (G, E)))
    given = {
        "log_decay": -torch.rand(B, G, T, generator=g, dtype=dtype) if decay else None,
        "memory": torch.randn(B, G, E, M, generator=g, dtype=dtype) if memory else None,
        "starts": torch.rand(B, T, generator=g) < 0.25 if starts else None,
    }
    return (q, k, v), given


FORMS = {
    "quadratic": linear_quadratic,
    "chunk-1": lambda *a, **k: linear_chunked(*a, **k, chunk=1),
    "chunk-4": lambda *a, **k: linear_chunked(*a, **k, chunk=4),
    "chunk-64": lambda *a, **k: linear_chunked(*a, **k, chunk=64),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("decay", "starts", "memory"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_all_forms_equal_the_loop(form, decay, starts, memory):
    (q, k, v), given = problem(decay=decay, starts=starts, memory=memory)
    inputs = [t.requires_grad_() for t in (q, k, v, given["log_decay"], given["memory"]) if t is not None]
    want, want_memory = linear_loop(q, k, v, **given)
    got, got_memory = FORMS[form](q, k, v, **given)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(got_memory, want_memory, atol=1e-9, rtol=1e-9)
    for have, need in zip(
        torch.autograd.grad(got.square().sum() + got_memory.sin().sum(), inputs),
        torch.autograd.grad(want.square().sum() + want_memory.sin().sum(), inputs),
    ):
        torch.testing.assert_close(have, need, atol=1e-9, rtol=1e-9)


def test_float32_forms_agree():
    (q, k, v), given = problem(torch.float32, starts=True)
    want, _ = linear_loop(q, k, v, **given)
    for form in FORMS.values():
        torch.testing.assert_close(form(q, k, v, **given)[0], want, atol=1e-4, rtol=1e-4)


def test_strong_decay_over_a_long_chunk_stays_finite():
    q = k = v = torch.ones(1, 1, 200, 2, requires_grad=True)
    out, _ = linear_quadratic(q, k, v, torch.full((1, 1, 200), -5.0))
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert out.isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(out[0, 0, -1, 0].item(), 2.0 / (1.0 - torch.tensor(-5.0).exp().item()))


def test_orthogonal_keys_are_recalled_up_to_the_width():
    keys = torch.eye(4)[None, None]
    values = torch.randn(1, 1, 4, 3, generator=torch.Generator().manual_seed(0))
    _, memory = linear_loop(keys, keys, values)
    torch.testing.assert_close(keys[0, 0] @ memory[0, 0].mT, values[0, 0])


def test_empty_call_gives_empty_output_and_the_same_memory():
    (q, k, v), given = problem()
    for form in (linear_loop, *FORMS.values()):
        out, memory = form(q[:, :, :0], k[:, :, :0], v[:, :, :0], given["log_decay"][:, :, :0], given["memory"])
        assert out.shape == (B, H, 0, E) and torch.equal(memory, given["memory"])


def test_module_without_gate_is_normalised_kernel_attention():
    torch.manual_seed(0)
    module = LinearAttention().build(8, 2, 1, 4, 0, 1).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    q, k, v = (p(x).view(1, 6, -1, 4).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    weights = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    weights = weights.tril() / weights.tril().sum(-1, keepdim=True)
    want = module.o_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, Context.of(1, 6))[0], want)


def test_state_bytes_do_not_depend_on_length():
    module = LinearAttention(gated=True).build(8, 2, 1, 4, 0, 1)
    sizes = {module(torch.randn(3, n, 8), Context.of(3, n))[1].nbytes for n in (1, 7, 200)}
    assert sizes == {3 * 1 * 5 * 4 * 4}


def test_memory_is_float32_in_a_half_precision_model():
    for knobs in (LinearAttention(gated=True), LinearAttention(normalise=False, feature="identity")):
        module = knobs.build(8, 2, 1, 4, 0, 1).bfloat16()
        y, state = module(torch.randn(1, 5, 8).bfloat16(), Context.of(1, 5))
        assert y.dtype == torch.bfloat16 and state.memory.dtype == torch.float32


def test_gates_start_with_time_constants_spread_over_the_heads():
    module = LinearAttention(gated=True).build(8, 8, 8, 4, 0, 1)
    rate = -module._log_decay(torch.zeros(1, 1, 8))[0, :, 0]
    torch.testing.assert_close(rate[[0, -1]], torch.tensor([0.5, 0.001]))
    assert (rate.diff() < 0).all()


def test_refusals():
    with pytest.raises(Refused, match="expected normalise=False or feature='elu'"):
        LinearAttention(feature="identity")
    with pytest.raises(Refused, match="did you mean 'elu'"):
        LinearAttention(feature="elo")
    with pytest.raises(Refused, match="n_kv_heads=3"):
        LinearAttention().build(8, 4, 3, 2, 0, 1)
