"""Rows taken and put back: every version equals the definition, groups share their head, gradients flow."""

from __future__ import annotations

import pytest
import torch

from longspan.kernels.gather import put_tokens, take_tokens


def case(B=2, heads=6, shared=2, S=37, N=11, D=8, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    t = torch.randn(B, shared, S, D, generator=draw).to(dtype)
    kept = torch.rand(B, heads, S, generator=draw).argsort(-1)[..., :N].sort(-1).values
    return t, kept


@pytest.mark.parametrize("backend", ["reference", "cpu", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_reads_its_heads_rows(backend, dtype):
    t, kept = case(dtype=dtype)
    out = take_tokens(t, kept, backend=backend)
    assert out.shape == (2, 6, 11, 8) and out.dtype == dtype and out.is_contiguous()
    for b, h, n in ((0, 0, 0), (0, 2, 10), (1, 3, 5), (1, 5, 7)):
        assert torch.equal(out[b, h, n], t[b, h // 3, kept[b, h, n]])
    repeated = t.repeat_interleave(3, 1)
    assert torch.equal(out, repeated.gather(2, kept[..., None].expand(-1, -1, -1, 8)))


@pytest.mark.parametrize("backend", ["reference", "cpu", None])
def test_rows_are_put_where_they_were_taken_from_and_the_rest_is_zero(backend):
    whole, kept = case(shared=6)
    back = put_tokens(take_tokens(whole, kept), kept, 37, backend=backend)
    there = torch.zeros(2, 6, 37, dtype=torch.bool).scatter(2, kept, True)
    assert torch.equal(back[there], whole[there]) and not back[~there].any() and (~there).sum() == 2 * 6 * 26
    assert back.transpose(1, 2).is_contiguous()  # the output projection reads it without a copy


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_strided_input_and_nothing_to_take(backend):
    t, kept = case(shared=3)
    buffer = torch.zeros(2, 50, 3, 8)
    buffer[:, :37] = t.transpose(1, 2)
    view = buffer[:, :37].transpose(1, 2)
    assert torch.equal(take_tokens(view, kept, backend=backend), take_tokens(t, kept))
    none = kept[..., :0]
    assert take_tokens(t, none, backend=backend).shape == (2, 6, 0, 8)
    assert not put_tokens(torch.zeros(2, 6, 0, 8), none, 5, backend=backend).any()


def test_repeated_keys_are_never_made(monkeypatch):
    t, kept = case()
    sizes = []
    for name in ("repeat_interleave", "repeat", "contiguous", "clone"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, plain=plain, **k: sizes.append(a[0].numel()) or plain(*a, **k))
    for backend in ("reference", "cpu"):
        take_tokens(t, kept, backend=backend)
    assert not sizes


def test_both_are_differentiable():
    t, kept = case(B=1, heads=4, shared=2, S=9, N=4, D=3)
    t = t.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: put_tokens(take_tokens(t, kept), kept, 9), (t,))


def test_bad_input_is_refused():
    t, kept = case()
    for bad in (kept[:1], kept[:, :5], kept[0]):
        with pytest.raises(ValueError, match="multiple of Hs"):
            take_tokens(t, bad)
    with pytest.raises(ValueError, match="int64"):
        take_tokens(t, kept.int())
    with pytest.raises(ValueError, match=r"rows in 0\.\.36, got"):
        take_tokens(t, kept + 30)
    with pytest.raises(ValueError, match="rows in"):
        take_tokens(t, kept - 30)
    taken = take_tokens(t, kept)
    with pytest.raises(ValueError, match="rows in"):
        put_tokens(taken, kept, 20)
    with pytest.raises(ValueError, match="expected t"):
        put_tokens(taken[:, :, :3], kept, 37)
    with pytest.raises(ValueError, match="backend"):
        take_tokens(t, kept, backend="cuda")
