"""GOAT's prior in both of its forms, the transport problem it solves, its limits, its cost, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F

from longspan.kernels import attend
from longspan.layers import Context, KVState
from longspan.layers.attention.goat import Goat
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.base import slopes
from longspan.models.decoder import DecoderConfig
from longspan.registry import Refused
from longspan.training.config import TrainConfig
from longspan.training.optimiser import make_optimiser
from longspan.training.peak import PeakMemory

DIM, HEADS, KV_HEADS, HEAD_DIM, TIME = 16, 4, 2, 12, 24


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(heads=HEADS, kv_heads=KV_HEADS, busy=True, **knobs):
    """A module at the test size; `busy` fills its prior with numbers that matter."""
    torch.manual_seed(0)
    knobs = {"R": 2, "M": 2, "length": 32} | knobs
    module = Goat(**knobs).build(DIM, heads, kv_heads, HEAD_DIM, 0, 1).eval()
    if busy:
        with torch.no_grad():
            for p in module.prior.parameters():
                p.normal_(std=0.7)
    return module


def read(module, x, state=None, before=None, **given):
    ctx = Context.of(*x.shape[:2], before=before, **given)
    y, state = module(x, ctx, state)
    return y, state, ctx


def lanes(module, q, k, places):
    """q^ and k^ of content drawn by the test, at these places."""
    ctx = Context.of(len(q), q.shape[2], positions=places)
    return module.turned(q, k, ctx)


def content(module, seed=0, batch=1, time=TIME, size=1.0):
    """Queries (B,H,T,d_c) and keys (B,G,T,d_c), and the places 0, 1, ..."""
    q = draw(batch, module.n_heads, time, module.content, seed=seed) * size
    k = draw(batch, module.n_kv_heads, time, module.content, seed=seed + 1) * size
    return q, k, torch.arange(time).expand(batch, time)


def scores(q, k):
    """Every query head with its key head."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def causal(z):
    return z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


# ------------------------------------------------------------------------------------------------------ the two forms


@pytest.mark.parametrize("key_term", [True, False])
@pytest.mark.parametrize("R", [0, 1, 3])
def test_factored_scores_are_content_plus_the_prior_written_out(R, key_term):
    module = build(R=R, key_term=key_term)
    q, k, places = content(module, batch=2)
    prior = module.prior.log_prior(places, places).repeat_interleave(HEADS // KV_HEADS, 1)
    want = scores(q, k) / module.content**0.5 + prior
    torch.testing.assert_close(scores(*lanes(module, q, k, places)), want, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_prior_written_out_through_flex_attention_is_the_same():
    from torch.nn.attention.flex_attention import flex_attention

    module, x = build(), draw(2, TIME, DIM)
    y = read(module, x)[0]
    q, k, v = module.project(x, Context.of(2, TIME))
    places = torch.arange(TIME)[None]
    prior = module.prior.log_prior(places, places)[0].repeat_interleave(HEADS // KV_HEADS, 0)

    def add_prior(score, b, h, i, j):
        return torch.where(i >= j, score + prior[h, i, j], -math.inf)

    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    with torch.no_grad():
        out = flex_attention(*(t.detach() for t in (q, k, v)), score_mod=add_prior, scale=module.content**-0.5)
    torch.testing.assert_close(y, module.output(out, x), atol=1e-5, rtol=1e-5)


def test_even_and_odd_parts_and_a_common_shift():
    module = build(key_term=False)
    prior, places = module.prior, torch.arange(TIME)[None]
    both = prior.log_prior(places, places)
    shifted = places + 1000
    torch.testing.assert_close(prior.log_prior(shifted, shifted), both)
    q, k, _ = content(module)
    moved = scores(*lanes(module, q, k, shifted))
    torch.testing.assert_close(moved, scores(*lanes(module, q, k, places)), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        sine = prior.sine.clone()
        prior.sine.zero_()
        even = prior.log_prior(places, places)
        prior.sine.copy_(sine)
        prior.cosine.zero_()
        odd = prior.log_prior(places, places)
    torch.testing.assert_close(even, even.mT)
    torch.testing.assert_close(odd, -odd.mT)
    assert even.abs().max() > 0.1 and odd.abs().max() > 0.1
    torch.testing.assert_close(even + odd, both)


def test_key_term_as_written():
    module = build()
    prior, j = module.prior, torch.tensor([[0, 1, 7, 50]])
    v = [1.0, 1e-4]
    rows = []
    for place in j[0].tolist():
        phi = [math.cos(f * place) for f in v] + [math.sin(f * place) for f in v]
        phi += [place / 32, math.log(1 + place) / math.log(33)]
        hidden = F.silu(prior.inner.weight @ torch.tensor(phi) + prior.inner.bias)
        value = (prior.outer.weight @ hidden + prior.outer.bias)[0]
        rows.append(prior.gain * value + prior.bump * (place == 0) + F.softplus(prior.slope) * place)
    want = torch.stack(rows, -1)
    torch.testing.assert_close(prior.of_place(j)[0], want, atol=1e-5, rtol=1e-5)
    prior.scale = 0.25
    torch.testing.assert_close(prior.of_place(j)[0], want / 4, atol=1e-5, rtol=1e-5)
    assert (prior.inner.in_features, prior.inner.out_features) == (6, 4)


# -------------------------------------------------------------------------------------------------------- known limits


def test_a_uniform_start_is_softmax_over_the_content():
    module = build(busy=False, init="uniform")
    q, k, places = content(module)
    hats = lanes(module, q, k, places)
    v = draw(1, KV_HEADS, TIME, HEAD_DIM, seed=5)
    got = attend(*hats, v, scale=1.0, causal=False)[0]
    torch.testing.assert_close(got, attend(q, k, v, causal=False)[0], atol=1e-6, rtol=0)
    x = draw(1, 1024, DIM, seed=6)
    long_q, long_k, long_v = module.project(x, Context.of(1, 1024))
    want = module.output(attend(long_q, long_k, long_v)[0], x)
    torch.testing.assert_close(read(module, x)[0], want, atol=1e-5, rtol=0)


def test_without_waves_and_network_it_is_alibi():
    module = build(kv_heads=HEADS, busy=False, R=0)
    torch.nn.init.zeros_(module.prior.outer.weight)
    q, k, places = content(module)
    bias = Alibi().build(DIM, HEADS, HEADS, HEAD_DIM, 0, 1).bias(places, places)
    want = causal(scores(q, k) / module.content**0.5 + bias).softmax(-1)
    got = causal(scores(*lanes(module, q, k, places))).softmax(-1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_it_starts_near_alibi_over_the_key_heads():
    prior = build(busy=False).prior
    torch.testing.assert_close(F.softplus(prior.slope), slopes(KV_HEADS))
    assert 0 < prior.cosine.abs().max() < 0.05 and not prior.sine.any() and not prior.bump.any()
    assert (prior.gain == 1).all() and prior.inner.weight.abs().max() < 0.01


def test_a_constant_changes_nothing_and_a_strong_first_key_takes_all():
    module, x = build(), draw(1, TIME, DIM)
    y = read(module, x)[0]
    with torch.no_grad():
        module.prior.outer.bias += 3.0 / module.prior.gain.abs().max()
    torch.testing.assert_close(read(module, x)[0], y, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for p in module.prior.parameters():
            p.zero_()
        module.prior.slope.fill_(-30.0)
        module.prior.bump.fill_(50.0)
    v = module.project(x, Context.of(1, TIME))[2].repeat_interleave(HEADS // KV_HEADS, 1)
    first = v[:, :, :1].expand(-1, -1, TIME, -1)
    torch.testing.assert_close(read(module, x)[0], module.output(first, x), atol=1e-6, rtol=0)


def test_a_sink_that_is_padded_loses_its_prior():
    module, x = build(), draw(1, TIME, DIM)
    with torch.no_grad():
        module.prior.bump.fill_(50.0)
    valid = torch.arange(TIME)[None] >= 3
    y = read(module, torch.where(valid[..., None], x, 9.0), valid=valid)[0]
    torch.testing.assert_close(y[:, 3:], read(module, x[:, 3:])[0], atol=1e-5, rtol=1e-5)


def test_one_token_reads_its_own_value():
    module, x = build(), draw(1, 1, DIM)
    v = module.project(x, Context.of(1, 1))[2].repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(read(module, x)[0], module.output(v, x))


# --------------------------------------------------------------------------------------------- the transport problem


def weights(module, q, k, places):
    """Attention weights as the fused kernel has them: the outputs for values that are the unit vectors."""
    q, k = lanes(module, q, k, places)
    unit = torch.eye(TIME).expand(len(q), KV_HEADS, -1, -1)
    return attend(q, k, unit, scale=1.0)[0]


def test_it_solves_the_transport_problem():
    module = build()
    q, k, places = content(module)
    p = weights(module, q, k, places)[0, :, -1].double()
    s = (scores(q, k) / module.content**0.5)[0, :, -1].double()
    prior = module.prior.log_prior(places, places)[0, :, -1].repeat_interleave(HEADS // KV_HEADS, 0).double()
    log_pi = prior.log_softmax(-1)

    def cost(p):
        return (torch.xlogy(p, p) - p * (s + log_pi)).sum(-1)

    best = cost(p)
    torch.testing.assert_close(best, -(s + log_pi).logsumexp(-1), atol=1e-6, rtol=0)
    others = torch.distributions.Dirichlet(torch.full((TIME,), 0.5).double())
    torch.manual_seed(1)
    near = 0.95 * p + 0.05 * others.sample((500, HEADS))
    for points in (others.sample((500, HEADS)), near):
        assert (cost(points) > best).all()


def test_weak_content_lands_on_the_prior():
    module = build()
    q, k, places = content(module)
    prior = module.prior.log_prior(places, places).repeat_interleave(HEADS // KV_HEADS, 1)
    pi = causal(prior).softmax(-1)
    silent = weights(module, torch.zeros_like(q), k, places)
    torch.testing.assert_close(silent, pi, atol=1e-6, rtol=0)
    s = causal(scores(q, k) / module.content**0.5)
    delta = s.amax(-1) - s.masked_fill(s.isinf(), math.inf).amin(-1)
    moved = (weights(module, q, k, places) - pi).abs().sum(-1) / 2
    assert (moved <= torch.tanh(delta / 4) + 1e-6).all() and moved.max() > 0.05


# ------------------------------------------------------------------------------------------- caches, heads, the gate


@pytest.mark.parametrize("gate", ["none", "content"])
def test_cached_decoding_is_the_full_forward(gate):
    module, x = build(gate=gate), draw(2, TIME, DIM)
    if gate == "content":
        with torch.no_grad():
            module.gate_slope.fill_(0.0)
            module.gate_open.fill_(1.0)
    whole = read(module, x)[0]
    y, state, ctx = read(module, x[:, :10])
    parts = [y]
    for t in range(10, TIME):
        y, state, ctx = read(module, x[:, t : t + 1], state, ctx.after)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


def test_grouped_heads_are_repeated_key_heads():
    grouped, repeated, x = build(), build(kv_heads=HEADS), draw(1, TIME, DIM)
    own = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        own[name] = own[name].view(KV_HEADS, -1, DIM).repeat_interleave(HEADS // KV_HEADS, 0).flatten(0, 1)
    for name in ("cosine", "sine", "gain", "bump", "slope"):
        own[f"prior.{name}"] = own[f"prior.{name}"].repeat_interleave(HEADS // KV_HEADS, 0)
    repeated.load_state_dict(own)
    torch.testing.assert_close(read(grouped, x)[0], read(repeated, x)[0], atol=1e-5, rtol=0)


def test_the_gate_fades_the_prior_where_content_is_strong():
    plain, gated, x = build(), build(gate="content"), draw(1, TIME, DIM)
    plain.load_state_dict(gated.state_dict(), strict=False)
    torch.testing.assert_close(read(gated, x)[0], read(plain, x)[0], atol=1e-3, rtol=0)  # open at the start
    with torch.no_grad():
        gated.gate_slope.fill_(2.0)
    q, k, places = content(gated)
    opened = torch.sigmoid(10.0 - F.softplus(torch.tensor(2.0)) * q.norm(dim=-1))[..., None]
    prior = gated.prior.log_prior(places, places).repeat_interleave(HEADS // KV_HEADS, 1)
    want = scores(q, k) / gated.content**0.5 + opened * prior
    torch.testing.assert_close(scores(*lanes(gated, q, k, places)), want, atol=1e-4, rtol=1e-4)


def test_weight_decay_spares_the_prior():
    module = build(gate="content")
    groups = make_optimiser(module, TrainConfig(steps=1, weight_decay=0.1)).param_groups
    decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    prior = module.prior
    for p in (prior.cosine, prior.sine, prior.slope, prior.bump, prior.gain, module.gate_slope, module.gate_open):
        assert decays[id(p)] == 0.0
    assert decays[id(module.q_proj.weight)] == 0.1


# ------------------------------------------------------------------------------------------------ half precision, cost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_prior_at_any_place(dtype):
    module = build(busy=False, R=1)
    places = torch.arange(30_000, 30_000 + TIME)[None]
    q, k, _ = content(module, size=0.1)
    half = [t.to(dtype) for t in (q, k)]
    got = causal(scores(*(t.double() for t in lanes(module, *half, places)))).softmax(-1)
    want = causal(scores(*(t.double() for t in lanes(module.double(), q.double(), k.double(), places)))).softmax(-1)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("whole_model", [True, False])
def test_a_model_in_half_precision(whole_model):
    module, x = build(gate="content"), draw(2, TIME, DIM)
    want = read(module, x)[0]
    if whole_model:
        module, x = module.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not whole_model):
        y = read(module, x)[0]
        first, state, ctx = read(module, x[:, :20])
        rest = read(module, x[:, 20:], state, ctx.after)[0]
    torch.testing.assert_close(y.float(), want, atol=0.05, rtol=0.1)
    torch.testing.assert_close(torch.cat((first, rest), 1), y, atol=0.02, rtol=0.05)
    assert state.k.dtype == torch.bfloat16


def test_no_matrix_of_all_pairs_is_made():
    S, module = 1024, build()
    x = draw(1, S, DIM).requires_grad_()
    with PeakMemory() as seen:
        y = read(module, x)[0]
        y.square().sum().backward()
    assert 0 < seen.largest < S * S / 8
    assert x.grad.isfinite().all() and module.prior.cosine.grad.any() and module.prior.slope.grad.all()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("knobs", "says"), [
    ({"R": -1}, "R=-1.*at least 0"), ({"M": -1}, "M=-1.*at least 0"), ({"length": 0}, "length=0.*at least 1"),
    ({"init": "seed"}, "did you mean 'seeded'"), ({"gate": "contents"}, "did you mean 'content'"),
])
def test_knobs_that_are_refused(knobs, says):
    with pytest.raises(Refused, match=says):
        Goat(**knobs)


@pytest.mark.parametrize(("R", "head_dim", "says"), [
    (2, 5, "5 channels is too small for a prior of 5; expected R=1 or less"),
    (4, 8, "8 channels is too small for a prior of 9; expected R=3 or less"),
    (0, 1, "1 channels is too small for a prior of 1; expected wider heads"),
])
def test_heads_without_room_for_content_are_refused(R, head_dim, says):
    with pytest.raises(Refused, match=says):
        Goat(R=R).build(DIM, HEADS, KV_HEADS, head_dim, 0, 1)
    Goat(R=R).build(DIM, HEADS, KV_HEADS, 2 * R + 2, 0, 1)


def test_sizes_that_are_refused():
    for kv_heads in (3, 0):
        with pytest.raises(Refused, match=f"n_kv_heads={kv_heads}"):
            Goat(R=2).build(DIM, HEADS, kv_heads, HEAD_DIM, 0, 1)
    with pytest.raises(Refused, match="dim=30"):
        DecoderConfig(8, dim=30, n_heads=4, mixer=Goat(R=1))
    with pytest.raises(Refused, match="takes no bias"):
        DecoderConfig(8, dim=64, n_heads=4, mixer=Goat(R=1), position="alibi")


def test_a_cache_that_does_not_fit():
    module, x = build(), draw(1, 2, DIM)
    for heads, width in ((KV_HEADS + 1, HEAD_DIM), (KV_HEADS, HEAD_DIM - 1)):
        held = KVState(draw(1, heads, 3, width), draw(1, heads, 3, HEAD_DIM))
        with pytest.raises(ValueError, match=rf"\(1, {heads}, 3, {width}\)"):
            read(module, x, held)
