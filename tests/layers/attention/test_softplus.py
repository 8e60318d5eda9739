"""Softplus attention: the specification's exact checks, the tiled form against the definition, what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F

from longspan.kernels import attend
from longspan.layers import Context, Visible
from longspan.layers.attention import softplus
from longspan.layers.attention.softplus import (
    Softplus,
    seen_from,
    sharpened,
    softplus_attention,
    softplus_weights,
    unit,
)
from longspan.layers.positions.rope import Rope
from longspan.models.decoder import DecoderConfig
from longspan.registry import Refused
from longspan.training.peak import PeakMemory

CPU = torch.device("cpu")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def by_hand(q, k, see, p=None):
    """Weights of one head from the formulas, entry by entry."""
    d, weights = q.shape[-1], torch.zeros(see.shape, dtype=torch.float64)
    for i in range(len(q)):
        seen = see[i].nonzero()[:, 0].tolist()
        n = len(seen)
        a = {j: math.log1p(math.exp(math.log(d) * math.log(n) * float(q[i] @ k[j]) / float(q[i].norm() * k[j].norm())))
             for j in seen}
        A = {j: a[j] / sum(a.values()) for j in seen}
        if p is not None:
            x = {j: max(n * A[j] - (n > 3), 0.0) ** p for j in seen}
            A = {j: x[j] / sum(x.values()) for j in seen}
        for j in seen:
            weights[i, j] = A[j]
    return weights


@pytest.mark.parametrize("p", [None, 3.0, 15.0])
def test_weights_are_the_formula(p):
    q, k = draw(9, 6), draw(9, 6, seed=1)
    got = softplus_weights(unit(q) @ unit(k).mT, causal(9), 6, p or 1.0, reweight=p is not None)
    torch.testing.assert_close(got, by_hand(q, k, causal(9), p), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("reweight", [False, True])
def test_rows_are_averages_of_visible_values(reweight):
    q, k, v = (unit(draw(2, 3, 40, 8, seed=s, dtype=torch.float32)) for s in range(3))
    weights = softplus_weights(q @ k.mT, causal(40), 8, reweight=reweight)
    assert (weights >= 0).all() and not weights[..., ~causal(40)].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 40), atol=1e-6, rtol=0)
    out = softplus_attention(q, k, v, Visible(40, 40, None, CPU), reweight=reweight)
    low, high = (torch.stack([getattr(v[:, :, : i + 1], f)(2).values for i in range(40)], 2) for f in ("min", "max"))
    assert ((out >= low - 1e-6) & (out <= high + 1e-6)).all()
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], atol=1e-7, rtol=0)


def test_with_exp_for_softplus_it_is_softmax(monkeypatch):
    monkeypatch.setattr(softplus, "positive", lambda c, see, n, width: (c / width**0.5).exp().masked_fill(~see, 0.0))
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, 12, 8, seed=1), draw(2, 2, 12, 8, seed=2)
    got = softplus_attention(q, k, v, Visible(9, 12, None, CPU), reweight=False, tile=5)
    torch.testing.assert_close(got, attend(q, k, v)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_give_a_uniform_row(dtype):
    for n in (2, 5, 37):
        for cosine in (0.0, 0.3, -1.0):
            c, see = torch.full((1, n), cosine, dtype=dtype), torch.ones(1, n, dtype=torch.bool)
            for reweight in (False, True):
                got = softplus_weights(c, see, 16, reweight=reweight)
                torch.testing.assert_close(got, torch.full_like(got, 1 / n), atol=1e-6, rtol=0)
    # Keys that tie up to rounding are still a tie; a query of zeros ties all of them.
    c = 0.3 + torch.finfo(dtype).eps * torch.tensor([[0.0, 0.4, 0.2, 0.3, 0.0, 0.1]], dtype=dtype)
    got = softplus_weights(c, torch.ones_like(c, dtype=torch.bool), 16)
    torch.testing.assert_close(got, torch.full_like(got, 1 / 6), atol=1e-5, rtol=0)
    v = draw(1, 1, 6, 4, dtype=dtype)
    out = softplus_attention(unit(torch.zeros(1, 1, 1, 4, dtype=dtype)), unit(v), v, Visible(1, 6, None, CPU))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0))


def test_the_first_power_without_the_average_changes_nothing(monkeypatch):
    c = draw(8, 8).tanh()
    first = softplus_weights(c, causal(8), 16, reweight=False)
    torch.testing.assert_close(softplus_weights(c, causal(8), 16, 1.0)[:3], first[:3])  # o_i = 0
    assert (softplus_weights(c, causal(8), 16, 1.0) - first)[3:].abs().max() > 1e-2
    monkeypatch.setattr(softplus, "EXEMPT", 100)
    torch.testing.assert_close(softplus_weights(c, causal(8), 16, 1.0), first)


@pytest.mark.parametrize("n", [10, 1000])
def test_a_high_power_takes_the_largest_alone(n):
    near = n // 3
    r = torch.full((1, n), -(1.1 + near) / (n - 1 - near), dtype=torch.float64)  # n A - 1 has mean 0
    r[0, : near + 1] = 1.0
    r[0, 0] = 1.1
    a = r + 1
    x = sharpened(a, torch.tensor([[float(n)]]).double(), a.sum(-1, keepdim=True), a.amax(-1, keepdim=True), 200.0)
    assert x[0, 0] / x.sum() > 0.999


def test_order_is_kept_and_the_support_is_above_average():
    c, see = draw(64, 64).tanh(), causal(64)
    first, second = (softplus_weights(c, see, 32, 3.0, reweight=r) for r in (False, True))
    for i in range(64):
        order = first[i, : i + 1].argsort()
        steps = second[i, order].diff()
        assert (steps >= 0).all()
        support = second[i, : i + 1] > 0
        assert support.any()
        if i + 1 > 3:
            assert torch.equal(support, (i + 1) * first[i, : i + 1] > 1)
            assert (second[i, order][support[order]].diff() > 0).all()


def test_only_directions_of_queries_and_keys_matter():
    torch.manual_seed(0)
    module, x = Softplus().build(12, 2, 2, 6, 0, 1), draw(1, 10, 12, dtype=torch.float32)
    want, _ = module(x, Context.of(1, 10))
    with torch.no_grad():
        module.q_proj.weight *= 37.0
        module.k_proj.weight *= 0.02
    torch.testing.assert_close(module(x, Context.of(1, 10))[0], want, atol=1e-5, rtol=1e-5)


def test_bounds():
    d, n = 64, 1024
    ell = math.log(d) * math.log(n)
    assert ell == pytest.approx(28.8, abs=0.05)
    see = torch.ones(1, n, dtype=torch.bool)
    high, low = math.log1p(math.exp(ell)), math.log1p(math.exp(-ell))
    bound = high / (high + (n - 1) * low)
    aligned = torch.full((1, n), -1.0, dtype=torch.float64)
    aligned[0, 0] = 1.0
    assert softplus_weights(aligned, see, d, reweight=False)[0, 0].item() == pytest.approx(bound)
    assert bound > 1 - 1e-9
    c = draw(1, n).clamp(-1, 1)
    a = softplus.positive(c, see, torch.tensor([[float(n)]]).double(), d)
    assert (a >= low * (1 - 1e-9)).all() and (a <= high * (1 + 1e-9)).all()
    assert (softplus_weights(c, see, d, reweight=False) <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_half_precision_inputs_stay_finite(dtype):
    q, k = (F.normalize(draw(1, 2, 50, 16, seed=s), dim=-1).mul(1e4).to(dtype) for s in (0, 1))
    v = draw(1, 2, 50, 16, seed=2).to(dtype)
    assert (q.float() @ k.float().mT).exp().isinf().any()
    out = softplus_attention(unit(q), unit(k), v, Visible(50, 50, None, CPU))
    assert out.dtype == dtype and out.isfinite().all()
    want = softplus_attention(unit(q.double()), unit(k.double()), v.double(), Visible(50, 50, None, CPU), p=1.0)
    torch.testing.assert_close(softplus_attention(unit(q), unit(k), v, Visible(50, 50, None, CPU), p=1.0).double(), want,
                               atol=0.05, rtol=0.05)


def test_masked_keys_and_the_order_of_keys_do_not_matter():
    q, k, v = (unit(draw(1, 1, n, 8, seed=s)) for n, s in ((4, 0), (9, 1), (9, 2)))
    everything = torch.ones(1, 1, 4, 9, dtype=torch.bool)
    want = softplus_attention(q, k, v, Visible(4, 9, everything, CPU))
    more = [torch.cat((t, unit(draw(1, 1, 3, 8, seed=5)) * 50), 2) for t in (k, v)]
    got = softplus_attention(q, *more, Visible(4, 12, F.pad(everything, (0, 3)), CPU))
    torch.testing.assert_close(got, want, atol=0, rtol=1e-12)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    c = (q @ k.mT)[0, 0]
    got, want = (softplus_weights(x, everything[0, 0], 8) for x in (c[:, order], c))
    torch.testing.assert_close(got, want[:, order])


@pytest.mark.parametrize("reweight", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("most", "tile"), [(10**6, 4), (1, 3), (400, 100), (400, 1)])
def test_two_passes_in_tiles_are_the_dense_form(most, tile, masked, reweight):
    q, k, v = (draw(2, h, n, 8, seed=s, dtype=torch.float32) for h, n, s in ((4, 11, 0), (2, 17, 1), (2, 17, 2)))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    mask = None
    see = torch.ones(11, 17, dtype=torch.bool).tril(6)[None, None]
    if masked:
        mask = see & (draw(2, 1, 11, 17, seed=4) > -0.3)
        mask[0, 0, 2] = False
        see = mask
    weights = softplus_weights(unit(q) @ unit(k).repeat_interleave(2, 1).mT, see, 8, 3.0, reweight)
    want = weights @ v.repeat_interleave(2, 1)
    seen, how = Visible(11, 17, mask, CPU), {"p": 3.0, "reweight": reweight, "most": most, "tile": tile}
    got = softplus_attention(unit(q), unit(k), v, seen, **how)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    up = draw(*got.shape, seed=7, dtype=torch.float32)
    for have, need in zip(*(torch.autograd.grad((x * up).sum(), inputs, retain_graph=True) for x in (got, want))):
        torch.testing.assert_close(have, need, atol=2e-4, rtol=1e-3)
    if masked:
        assert not got[0, :, 2].any()
    with torch.no_grad():
        again = softplus_attention(unit(q), unit(k), v, seen, **how)
    torch.testing.assert_close(again, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0, 15.0])
def test_gradients_are_finite_and_right(p):
    q, k, v = (draw(1, 1, 6, 4, seed=s).requires_grad_() for s in range(3))

    def attention(q, k, v):
        return softplus_attention(unit(q), unit(k), v, Visible(6, 6, None, CPU), p=p)

    assert all(g.isfinite().all() for g in torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v)))
    if p >= 1.0:
        assert torch.autograd.gradcheck(attention, (q, k, v))


def test_gradient_of_the_first_stage():
    """dA = (g - A.g) / sum a on positive scores, times the sigmoid."""
    c, g, n, d = draw(1, 7).tanh().requires_grad_(), draw(1, 7, seed=1), 7, 16
    A = softplus_weights(c, torch.ones(1, n, dtype=torch.bool), d, reweight=False)
    (got,) = torch.autograd.grad((A * g).sum(), c)
    ell = math.log(d) * math.log(n)
    want = (g - (A * g).sum()) / F.softplus(ell * c).sum() * ell * (ell * c).sigmoid()
    torch.testing.assert_close(got, want)


def test_memory_grows_with_rows_not_with_their_square():
    n, H = 1024, 2
    q, k, v = (draw(1, H, n, 8, seed=s, dtype=torch.float32).requires_grad_() for s in range(3))
    with PeakMemory() as seen:
        softplus_attention(unit(q), unit(k), v, Visible(n, n, None, CPU), most=H * n * 32).sum().backward()
    assert seen.largest <= H * n * 32 and seen.peak < H * n * n * 4
    with torch.no_grad(), PeakMemory() as seen:
        softplus_attention(unit(q), unit(k), v, Visible(n, n, None, CPU), most=H * n * 8, tile=128)
    assert seen.largest <= H * n * 32


@pytest.mark.parametrize("knobs", [Softplus(reweight=False), Softplus(p=3.0), Softplus(window=4), Softplus(window=1)], ids=str)
def test_padding_documents_windows_and_cuts(contract, knobs):
    contract(knobs, Rope()).check_all()


def test_the_state_holds_unit_keys():
    module = Softplus().build(8, 2, 1, 4, 0, 1)
    _, state = module(draw(1, 5, 8, dtype=torch.float32), Context.of(1, 5))
    torch.testing.assert_close(state.k.norm(dim=-1), torch.ones(1, 1, 5))


def test_masks_of_other_libraries():
    additive = torch.zeros(1, 1, 3, 3).masked_fill(~causal(3), -math.inf)
    assert torch.equal(seen_from(additive, 3, 3).full(), seen_from(causal(3), 3, 3).full())
    ones = causal(3).float()
    for wrong, what in ((additive - 0.5, "-0.5"), (ones, "1.0"), (-ones, "-1.0"), (ones.long() - 1, "0")):
        with pytest.raises(Refused, match=f"mask: found {what}; expected True"):
            seen_from(wrong, 3, 3)
    with pytest.raises(ValueError, match="mask should spread over"):
        seen_from(causal(4), 3, 3)


def test_refusals():
    for p in (0.0, -2.0):
        with pytest.raises(Refused, match="expected a number above 0"):
            Softplus(p=p)
    for p in (math.inf, math.nan):
        with pytest.raises(Refused, match="finite"):
            Softplus(p=p)
    with pytest.raises(Refused, match="every row is uniform; expected at least 2"):
        Softplus().build(4, 4, 4, 1, 0, 1)
    with pytest.raises(Refused, match="takes no bias from a position scheme"):
        DecoderConfig(16, mixer="softplus", position="alibi")
    with pytest.raises(Refused, match="n_kv_heads=3"):
        Softplus().build(8, 4, 3, 2, 0, 1)
