"""Selective attention against its definition written out, whole and part by part."""

import pytest
import torch

from longspan.kernels import attend
from longspan.layers import Context, Visible
from longspan.layers.attention.selective import Selective, accumulated, selected, selective_attention
from longspan.layers.positions.rope import Rope
from longspan.models.decoder import count_parameters
from longspan.training.peak import PeakMemory

CPU = torch.device("cpu")
T = 9


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tensors(n=T, dtype=torch.float64):
    return [draw(2, h, n, 8, seed=i, dtype=dtype) for i, h in enumerate((4, 2, 2))]


def first(n=T):
    return (torch.arange(n) == 0).expand(2, n)


def by_hand(q, k, v):
    """Outputs and F of one document, entry by entry."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    A = q @ k.mT / q.shape[-1] ** 0.5
    B, H, n = A.shape[:3]
    taken, out = torch.zeros(B, n, n, dtype=A.dtype), torch.zeros_like(q)
    for b in range(B):
        for i in range(n):
            for j in range(i + 1):
                taken[b, i, j] = sum(max(A[b, 0, x, j].item(), 0.0) for x in range(i) if 0 < j < x)
            for h in range(H):
                out[b, h, i] = (A[b, h, i, : i + 1] - taken[b, i, : i + 1]).softmax(0) @ v[b, h, : i + 1]
    return out, taken


@pytest.mark.parametrize("most", [1, 2 * 4 * T * 2, 1 << 20])
def test_equals_the_definition_in_any_parts(most):
    inputs = [t.requires_grad_() for t in tensors()]
    out, taken = selective_attention(*inputs, Visible(T, T, None, CPU), first(), most=most)
    want, F = by_hand(*inputs)
    torch.testing.assert_close(out, want)
    grads = torch.autograd.grad((out * draw(*out.shape, seed=5)).sum(), inputs)
    whole, _ = selective_attention(*inputs, Visible(T, T, None, CPU), first())
    for have, need in zip(grads, torch.autograd.grad((whole * draw(*out.shape, seed=5)).sum(), inputs)):
        torch.testing.assert_close(have, need)
    # What is handed on is F of a query that comes next.
    q, k, v = (torch.cat((t, draw(*t.shape[:2], 1, 8, seed=7)), 2) for t in inputs)
    torch.testing.assert_close(taken, by_hand(q, k, v)[1][:, -1, :T])
    assert F[:, -1].max() > 0.1


def test_the_mask_only_grows_and_starts_at_nothing():
    q, k, _ = tensors()
    see = torch.ones(T, T, dtype=torch.bool).tril()[None]
    F = accumulated(selected((q[:, 0] @ k[:, 0].mT), see, first(), 0), torch.zeros(2, T, dtype=q.dtype))
    assert (F.diff(dim=1) >= 0).all()
    assert not F[:, 0, :1].any() and not F[:, 1, :2].any() and not F[..., 0].any()
    assert F[:, 2:].any()


def test_without_positive_scores_in_head_0_it_is_softmax():
    q, k, v = tensors()
    q[:, 0], k[:, 0] = q[:, 0].abs(), -k[:, 0].abs()
    out, taken = selective_attention(q, k, v, Visible(T, T, None, CPU), first())
    torch.testing.assert_close(out, attend(q, k, v)[0])
    assert not taken.any()


def test_a_masked_token_is_gone_for_all_heads():
    q, k, v = tensors()
    k[:, :, 2] = 0.0
    k[:, 0, 2, 0], q[:, 0, 3, 0] = 100.0, 100.0  # query 3 finds key 2 useless, loudly
    v[:, :, 2] = 1e3
    out, _ = selective_attention(q, k, v, Visible(T, T, None, CPU), first())
    assert out[:, 2:, 4:].abs().max() < 10 < out[:, :, 3].abs().max()


def test_there_are_no_further_weights_and_one_number_a_key():
    module = Selective().build(16, 4, 2, 4, 0, 1)
    assert count_parameters(module) == 16 * (16 + 8 + 8 + 16)
    _, state = module(draw(2, 7, 16, dtype=torch.float32), Context.of(2, 7))
    assert state.taken.shape == state.first.shape == (2, 7)
    assert state.nbytes == 2 * 7 * (2 * 2 * 4 * 4 + 4 + 1)


def test_the_first_real_token_is_never_masked(contract):
    c = contract(Selective(), Rope())
    x, valid = torch.randn(1, 13, 16, generator=torch.Generator().manual_seed(0)), torch.ones(1, 13, dtype=torch.bool)
    valid[0, :3] = False
    _, state, _ = c.run(x, valid=valid)
    assert state.first[0].nonzero().flatten().tolist() == [3]
    assert state.taken[0, 3] == 0 and not state.taken[0, :3].any() and state.taken[0, 4:].any()


def test_memory_grows_with_rows_not_with_their_square():
    n = 512
    q, k, v = (t.requires_grad_() for t in tensors(n, torch.float32))
    with PeakMemory() as seen:
        selective_attention(q, k, v, Visible(n, n, None, CPU), first(n), most=8 * n * 16)[0].sum().backward()
    assert seen.largest <= 8 * n * 16 and seen.peak < 8 * n * n * 4 / 2


def test_empty_calls():
    q, k, v = tensors()
    out, taken = selective_attention(q[:, :, :0], k, v, Visible(0, T, None, CPU), first())
    assert out.shape == (2, 4, 0, 8) and not taken.any()
