"""The mixer plash: softmax attention within its window, the same in any cut, a state of fixed size, and bounds that hold."""

import dataclasses

import pytest
import torch

from longspan.kernels import attend
from longspan.layers import Context, PositionModule
from longspan.layers.attention.plash import BOUND, FEW_TOKENS, Plash, PlashAttention
from longspan.layers.attention.prototype_attention import prototype_attention
from longspan.layers.attention.softmax import Softmax
from longspan.layers.positions.none import NoPositions
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused
from longspan.training.peak import PeakMemory

DIM, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 8
SHAPE = (DIM, HEADS, KV_HEADS, HEAD_DIM, 0, 1)
SMALL = {"M": 3, "C": 2, "n_exact": 1, "D_s": 8}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(dtype=torch.float32, seed=0, **knobs) -> PlashAttention:
    torch.manual_seed(seed)
    return Plash(**(SMALL | knobs)).build(*SHAPE).to(dtype).eval()


def run(module, q, k, v, cuts=None, valid=None, segments=None):
    """Outputs and bounds of `attention`, read in pieces."""
    state = before = None
    outs, limits, a = [], [], 0
    for n in cuts or [q.shape[2]]:
        part = slice(a, a + n)
        given = [None if t is None else t[:, part] for t in (valid, segments)]
        ctx = Context.of(len(q), n, valid=given[0], segments=given[1], before=before)
        out, limit, state = module.attention(q[:, :, part], k[:, :, part], v[:, :, part], ctx, state)
        outs.append(out)
        limits.append(limit)
        before, a = ctx.after, a + n
    return torch.cat(outs, 2), torch.cat(limits, 2), state


def problem(time, seed=0, dtype=torch.float64, batch=1, scale=1.0):
    return (scale * draw(batch, HEADS, time, HEAD_DIM, seed=seed, dtype=dtype),
            scale * draw(batch, KV_HEADS, time, HEAD_DIM, seed=seed + 1, dtype=dtype),
            draw(batch, KV_HEADS, time, HEAD_DIM, seed=seed + 2, dtype=dtype))


# ------------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("knobs", [
    {}, {"topr": 1}, {"topr": 3}, {"gate": 0.5}, {"gate": 0.5, "degrees": "2,3"}, {"mass": False}, {"n_exact": 0}, {"C": 1},
    {"C": 3, "n_exact": 3}, {"degrees": ""}, {"certificate": False}, {"C": 5, "M": 1, "topr": 1}], ids=str)
@pytest.mark.parametrize("position", [NoPositions(), Rope()], ids=str)
def test_contract_with_chunks_far_shorter_than_the_text(contract, knobs, position):
    contract(Plash(**(SMALL | knobs)), position).check_all()


# ------------------------------------------------------------------------------------------------- against other forms


@pytest.mark.parametrize("time", [1, 5, 8, 9, 16])
def test_up_to_two_chunks_it_is_softmax_attention(time):
    module, x = build(C=8), draw(2, time, DIM)
    twin = Softmax().build(*SHAPE).eval()
    twin.load_state_dict(module.state_dict(), strict=False)
    ctx = dataclasses.replace(Context.of(2, time), position=Rope().build(*SHAPE))
    torch.testing.assert_close(module(x, ctx)[0], twin(x, ctx)[0], atol=1e-6, rtol=1e-5)
    assert all(not limit.any() for limit in ctx.auxiliary[BOUND])


def test_whole_chunked_and_streamed_agree_in_outputs_and_bounds():
    module, parts = build(gate=0.4, C=4, n_exact=2, degrees="2,3"), problem(30, batch=2)
    module.double()
    whole = run(module, *parts)
    assert whole[1][:, :, 8:].min() > 0
    for cuts in ([1] * 30, [FEW_TOKENS, 1, FEW_TOKENS + 1, 2, 10], [4] * 7 + [2], [29, 1]):
        for have, want in zip(run(module, *parts, cuts)[:2], whole[:2]):
            torch.testing.assert_close(have, want, atol=1e-10, rtol=1e-8)


def test_padding_and_documents_change_no_bound_and_no_chunk():
    module, (q, k, v) = build(torch.float64, C=2), problem(24)
    want_out, want_limit, _ = run(module, q[:, :, 7:20], k[:, :, 7:20], v[:, :, 7:20])
    segments, valid = torch.zeros(1, 24, dtype=torch.long), torch.ones(1, 24, dtype=torch.bool)
    segments[:, 7:20], valid[:, 20:] = 1, False
    for cuts in (None, [1] * 24, [5, 9, 10]):
        out, limit, _ = run(module, q, k, v, cuts, valid, segments)
        torch.testing.assert_close(out[:, :, 7:20], want_out)
        torch.testing.assert_close(limit[:, :, 7:20], want_limit)
        assert not limit[:, :, 20:].any()
    assert want_limit[:, :, 6:].min() > 0


@pytest.mark.parametrize("gate", [0.0, 0.7])
def test_the_last_query_reads_what_the_batch_form_makes_of_the_same_keys(gate):
    """Keys outside the window through the form for whole sets, the window beside them, in one softmax."""
    C, time, n = 4, 19, 2
    module = build(torch.float64, C=C, n_exact=n, gate=gate, topr=2)
    q, k, v = problem(time)
    old = (time - 1) // C * C - C
    past = prototype_attention(q[:, :, -1:], k[:, :, :old], v[:, :, :old], module.u, module.b, n_exact=n,
                               enrichment=module.enrichment).prototypes
    keys = torch.cat((past.k, k[:, :, old:]), 2).repeat_interleave(2, 1)
    values = torch.cat((past.v, v[:, :, old:]), 2).repeat_interleave(2, 1)
    mass = torch.cat((past.mass, torch.ones_like(k[:, :, old:, 0])), 2).repeat_interleave(2, 1)
    weights = (q[:, :, -1:] @ keys.mT * HEAD_DIM**-0.5 + mass.log()[:, :, None]).softmax(-1)
    torch.testing.assert_close(run(module, q, k, v)[0][:, :, -1:], weights @ values, atol=1e-12, rtol=1e-9)


def test_equal_old_keys_are_exact():
    """All keys that leave the window are one and the same: prototypes lose nothing, whatever the gates, and say so."""
    q, k, v = problem(20)
    k[:, :, :16], v[:, :, :16] = k[:, :, :1], v[:, :, :1]
    out, limit, _ = run(build(torch.float64, C=2, gate=3.0), q[:, :, -2:].repeat(1, 1, 10, 1), k, v)
    want = attend(q[:, :, -2:].repeat(1, 1, 10, 1), k, v)[0]
    torch.testing.assert_close(out[:, :, 18:], want[:, :, 18:], atol=1e-10, rtol=1e-9)
    assert limit.max() < 1e-9


# -------------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("topr", [1, 2, 3])
def test_the_bound_is_never_broken(topr):
    """1,000 texts for every topr: short chunks, random gates, keys from tiny to large, mass or not."""
    dice, rows, used = torch.Generator().manual_seed(topr), 0, []
    for seed in range(10):
        knobs = {"gate": (0.0, 0.5, 2.0)[seed % 3], "C": (1, 2, 3)[seed % 3], "mass": seed % 5 != 4}
        module = build(torch.float64, seed=seed, topr=topr, **knobs)
        q, k, v = problem(17, seed=100 * seed, batch=100)
        k = k * torch.rand(100, 1, 1, 1, generator=dice, dtype=k.dtype) * 4
        out, limit, _ = run(module, q, k, v)
        error = (out - attend(q, k, v)[0]).norm(dim=-1)
        assert bool((error <= limit + 1e-12).all())
        rows, used = rows + len(q), [*used, float((error / limit)[limit > 1e-6].detach().mean())]
    assert rows == 1000 and 0.005 < sum(used) / len(used) < 1


def test_the_layer_reports_the_norm_over_heads():
    module, x = build(), draw(2, 12, DIM)
    ctx = dataclasses.replace(Context.of(2, 12), position=Rope().build(*SHAPE))
    module(x, ctx)
    (reported,) = ctx.auxiliary[BOUND]
    q, new, _ = module.read(x, ctx, None)
    out, limit, _ = module.attention(q, new.k, new.v, ctx)
    torch.testing.assert_close(reported, limit.square().sum(1).sqrt())
    error = (out - attend(q, new.k, new.v)[0]).transpose(1, 2).flatten(2).norm(dim=-1)
    assert reported.shape == (2, 12) and not reported.requires_grad and bool((error <= reported + 1e-5).all())


def test_without_certificate_nothing_is_reported_and_outputs_are_the_same():
    x, ctx, other = draw(1, 12, DIM), Context.of(1, 12), Context.of(1, 12)
    assert torch.equal(build()(x, ctx)[0], build(certificate=False)(x, other)[0])
    assert BOUND in ctx.auxiliary and BOUND not in other.auxiliary


# --------------------------------------------------------------------------------------------- state, sketches, training


def test_the_state_has_one_size_at_any_length():
    module = build()
    sizes = set()
    for time in (1, 9, 60):
        state = module(draw(2, time, DIM), Context.of(2, time))[1]
        sizes.add(state.nbytes)
    assert len(sizes) == 1


def test_memory_grows_with_the_text_and_not_with_its_square():
    module, largest = build(C=16, M=8), []
    for time in (512, 1024):
        with PeakMemory() as seen, torch.no_grad():
            module(draw(1, time, DIM), Context.of(1, time))
        largest.append(seen.largest)
    assert largest[1] <= 2.2 * largest[0] and largest[1] < 1024 * 1024 / 4


def test_position_schemes_that_repeat_keys_for_every_query_head():
    class Repeating(PositionModule):
        per_query_head = True

    module, x = build(gate=0.5), draw(1, 12, DIM)
    plain = Context.of(1, 12)
    want = module(x, plain)[0]
    repeated = dataclasses.replace(Context.of(1, 12), position=Repeating())
    torch.testing.assert_close(module(x, repeated)[0], want)
    torch.testing.assert_close(repeated.auxiliary[BOUND][0], plain.auxiliary[BOUND][0])


def test_mass_in_the_state_counts_the_tokens_that_left_the_window():
    module, time = build(C=2, n_exact=1, topr=2), 11
    state = run(module, *problem(time, dtype=torch.float32))[2]
    torch.testing.assert_close(state.sums[..., 0].sum(-1), torch.full((1, KV_HEADS), 8.0 - 1))  # chunks 0 to 3, without key 0
    assert state.count.tolist() == [time]


def test_closed_gates_cost_nothing_outside_training_and_learn_in_it():
    module, x = build(), draw(1, 12, DIM)
    assert module.enrichment.active() == () and module(x, Context.of(1, 12))[1].sums.shape[-1] == 1 + 2 * HEAD_DIM
    module.train()
    out, state = module(x, Context.of(1, 12))
    assert state.sums.shape[-1] == 1 + 2 * HEAD_DIM + 2 * SMALL["D_s"]
    torch.testing.assert_close(out, build()(x, Context.of(1, 12))[0], atol=1e-6, rtol=1e-5)
    out.square().sum().backward()
    for name in ("u", "b"):
        assert getattr(module, name).grad.abs().max() > 0
    assert module.enrichment.gates.grad.abs().max() > 0
    with torch.no_grad():
        module.enrichment.gates.fill_(1.0)
    assert (module(x, Context.of(1, 12))[0] - out).abs().max() > 1e-4
    with pytest.raises(ValueError, match="gates opened"):
        build(gate=1.0)(x, Context.of(1, 12), build()(x, Context.of(1, 12))[1])


def test_half_precision_agrees_with_float32():
    x = draw(1, 24, DIM)
    want = build(gate=0.5)(x, Context.of(1, 24))[0]
    have = build(torch.bfloat16, gate=0.5)(x.bfloat16(), Context.of(1, 24))[0]
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.float(), want, atol=0.05, rtol=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = build(gate=0.5)(x, Context.of(1, 24))[0]
    torch.testing.assert_close(under.float(), want, atol=0.05, rtol=0.1)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("knobs", "says"), [
    ({"M": 0}, "at least 1"), ({"topr": 5, "M": 4}, "topr=4"), ({"topr": 0}, "at least 1"), ({"D_s": 1}, "at least 2"),
    ({"gate": -0.1}, "at least 0"), ({"n_exact": 9, "C": 8}, "n_exact=8"), ({"C": 0}, "at least 1"), ({"tau_a": 0.0}, "at least"),
    ({"degrees": "1"}, "from 2 on"), ({"degrees": "2,2"}, "different"), ({"degrees": "two"}, "from 2 on"),
    ({"eps": 0.1, "topr": 8}, "0.0625 or less")])
def test_settings_that_make_no_sense_are_refused(knobs, says):
    with pytest.raises(Refused, match=says):
        Plash(**knobs)


def test_nan_keys_are_refused_and_nan_padding_is_not_looked_at():
    module, (q, k, v) = build(), problem(9, dtype=torch.float32)
    clean = run(module, q, k, v, valid=torch.arange(9)[None] != 4)
    k[:, :, 4], v[:, :, 4] = float("nan"), float("nan")
    for have, want in zip(run(module, q, k, v, valid=torch.arange(9)[None] != 4)[:2], clean[:2]):
        assert torch.equal(have, want)
    with pytest.raises(Refused, match="NaN"):
        run(module, q, k, v)
