"""RFA's variance, residual and likelihood against their definitions, its limits, its caches, and what it refuses."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from longspan.layers import Context
from longspan.layers.attention import rfa
from longspan.layers.attention.rfa import RFA, Noise, log_likelihood, residual, robust_weights, spectrum, variance
from longspan.layers.positions.base import rotate
from longspan.models.decoder import DecoderConfig
from longspan.registry import Refused
from longspan.training.config import TrainConfig
from longspan.training.optimiser import make_optimiser
from longspan.training.peak import PeakMemory

DIM, HEADS, KV_HEADS, DH, TIME = 16, 4, 2, 4, 20
MU, S2, ETA2, GAMMA2 = 0.05, 0.4, 1.2, 0.7


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one(x):
    return torch.tensor([[float(x)]], dtype=torch.float64)


def noise(s2=S2, eta2=ETA2, gamma2=GAMMA2):
    return Noise(one(s2), one(eta2), one(gamma2))


def build(heads=HEADS, kv_heads=KV_HEADS, **knobs):
    torch.manual_seed(0)
    return RFA(**({"length": 32} | knobs)).build(DIM, heads, kv_heads, DH, 0, 1).eval()


def read(module, x, state=None, before=None, **given):
    ctx = Context.of(*x.shape[:2], before=before, **given)
    y, state = module(x, ctx, state)
    return y, state, ctx


def as_complex(x):
    """(…, 2 dh) real channels as dh complex ones."""
    return torch.complex(*x.double().chunk(2, -1))


def turned(x, w):
    """e^{-i w t} x of rows at the places 0, 1, ..."""
    return rotate(x, torch.arange(x.shape[-2])[None], -torch.cat((w, -w)))


def lags(T):
    t = torch.arange(T, dtype=torch.float64)
    return t[:, None] - t


# ------------------------------------------------------------------------------------------------- the three formulas


def test_variance_solves_its_differential_equation():
    sigma2, steps = 2 * MU * S2, 20_000
    h, v = 40.0 / steps, 0.0
    for _ in range(steps):  # dV/ds = -2 mu V + sigma2 by the midpoint rule
        middle = v + h / 2 * (sigma2 - 2 * MU * v)
        v += h * (sigma2 - 2 * MU * middle)
    want = v + ETA2 * math.exp(-2 * MU * 40.0) + GAMMA2
    assert float(variance(one(40), one(MU), noise())) == pytest.approx(want, abs=1e-6)


def test_variance_is_that_of_simulated_paths():
    draws, mu, dt = torch.Generator().manual_seed(0), 0.1, 0.02
    x = (ETA2 / 2) ** 0.5 * torch.randn(100_000, 2, generator=draws)  # an observation's error carried on
    for _ in range(150):
        x = x * math.exp(-mu * dt) + (mu * S2 * dt) ** 0.5 * torch.randn(x.shape, generator=draws)
    found = float(x.square().sum(-1).mean()) + GAMMA2
    assert float(variance(one(3), one(mu), noise())) == pytest.approx(found, rel=1e-2)


@pytest.mark.parametrize("mu", [0.0, 1e-6])
def test_without_decay_the_variance_grows_with_the_lag(mu):
    lag = torch.arange(40.0, dtype=torch.float64)[None]
    torch.testing.assert_close(variance(lag, one(mu), noise()), S2 * lag + ETA2 + GAMMA2, atol=1e-4, rtol=0)
    sigma2, small = 0.3, 2e-5  # just above: the same growth, from the general form
    grown = variance(lag, one(small), noise(s2=sigma2 / (2 * small)))
    torch.testing.assert_close(grown, sigma2 * lag + ETA2 + GAMMA2, atol=2e-2, rtol=0)


@pytest.mark.parametrize("mu", [0.0, 0.03, 2.0])
def test_residual_is_the_distance_of_complex_numbers(mu):
    w = torch.tensor([0.9, 0.2])
    q, k, lag = draw(1, 1, TIME, 2 * DH), draw(1, 1, TIME, 2 * DH, seed=1), lags(TIME).clamp(min=0)
    e = rfa.exponent(lag, one(mu)).exp()
    back_k = turned(k, w)
    got = residual(turned(q, w).double(), back_k.double(), back_k.double().square().sum(-1), e)[0, 0]
    turn = torch.exp(1j * torch.cat((w, -w)).double() * lags(TIME)[..., None])
    carried = e[..., None] * turn * as_complex(k)[0, 0][None]
    want = (as_complex(q)[0, 0][:, None] - carried).abs().square().sum(-1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_residual_is_never_negative():
    q = 100 * draw(1, 50, 8)
    r2 = residual(q, q, q.square().sum(-1), torch.ones(50, 50))
    assert (r2 >= 0).all() and r2.diagonal(dim1=-2, dim2=-1).max() < 0.1
    assert log_likelihood(r2, torch.full_like(r2, 0.01), torch.tensor(4.0), 4).isfinite().all()


def test_likelihood_is_student_t_over_the_channels():
    """The log density of a 2 dh-dimensional Student t with nu dh * 2 degrees of freedom, divided by dh."""
    dh, nu, r2, sigma = 3, 2.5, torch.tensor([0.0, 1.0, 30.0]), torch.tensor([0.5, 1.0, 2.0])
    freedom, scale = 2 * dh * nu, sigma / 2  # variance of a real channel

    def density(r2, scale):
        n = 2 * dh
        return -n / 2 * scale.log() - (freedom + n) / 2 * torch.log1p(r2 / (freedom * scale))

    got = log_likelihood(r2, sigma, torch.tensor(nu), dh)
    want = density(r2, scale) / dh
    torch.testing.assert_close(got - got[0], want - want[0])
    assert log_likelihood(r2, sigma, torch.tensor(nu), dh, "exponential").tolist() == pytest.approx(
        [-math.log(s) - r / (nu * dh * s) for r, s in zip(r2.tolist(), sigma.tolist())])


def test_thin_tails_are_gaussian():
    r2, sigma = draw(5, 5).square() * 10, draw(5, 5, seed=1).square() + 0.5
    got = log_likelihood(r2.double(), sigma.double(), torch.tensor(1e7), DH)
    torch.testing.assert_close(got, (-sigma.log() - r2 / (DH * sigma)).double(), atol=1e-4, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- known limits


def test_rotation_alone_is_rope_attention():
    w, nu, beta, gamma2 = torch.tensor([1.0, 0.1]), 4.0, 1.7, 0.3
    q, k = (F.normalize(draw(1, 1, TIME, 2 * DH, seed=s), dim=-1) for s in (0, 1))
    back = [turned(t, w).double() for t in (q, k)]
    still, mask = noise(0.0, 0.5, gamma2), lags(TIME) >= 0
    a, e = robust_weights(*back, back[1].square().sum(-1), lags(TIME).clamp(min=0), one(0), still, one(nu), one(beta), mask,
                          "exponential")
    c = 2 * beta / (nu * DH * (0.5 + gamma2))
    mirrored = [torch.cat((t[..., :DH], -t[..., DH:]), -1) for t in (q, k)]  # RoPE turns the other way
    rope = [rotate(t, torch.arange(TIME)[None], torch.cat((w, -w))).double() for t in mirrored]
    want = (c * rope[0] @ rope[1].mT).masked_fill(~mask, -math.inf).softmax(-1)
    torch.testing.assert_close(a, want, atol=1e-6, rtol=1e-5)
    assert (e == 1).all()


def test_small_lags_have_a_linear_bias():
    sigma2, lag = 0.01, torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    bias = -variance(lag, one(0), noise(s2=sigma2)).log()
    start = ETA2 + GAMMA2
    torch.testing.assert_close(bias, -math.log(start) - lag * sigma2 / start, atol=2e-4, rtol=0)
    q = torch.zeros(1, 4, 2 * DH, dtype=torch.float64)
    a, _ = robust_weights(q, q, q.square().sum(-1), lags(4).clamp(min=0), one(0), noise(s2=sigma2), one(4), one(1),
                          lags(4) >= 0)
    torch.testing.assert_close(a[0, 3], bias.flip(1)[0].softmax(-1))  # nothing to compare: the lag decides alone


def test_precision_over_the_lag():
    lag = torch.arange(200.0, dtype=torch.float64)[None]
    growing = -variance(lag, one(MU), noise(s2=2.0, eta2=0.5)).log()[0]
    assert (growing.diff() < 0).all()  # alpha < 0
    sharper = -variance(lag, one(MU), noise(s2=0.1, eta2=3.0, gamma2=0.2)).log()[0]
    assert (sharper.diff() > 0)[:100].all() and sharper.max() <= -math.log(0.3) + 1e-12  # alpha > 0, bounded by -log beta
    alpha, beta = 2.9, 0.3
    fine = torch.arange(0, 60, 0.01, dtype=torch.float64)[None]
    gain = torch.exp(-MU * fine) / variance(fine, one(MU), noise(s2=0.1, eta2=3.0, gamma2=0.2))
    assert float(fine[0, gain.argmax()]) == pytest.approx(math.log(alpha / beta) / (2 * MU), abs=0.02)


def test_rows_of_weights():
    q, k = draw(2, TIME, 2 * DH).double(), draw(2, TIME, 2 * DH, seed=1).double()
    a, e = robust_weights(q, k, k.square().sum(-1), lags(TIME).clamp(min=0), one(MU), noise(), one(4), one(1.3), lags(TIME) >= 0)
    torch.testing.assert_close(a.sum(-1), torch.ones(2, TIME, dtype=torch.float64))
    total = (a * e).sum(-1)
    assert (total <= 1 + 1e-12).all() and total[:, 1:].max() < 1
    assert not a.triu(1).any()


# ----------------------------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("knobs", [{}, {"b": 0.5}, {"weight": "exponential"}])
def test_module_is_the_formula_in_complex_numbers(knobs):
    module, x = build(**knobs), draw(1, TIME, DIM)
    with torch.no_grad():
        for p in (module.s2, module.eta2, module.gamma2, module.nu, module.beta):
            p += 0.5 * draw(len(p), seed=len(p))
    projected = [p(x)[0].view(TIME, -1, 2, DH).double() for p in (module.q_proj, module.k_proj, module.v_proj)]
    q, k, v = (torch.complex(t[:, :, 0], t[:, :, 1]) for t in projected)
    turns, mu = spectrum(KV_HEADS, DH, 32, knobs.get("b"))
    s2, eta2, gamma2, nu, beta = (F.softplus(p).tolist() for p in (module.s2, module.eta2, module.gamma2, module.nu, module.beta))
    heads = []
    for h in range(HEADS):
        g, rows = h // 2, []
        for i in range(TIME):
            dt = torch.arange(i, -1, -1, dtype=torch.float64)
            e = torch.exp(-mu[g] * dt)
            grown = dt if mu[g] < 1e-5 else 1 - e**2
            sigma = s2[g] * grown + (eta2[g] + 1e-5) * e**2 + gamma2[g] + 1e-2
            carry = e[:, None] * torch.exp(1j * turns[g] * dt[:, None])
            r2 = (q[i, h] - carry * k[: i + 1, g]).abs().square().sum(-1)
            far = r2 / (nu[h] * DH * sigma)
            logits = -sigma.log() - (far if knobs.get("weight") else (nu[h] + 1) * far.log1p())
            a = (beta[h] * logits).softmax(0)
            rows.append((a[:, None] * carry * v[: i + 1, g]).sum(0) - v[i, g])
        heads.append(torch.stack(rows))
    innovation = torch.stack(heads, 1)
    real = torch.stack((innovation.real, innovation.imag), 2).flatten(1).float()
    torch.testing.assert_close(read(module, x)[0][0], module.o_proj(real), atol=2e-5, rtol=1e-4)


def test_a_token_alone_changes_nothing():
    assert read(build(), draw(2, 1, DIM))[0].abs().max() < 1e-6


@pytest.mark.parametrize("shift", [7, 100_000])
def test_a_shift_of_time_changes_nothing(shift):
    module, x, times = build(b=0.05), draw(1, TIME, DIM), torch.arange(TIME)[None]
    moved = read(module, x, positions=times + shift)[0]
    torch.testing.assert_close(moved, read(module, x)[0], atol=1e-4, rtol=0)


def test_times_of_their_own():
    """Rows with uneven times equal the same rows read alone; equal spacing scales the decay and the turns."""
    module, x = build(b=0.5), draw(2, 6, DIM)
    times = torch.tensor([[0.0, 0.5, 0.5, 2.0, 7.0, 7.25], [0.0, 3.0, 3.5, 4.0, 4.5, 9.0]])
    both = read(module, x, positions=times)[0]
    for row in range(2):
        alone = read(module, x[row : row + 1], positions=times[row : row + 1])[0]
        torch.testing.assert_close(both[row : row + 1], alone, atol=1e-6, rtol=1e-5)
    assert (both[0] - read(module, x[:1])[0][0]).abs().max() > 1e-2


def test_lags_beyond_the_length_trained_at():
    module, x = build(length=4), draw(1, 3 * TIME, DIM)
    whole, (first, state, ctx) = read(module, x)[0], read(module, x[:, :TIME])
    rest = read(module, x[:, TIME:], state, ctx.after)[0]
    torch.testing.assert_close(torch.cat((first, rest), 1), whole, atol=1e-5, rtol=1e-4)


def test_grouped_heads_are_repeated_key_heads():
    grouped, repeated, x = build(b=0.5), build(kv_heads=HEADS, b=0.5), draw(1, TIME, DIM)
    own, share = grouped.state_dict(), HEADS // KV_HEADS
    for name in ("k_proj.weight", "v_proj.weight"):
        own[name] = own[name].view(KV_HEADS, -1, DIM).repeat_interleave(share, 0).flatten(0, 1)
    for name in ("s2", "eta2", "gamma2"):
        own[name] = own[name].repeat_interleave(share, 0)
    repeated.load_state_dict(own)
    repeated._turns, repeated._mu = (t.repeat_interleave(share, 0) for t in (grouped._turns, grouped._mu))
    torch.testing.assert_close(read(grouped, x)[0], read(repeated, x)[0], atol=1e-5, rtol=1e-4)


def test_cache_holds_turned_keys_with_norms_and_times():
    module, x = build(), draw(2, TIME, DIM)
    _, state, _ = read(module, x)
    assert state.k.shape == (2, KV_HEADS, TIME, 2 * DH + 1) and state.v.shape == (2, KV_HEADS, TIME, 2 * DH)
    torch.testing.assert_close(state.k[..., -1], state.k[..., :-1].square().sum(-1))
    raw = module.v_proj(x).view(2, TIME, KV_HEADS, 2 * DH).transpose(1, 2)
    back = torch.exp(-1j * module._turns * torch.arange(TIME)[:, None])
    torch.testing.assert_close(as_complex(state.v), as_complex(raw) * back, atol=1e-5, rtol=1e-4)
    assert torch.equal(state.places, torch.arange(TIME).expand(2, -1))


@pytest.mark.parametrize("training", [True, False])
def test_rows_in_chunks_are_the_same_and_hold_less(monkeypatch, training):
    module, x = build(), draw(1, 256, DIM).requires_grad_(training)
    valid = torch.arange(256)[None] >= 5

    def outputs_and_gradients(pairs):
        monkeypatch.setattr(rfa, "PAIRS", pairs)
        with torch.set_grad_enabled(training), PeakMemory() as seen:
            y = read(module, x)[0]
            grads = torch.autograd.grad(y.square().sum(), (x, module.nu, module.s2)) if training else ()
        with torch.no_grad():
            return seen.peak, y, read(module, x, valid=valid)[0], *grads

    (whole_peak, *whole), (peak, *found) = (outputs_and_gradients(n) for n in (1 << 22, 1 << 13))
    for have, want in zip(found, whole):
        torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)
    assert peak < whole_peak / 4


def test_gradients_are_finite_and_reach_every_scalar():
    module, x = build(), draw(2, TIME, DIM)
    x[:, 3] = x[:, 2]  # equal tokens: residuals of almost 0
    valid = torch.ones(2, TIME, dtype=torch.bool)
    valid[0, :4] = False
    read(module, x, valid=valid)[0].square().sum().backward()
    for name, p in module.named_parameters():
        assert p.grad.isfinite().all() and p.grad.any(), name


def test_half_precision():
    module, x = build(), draw(2, TIME, DIM)
    want = read(module, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, state, _ = read(module, x)
    assert state.k.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, atol=0.03, rtol=0.05)
    torch.testing.assert_close(read(module.bfloat16(), x.bfloat16())[0].float(), want, atol=0.05, rtol=0.1)


# ------------------------------------------------------------------------------------------------------------ settings


def test_spectrum_of_rfa():
    turns, mu = spectrum(8, 6, 512, None)
    one_head = [10_000.0 ** (-r / 3) for r in range(3)]
    for head in turns[:, 0].tolist():
        assert head == pytest.approx([*one_head, *(-f for f in one_head)])
    times = (mu * 511 / 5).tolist()
    assert times[:2] == [0.0, 0.0] and times[2] == pytest.approx(0.01) and times[7] == pytest.approx(0.95)
    ratios = [b / a for a, b in pairwise(times[2:])]
    assert ratios == pytest.approx([ratios[0]] * 5)


def test_spectrum_of_sc_rfa():
    turns, mu = spectrum(4, 6, 512, 0.05)
    free = turns[:, 0, :3]
    assert torch.equal(turns[:, 0, 3:], -free)
    bank = sorted(10_000.0 ** (-k / 12) for k in range(12))
    assert free.flatten().tolist() == pytest.approx(bank)
    assert mu.tolist() == pytest.approx([0.05 * max(bank[3 * h : 3 * h + 3]) for h in range(4)])


def test_first_weights():
    torch.manual_seed(0)
    module = RFA().build(64, 4, 4, 16, 0, 1)
    for proj, gain in ((module.q_proj, 1.0), (module.v_proj, 1.0), (module.o_proj, 0.5)):
        assert proj.weight.var().item() == pytest.approx(gain / (64 + 64), rel=0.05)
        assert abs(proj.weight.mean().item()) < 0.003
    noise = module.noise()
    assert noise.process.flatten().tolist() == pytest.approx([0.1] * 4)
    assert noise.key.flatten().tolist() == pytest.approx([1.0] * 4, abs=1e-4)
    assert noise.query.flatten().tolist() == pytest.approx([1.01] * 4)
    assert F.softplus(module.nu).tolist() == pytest.approx([4.0] * 4)
    assert F.softplus(module.beta).tolist() == pytest.approx([1.3133] * 4, abs=1e-4)


def test_scalars_have_optimiser_settings_of_their_own():
    module = build()
    groups = make_optimiser(module, TrainConfig(steps=1, weight_decay=0.1)).param_groups
    own = {id(p): g for g in groups for p in g["params"]}
    for p in (module.s2, module.eta2, module.gamma2, module.nu, module.beta):
        group = own[id(p)]
        assert (group["lr_scale"], group["betas"], group["eps"], group["clip"]) == (0.5, (0.0, 0.999), 1e-7, 1e-4)
        assert group["weight_decay"] == 0.0
    assert own[id(module.q_proj.weight)]["clip"] is None


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("knobs", "says"), [
    ({"gamma2_floor": 0.0}, "gamma2_floor=0.0.*more than 0"), ({"gamma2_floor": -1.0}, "gamma2_floor=-1.0"),
    ({"b": -0.1}, "at least 0"), ({"length": 1}, "at least 2"), ({"weight": "students"}, "did you mean 'student'"),
    ({"s2": 0.0}, "at least 1e-06"),
])
def test_knobs_that_are_refused(knobs, says):
    with pytest.raises(Refused, match=says):
        RFA(**knobs)


def test_sizes_that_are_refused():
    with pytest.raises(Refused, match=r"5 complex channels.*such as 6"):
        RFA().build(DIM, HEADS, KV_HEADS, 5, 0, 1)
    with pytest.raises(Refused, match="n_kv_heads=3"):
        RFA().build(DIM, HEADS, 3, DH, 0, 1)
    with pytest.raises(Refused, match="dim=30"):
        DecoderConfig(8, dim=30, n_heads=4, mixer=RFA())
    with pytest.raises(Refused, match="takes no rotate"):
        DecoderConfig(8, dim=64, n_heads=4, mixer=RFA(), position="rope")


def test_time_never_goes_back():
    module, x = build(), draw(1, 4, DIM)
    with pytest.raises(Refused, match=r"token 2 of row 0 stands at 1.*don't decrease"):
        read(module, x, positions=torch.tensor([[0, 2, 1, 3]]))
    _, state, ctx = read(module, x)
    with pytest.raises(Refused, match="token 4 of row 0 stands at 2"):
        read(module, x[:, :1], state, ctx.after, positions=torch.tensor([[2]]))
    with pytest.raises(ValueError, match=r"positions should have shape \(1, 4\)"):
        read(module, x, positions=torch.arange(4))
    # Padding may stand anywhere, and a new document starts again.
    padded, valid = torch.tensor([[9, 0, 1, 2]]), torch.tensor([[False, True, True, True]])
    torch.testing.assert_close(read(module, x, positions=padded, valid=valid)[0][:, 1:], read(module, x[:, 1:])[0])
    segments = torch.tensor([[0, 0, 1, 1]])
    y = read(module, x, positions=torch.tensor([[5, 6, 0, 1]]), segments=segments)[0]
    torch.testing.assert_close(y[:, 2:], read(module, x[:, 2:])[0], atol=1e-6, rtol=1e-5)
