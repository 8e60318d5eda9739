"""Differential attention against its two maps written out; what is turned, what is refused."""

import dataclasses
import math

import pytest
import torch

from longspan.kernels import attend
from longspan.layers import Context, PositionModule, Visible, inverse_frequencies, rotate
from longspan.layers.attention.differential import Differential, differential_attention, lam_init
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused
from longspan.training.peak import PeakMemory

DIM, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 8
HALF = HEAD_DIM // 2
CPU = torch.device("cpu")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tensors(T=7, S=10, dtype=torch.float64):
    return [draw(2, h, n, HEAD_DIM, seed=i, dtype=dtype) for i, (h, n) in enumerate(((HEADS, T), (KV_HEADS, S), (KV_HEADS, S)))]


def build(layer=0, **knobs):
    torch.manual_seed(0)
    return Differential(**knobs).build(DIM, HEADS, KV_HEADS, HEAD_DIM, layer, 4).double()


def test_it_is_one_map_less_the_other():
    q, k, v = tensors()
    got = differential_attention(q, k, v, Visible(7, 10, None, CPU), torch.tensor(0.3))
    first = attend(q[..., :HALF], k[..., :HALF], v)[0]
    second = attend(q[..., HALF:], k[..., HALF:], v)[0]
    torch.testing.assert_close(got, first - 0.3 * second)


def test_rows_sum_to_one_minus_lam():
    q, k, v = tensors()
    lam = torch.tensor(0.37, dtype=torch.float64)
    got = differential_attention(q, k, torch.ones_like(v), Visible(7, 10, None, CPU), lam)
    torch.testing.assert_close(got, torch.full_like(got, 1 - 0.37))


def set_lam(module, lam):
    """Give the vectors of lam values for which it is `lam`."""
    with torch.no_grad():
        for p in (module.lam_q1, module.lam_k1, module.lam_q2, module.lam_k2):
            p.zero_()
        up = lam - module.lam_init
        pair = (module.lam_q1, module.lam_k1) if up > 0 else (module.lam_q2, module.lam_k2)
        pair[0][0], pair[1][0] = 1.0, math.log(1 + abs(up))


def test_lam_zero_without_a_norm_is_softmax_attention_of_the_first_half():
    module, x = build(layer=2, norm=False), draw(2, 9, DIM)
    set_lam(module, 0.0)
    assert module.lam().item() == pytest.approx(0.0, abs=1e-7)
    q, k, v = (p(x).view(2, 9, -1, HEAD_DIM).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    want = attend(q[..., :HALF], k[..., :HALF], v)[0].transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x, Context.of(2, 9))[0], module.o_proj(want), atol=1e-6, rtol=0)


def test_norm_and_factor_follow():
    x, plain, normed = draw(2, 9, DIM), build(layer=1, norm=False), build(layer=1)
    for module in (plain, normed):
        set_lam(module, 0.25)
        module.o_proj.weight.data = torch.eye(DIM, HEADS * HEAD_DIM).double()
    normed.o_proj.weight.data, plain.o_proj.weight.data = (torch.eye(32).double() for _ in range(2))
    out = plain(x, Context.of(2, 9))[0].unflatten(-1, (HEADS, HEAD_DIM))
    want = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 - lam_init(1))
    torch.testing.assert_close(normed(x, Context.of(2, 9))[0], want.flatten(2))


def test_where_lam_starts():
    for layer in range(4):
        assert lam_init(layer) == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * ((layer + 1) - 1)))
        module = build(layer=layer)
        dots = [(a * b).sum().exp() for a, b in ((module.lam_q1, module.lam_k1), (module.lam_q2, module.lam_k2))]
        torch.testing.assert_close(module.lam(), dots[0] - dots[1] + lam_init(layer), check_dtype=False)
    big = Differential().build(256, 1, 1, 2048, 0, 1)
    assert big.lam_q1.std().item() == pytest.approx(0.1, rel=0.1)


def test_each_half_is_turned_as_a_head_of_its_own():
    module, x, places = build(norm=False), draw(1, 6, DIM), torch.arange(6)[None]
    scheme = Rope().build(DIM, HEADS, KV_HEADS, Differential().rotated(HEAD_DIM), 0, 1)
    q, held, _ = read(module, x, scheme)
    plain, still, _ = read(module, x, PositionModule())
    for have, want in ((q, plain), (held.k, still.k)):
        for part in (slice(0, HALF), slice(HALF, None)):
            torch.testing.assert_close(have[..., part], rotate(want[..., part], places, inverse_frequencies(HALF)))


def read(module, x, scheme):
    from longspan.layers.attention.differential import Halves

    return module.read(x, dataclasses.replace(Context.of(*x.shape[:2]), position=Halves(scheme)), None)


def test_a_bias_meets_both_maps():
    module, x = build(norm=False), draw(1, 6, DIM)
    scheme, places = Alibi().build(DIM, HEADS, KV_HEADS, HALF, 0, 1), torch.arange(6)[None]
    got, _ = module(x, dataclasses.replace(Context.of(1, 6), position=scheme))
    q, k, v = (p(x).view(1, 6, -1, HEAD_DIM).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    maps = []
    for part in (slice(0, HALF), slice(HALF, None)):
        scores = q[..., part] @ k[..., part].mT / HALF**0.5 + scheme.bias(places, places).double()
        maps.append(scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1))
    want = ((maps[0] - module.lam() * maps[1]) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, module.o_proj(want))


@pytest.mark.parametrize("knobs", [Differential(norm=False), Differential(window=4)], ids=str)
def test_padding_documents_windows_and_cuts(contract, knobs):
    contract(knobs, Rope()).check_all()


def test_no_matrix_of_scores_is_kept():
    n = 512
    q, k, v = (draw(1, 2, n, 8, seed=s, dtype=torch.float32).requires_grad_() for s in range(3))
    with PeakMemory() as seen:
        differential_attention(q, k, v, Visible(n, n, None, CPU), torch.tensor(0.2)).sum().backward()
    assert seen.largest < n * n / 8


def test_refusals():
    with pytest.raises(Refused, match="heads of 7 channels can't be halved; expected an even number, such as 8"):
        Differential().build(DIM, 2, 2, 7, 0, 1)
    with pytest.raises(Refused, match="head dimension 3 is odd"):
        Rope().build(DIM, 2, 2, Differential().rotated(6), 0, 1)
