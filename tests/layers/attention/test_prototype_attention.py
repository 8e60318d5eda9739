"""Attention through prototypes against softmax attention: where it is exact, what changes nothing, and the bound."""

import pytest
import torch

from longspan.kernels import attend
from longspan.layers.attention.prototype_attention import prototype_attention, through_prototypes
from longspan.layers.attention.prototype_bound import total_variation
from longspan.layers.attention.prototype_sketches import Enrichment
from longspan.layers.attention.prototypes import assign, centres, keep_exact, pool
from longspan.registry import Refused

B, H, G, T, N, D, M = 2, 4, 2, 5, 24, 6, 7


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(seed=0, batch=B, **changed):
    sizes = {"T": T, "N": N, "D": D} | changed
    return (draw(batch, H, sizes["T"], sizes["D"], seed=seed), draw(batch, G, sizes["N"], sizes["D"], seed=seed + 1),
            draw(batch, G, sizes["N"], sizes["D"], seed=seed + 2))


def learned(m=M, seed=9):
    return draw(G, m, D, seed=seed), draw(G, m, seed=seed + 1)


def sketches(gate=0.8, degrees=(2,), seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Enrichment(G, (D, D), degrees, width=8, seed=seed, gate=gate).to(dtype).eval()


# ----------------------------------------------------------------------------------------------------- where it is exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prototype_for_every_key_is_softmax_attention(dtype):
    q, k, v = (t.to(dtype) for t in problem())
    read = through_prototypes(q, k, v, torch.eye(N, dtype=dtype).expand(B, G, N, N))
    torch.testing.assert_close(read.out, attend(q, k, v, causal=False)[0], atol=1e-6, rtol=1e-6)
    assert not read.bound.any()


@pytest.mark.parametrize("gate", [0.0, 5.0])
def test_equal_keys_within_each_prototype_are_exact(gate):
    """Whatever the values are when gates are closed; with equal values too when they are open, since V_g holds Cov(k, v)."""
    q, k, v = problem(N=M)
    of = torch.arange(N) % M
    k = k[:, :, of]
    values = draw(B, G, N, D, seed=8)
    P = torch.eye(M, dtype=torch.float64)[of].expand(B, G, N, M)
    read = through_prototypes(q, k, values, P, enrichment=sketches(gate, (2, 3)))
    torch.testing.assert_close(read.out, attend(q, k, values, causal=False)[0], atol=1e-9, rtol=1e-9)
    assert read.bound.max() < 1e-9 and not v.requires_grad


def test_one_prototype_reads_the_mean_of_the_values():
    q, k, v = problem()
    read = prototype_attention(q, k, v, *learned(1), topr=1, n_exact=0)
    torch.testing.assert_close(read.out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(read.out))


def test_first_keys_have_prototypes_of_their_own():
    q, k, v = problem()
    read = prototype_attention(q, k, v, *learned(), n_exact=3)
    assert torch.equal(read.prototypes.k[:, :, :3], k[:, :, :3]) and torch.equal(read.P[:, :, :3, 3:], torch.zeros(B, G, 3, M))
    everything = prototype_attention(q, k, v, *learned(), n_exact=N + 5)
    torch.testing.assert_close(everything.out, attend(q, k, v, causal=False)[0])
    assert not everything.bound.any()


# ------------------------------------------------------------------------------------------------- assignment and sums


@pytest.mark.parametrize("topr", [1, 2, M])
def test_mass_is_kept(topr):
    """sum_m c_m = N and sum_m c_m K_c[m] = sum_j k_j; every key has weights on at most `topr` prototypes that sum to 1."""
    _, k, v = problem()
    P = assign(k, *learned(), topr=topr)
    centre, _ = centres(pool(P, k, v), (D, D))
    torch.testing.assert_close(centre.mass.sum(-1), torch.full((B, G), float(N), dtype=torch.float64))
    torch.testing.assert_close((centre.mass[..., None] * centre.k).sum(-2), k.sum(-2))
    assert int((P > 0).sum(-1).max()) <= topr and bool((P >= 0).all())
    torch.testing.assert_close(P.sum(-1), torch.ones(B, G, N, dtype=torch.float64))


def test_the_largest_weights_are_those_of_the_softmax():
    _, k, _ = problem()
    u, b = learned()
    full, top = assign(k, u, b, topr=M), assign(k, u, b, topr=2)
    torch.testing.assert_close(full, (k @ u.mT / D**0.5 + b[:, None]).softmax(-1))
    kept = full * (top > 0)
    torch.testing.assert_close(top, kept / kept.sum(-1, keepdim=True))
    assert torch.equal(top.topk(2, -1).indices.sort(-1).values, full.topk(2, -1).indices.sort(-1).values)


def test_hard_assignment_has_the_gradient_of_the_softmax():
    _, k, _ = problem()
    u, b = (t.requires_grad_() for t in learned())
    weights = draw(B, G, N, M, seed=7)
    hard = assign(k, u, b, topr=1)
    assert torch.equal(hard, torch.nn.functional.one_hot(hard.argmax(-1), M).double())
    want = torch.autograd.grad((assign(k, u, b, topr=M, eps=0.0) * weights).sum(), (u, b))
    for have, one in zip(torch.autograd.grad((hard * weights).sum(), (u, b)), want):
        torch.testing.assert_close(have, one)


def test_weights_too_small_to_divide_by_are_none():
    k = torch.tensor([[[[1.0]]]])
    P = assign(k, torch.tensor([[[0.0], [-20.0]]]), torch.zeros(1, 2))
    assert P.tolist() == [[[[1.0, 0.0]]]]


# ------------------------------------------------------------------------------------------------- what changes nothing


@pytest.mark.parametrize("gate", [0.0, 0.8])
def test_order_of_keys_shift_and_scale_of_values(gate):
    q, k, v = problem()
    given = {"n_exact": 0, "enrichment": sketches(gate, (2, 3))}
    read = prototype_attention(q, k, v, *learned(), **given)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    mixed = prototype_attention(q, k[:, :, order], v[:, :, order], *learned(), **given)
    torch.testing.assert_close(mixed.out, read.out, atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed.bound, read.bound, atol=1e-5, rtol=0)
    scaled = prototype_attention(q, k, -3 * v, *learned(), **given)
    torch.testing.assert_close(scaled.out, -3 * read.out)
    torch.testing.assert_close(scaled.bound, 3 * read.bound)
    shift = draw(D, seed=5)
    moved = prototype_attention(q, k, v + shift, *learned(), **given)
    torch.testing.assert_close(moved.out, read.out + shift)
    torch.testing.assert_close(moved.bound, read.bound)


def test_padding_is_as_if_it_were_not_there():
    q, k, v = problem()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[:, 15:] = False
    k[:, :, 15:], v[:, :, 15:] = float("nan"), float("nan")
    given = {"enrichment": sketches(), "n_exact": 2}
    read = prototype_attention(q, k, v, *learned(), mask=mask, **given)
    alone = prototype_attention(q, k[:, :, :15], v[:, :, :15], *learned(), **given)
    torch.testing.assert_close(read.out, alone.out)
    torch.testing.assert_close(read.bound, alone.bound)


def test_without_any_key_the_output_and_the_bound_are_zero():
    q, k, v = (t.requires_grad_() for t in problem())
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0] = False
    read = prototype_attention(q, k, v, *learned(), mask=mask, enrichment=sketches())
    assert not read.out[0].any() and not read.bound[0].any() and read.out[1].all() and read.bound[1].all()
    for grad in torch.autograd.grad(read.out.square().sum(), (q, k, v)):
        assert grad.isfinite().all() and not grad[0].any()


def test_empty_prototypes_are_not_seen():
    q, k, v = problem()
    P = torch.zeros(B, G, N, M, dtype=torch.float64)
    P[..., 0] = 1.0
    read = through_prototypes(q, k, v, P, enrichment=sketches())
    assert read.out.isfinite().all() and read.bound.isfinite().all()
    torch.testing.assert_close(read.out[:, 0, 0], read.prototypes.v[:, 0, 0])


def test_groups_of_query_heads_share_the_prototypes_of_their_key_head():
    q, k, v = problem()
    u, b = learned()
    read = prototype_attention(q, k, v, u, b)
    repeated = prototype_attention(q, *(t.repeat_interleave(2, 1) for t in (k, v)), *(t.repeat_interleave(2, 0) for t in (u, b)))
    torch.testing.assert_close(read.out, repeated.out)
    torch.testing.assert_close(read.bound, repeated.bound)


# ------------------------------------------------------------------------------------------------------------- sketches


def test_sketches_are_those_of_the_covariances():
    """z = sum_j P_jm TS(k_j - K_c) / c and zv = sum_j P_jm TS(k_j - K_c, v_j - V_c) / c, through weights that show them."""
    _, k, v = problem()
    P, made = assign(k, *learned()), sketches(1.0)
    centre, means = centres(pool(P, k, v, made.features(k, v, made.active())), (D, D))
    read = made.enriched(centre, means, made.active())
    off_k = k[..., None, :] - centre.k[..., None, :, :]
    off_v = v[..., None, :] - centre.v[..., None, :, :]
    share = (P / centre.mass.clamp(min=1e-9)[..., None, :])[..., None]
    z = (share * made.of_keys[0](off_k, off_k)).sum(-3)
    zv = (share * made.of_values[0](off_k, off_v)).sum(-3)
    torch.testing.assert_close(read.k - centre.k, z @ made.to_keys[0])
    torch.testing.assert_close(read.v - centre.v, zv @ made.to_values[0])


def test_only_degrees_with_an_open_gate_are_computed():
    made = sketches(0.0, (2, 3))
    _, k, v = problem()
    assert made.active() == () and made.features(k, v, ()) is None
    with torch.no_grad():
        made.gates[1, 0] = 0.5
    assert made.active() == (1,) and made.features(k, v, (1,)).shape[-1] == 3 * 8
    assert made.train().active() == (0, 1)


def test_a_gate_below_zero_counts_as_zero_and_can_open_again():
    made, (q, k, v) = sketches(0.0).train(), problem()
    want = prototype_attention(q, k, v, *learned()).out
    with torch.no_grad():
        made.gates.fill_(-0.5)
    out = prototype_attention(q, k, v, *learned(), enrichment=made).out
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    assert bool((made.gates.grad.abs() > 0).all())


# ------------------------------------------------------------------------------------------------------------ the bound


@pytest.mark.parametrize("topr", [1, 2, M])
def test_the_bound_is_never_broken(topr):
    """1,000 problems: from weak to peaked attention, gates closed and open, exact keys, mass left out now and then."""
    dice, used = torch.Generator().manual_seed(topr), []
    for seed in range(20):
        q, k, v = problem(100 * seed, batch=50)
        q = q * 4 * torch.rand(50, 1, 1, 1, generator=dice, dtype=q.dtype)
        k = k[:, :, :1] + (k - k[:, :, :1]) * 2 * torch.rand(50, 1, 1, 1, generator=dice, dtype=q.dtype)
        made = sketches((0.0, 0.3, 2.0)[seed % 3], ((2,), (2, 3))[seed % 2], seed)
        P = keep_exact(assign(k, *learned(seed=seed), topr=topr), seed % 4)
        want = attend(q, k, v, causal=False)[0]
        for sharp in (True, False):
            read = through_prototypes(q, k, v, P, enrichment=made, mass=seed % 5 != 4, sharp=sharp)
            error = (read.out - want).norm(dim=-1)
            assert bool((error <= read.bound + 1e-12).all())
            used.append(float((error / read.bound).detach().mean()))
    assert 0.01 < sum(used) / len(used) < 1


def test_total_variation_is_the_largest_there_is():
    """Against a search over all ways to place the ratios: never more, and reached; with share 1 it is tanh(delta / 2)."""
    parts = torch.linspace(0, 1, 4001, dtype=torch.float64)
    for delta in (1e-6, 0.01, 0.5, 2.0, 6.0):
        up = torch.tensor(delta, dtype=torch.float64).exp()
        for share in (1e-3, 0.1, 0.5, 0.9, 1.0):
            x, rest = parts * share, 1 - share
            found = [r * x / (r * x + (share - x) / r + rest) - x for r in (up, 1 / up)]
            want = max(float(t.abs().max()) for t in found)
            have = float(total_variation(up.log(), torch.tensor(share, dtype=torch.float64)))
            assert have == pytest.approx(want, rel=2e-3)
    delta = torch.tensor([0.0, 1e-5, 0.1, 3.0, 50.0, 500.0])
    torch.testing.assert_close(total_variation(delta), (delta / 2).tanh())
    assert not total_variation(delta, torch.zeros(6)).any()


def test_sharper_with_exact_keys_than_without_taking_account_of_them():
    q, k, v = problem()
    P = keep_exact(assign(k, *learned()), 8)
    sharp, blunt = (through_prototypes(q, k, v, P, sharp=sharp).bound for sharp in (True, False))
    assert bool((sharp < blunt).all())


# ------------------------------------------------------------------------------------------------------------- bad input


def test_refusals():
    q, k, v = problem()
    u, b = learned()
    with pytest.raises(Refused, match="the mixer plash"):
        prototype_attention(q, k, v, u, b, causal=True)
    with pytest.raises(Refused, match=f"topr={M + 1}"):
        prototype_attention(q, k, v, u, b, topr=M + 1)
    with pytest.raises(Refused, match="topr=2 with M=0"):
        prototype_attention(q, k, v, u[:, :0], b[:, :0])
    with pytest.raises(Refused, match="n_exact=-1"):
        prototype_attention(q, k, v, u, b, n_exact=-1)
    with pytest.raises(Refused, match="gate=-1"):
        Enrichment(G, (D, D), gate=-1)
    with pytest.raises(Refused, match="from 2 on"):
        Enrichment(G, (D, D), (1,))
    with pytest.raises(Refused, match="D_s=1"):
        Enrichment(G, (D, D), width=1)
    k[0, 0, 0, 0] = float("nan")
    with pytest.raises(Refused, match="NaN"):
        prototype_attention(q, k, v, u, b)


def test_more_prototypes_than_keys_are_a_warning():
    q, k, v = problem(N=3)
    with pytest.warns(UserWarning, match="M=7 prototypes for 3 keys"):
        read = prototype_attention(q, k, v, *learned(), n_exact=0)
    assert read.out.isfinite().all() and bool(((read.out - attend(q, k, v, causal=False)[0]).norm(dim=-1) <= read.bound).all())


@pytest.mark.parametrize(("changed", "says"), [
    ({"k": draw(B, G, N, D + 1)}, "expected q"), ({"v": draw(B, G, N + 1, D)}, "expected q"),
    ({"q": draw(B, 3, T, D)}, "H a multiple of G"), ({"u": draw(G, M, D + 1)}, "differ in width"),
    ({"u": draw(G + 1, M, D)}, "key heads"), ({"b": draw(G, M + 1)}, "key heads"),
    ({"mask": torch.ones(B, N)}, "Boolean"), ({"mask": torch.ones(B, N + 1, dtype=torch.bool)}, "Boolean"),
    ({"k": draw(B, G, 0, D), "v": draw(B, G, 0, D)}, "N >= 1")])
def test_shapes_that_do_not_fit(changed, says):
    given = dict(zip("qkvub", (*problem(), *learned()))) | changed
    with pytest.raises(ValueError, match=says):
        prototype_attention(**given)


def test_an_assignment_that_does_not_fit():
    with pytest.raises(ValueError, match="doesn't fit the keys"):
        through_prototypes(*problem(), torch.zeros(B, G, N + 1, M))
