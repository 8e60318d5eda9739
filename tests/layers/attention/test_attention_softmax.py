"""Softmax attention against the definition, and what its state holds."""

import dataclasses
import math

import pytest
import torch

from longspan.kernels import attend
from longspan.layers import Context, PositionModule, Visible
from longspan.layers.attention.softmax import Softmax, sink_attention
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused
from longspan.training.peak import PeakMemory

DIM, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 4
SHAPE = (DIM, HEADS, KV_HEADS, HEAD_DIM, 0, 1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(module, x, position=None, window=None):
    """Row by row from the formula, in float64."""
    B, T, _ = x.shape
    q, k, v = (p(x).view(B, T, -1, HEAD_DIM).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    places = torch.arange(T).expand(B, T)
    position = position or PositionModule()
    q, k = position.rotate(q, k, places)
    bias = position.bias(places, places)
    out = torch.zeros(B, HEADS, T, HEAD_DIM, dtype=x.dtype)
    for h in range(HEADS):
        for i in range(T):
            seen = range(0 if window is None else max(0, i - window + 1), i + 1)
            key = k[:, h // 2, list(seen)]
            score = (key @ q[:, h, i, :, None])[..., 0] / HEAD_DIM**0.5
            if bias is not None:
                score = score + bias[0, h, i, list(seen)]
            out[:, h, i] = (score.softmax(-1)[..., None] * v[:, h // 2, list(seen)]).sum(1)
    return module.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("position", [None, Rope(), Alibi()], ids=str)
def test_equals_the_formula(window, position):
    torch.manual_seed(0)
    module = Softmax(window=window).build(*SHAPE).double()
    scheme = PositionModule() if position is None else position.build(*SHAPE)
    x = draw(2, 9, DIM).double()
    ctx = dataclasses.replace(Context.of(2, 9), position=scheme)
    got, _ = module(x, ctx)
    torch.testing.assert_close(got, by_hand(module, x, scheme, window), atol=1e-6, rtol=1e-6)


def read(module, x, n, before=None, state=None, **given):
    ctx = Context.of(x.shape[0], n, before=before, **given)
    y, state = module(x, ctx, state)
    return y, state, ctx.after


def test_what_a_window_drops_is_freed():
    """With one row and one head a slice is contiguous already; it must be a copy all the same."""
    module = Softmax(window=4).build(DIM, 1, 1, HEAD_DIM, 0, 1)
    for valid in (None, torch.ones(1, 50, dtype=torch.bool)):
        _, state, _ = read(module, draw(1, 50, DIM), 50, valid=valid)
        assert state.length == 3 and state.nbytes == 3 * (2 * HEAD_DIM * 4 + 8 + (0 if valid is None else 1))


def test_a_window_bounds_the_state():
    module = Softmax(window=4).build(*SHAPE)
    state, cursor, sizes = None, None, []
    for t in range(12):
        _, state, cursor = read(module, draw(2, 1, DIM, seed=t), 1, cursor, state)
        sizes.append((state.length, state.nbytes))
    assert [n for n, _ in sizes] == [1, 2, 3] + [3] * 9
    assert sizes[-1] == sizes[4]


def test_a_window_counts_real_tokens_not_columns():
    module = Softmax(window=3).build(*SHAPE)
    valid = torch.tensor([[True, True, True] + [False] * 6])
    _, state, _ = read(module, draw(1, 9, DIM), 9, valid=valid)
    assert state.valid.sum() == 2  # the last two real tokens stay, however much padding followed


def test_the_plain_state_holds_keys_and_values_only():
    module = Softmax().build(*SHAPE)
    _, state, _ = read(module, draw(2, 7, DIM), 7)
    assert state.nbytes == 2 * 2 * KV_HEADS * 7 * HEAD_DIM * 4
    assert state.valid is state.segments is state.order is state.places is None


def test_padding_that_appears_late_is_understood():
    module, x = Softmax().build(*SHAPE), draw(2, 6, DIM)
    _, state, cursor = read(module, x[:, :3], 3)
    valid = torch.tensor([[True, True, True], [False, True, True]])
    y, state, _ = read(module, x[:, 3:], 3, cursor, state, valid=valid)
    alone, _, _ = read(module, torch.cat((x[1:, :3], x[1:, 4:]), 1), 5)
    torch.testing.assert_close(y[1:, 1:], alone[:, 3:], atol=1e-5, rtol=1e-5)
    assert state.valid.shape == (2, 6)


def test_places_per_query_head_get_keys_of_their_own():
    class PerHead(PositionModule):
        hooks = frozenset({"rotate"})
        per_query_head = True

        def places(self, x, ctx):
            return ctx.positions[:, None] * torch.arange(1, HEADS + 1)[:, None] * 0.25

        def rotate(self, q, k, places):
            from longspan.layers import inverse_frequencies, rotate

            f = inverse_frequencies(HEAD_DIM)
            return rotate(q, places, f), rotate(k, places, f)

    module, x = Softmax().build(*SHAPE), draw(1, 5, DIM)
    ctx = dataclasses.replace(Context.of(1, 5), position=PerHead())
    whole, state = module(x, ctx)
    assert state.k.shape[1] == HEADS
    first = dataclasses.replace(Context.of(1, 4), position=PerHead())
    _, state = module(x[:, :4], first)
    last, _ = module(x[:, 4:], dataclasses.replace(Context.of(1, 1, before=first.after), position=PerHead()), state)
    torch.testing.assert_close(last, whole[:, 4:], atol=1e-5, rtol=1e-5)
    # Head 3 (scale 1.0) is ordinary RoPE, the others are not.
    rope = dataclasses.replace(Context.of(1, 5), position=Rope().build(*SHAPE))
    module.o_proj.weight.data = torch.eye(DIM)
    a, b = module(x, ctx)[0].view(5, HEADS, -1), module(x, rope)[0].view(5, HEADS, -1)
    torch.testing.assert_close(a[:, 3], b[:, 3], atol=1e-5, rtol=1e-5)
    assert (a[:, 0] - b[:, 0]).abs().max() > 1e-3


def test_heads_must_divide():
    with pytest.raises(Refused, match="n_kv_heads=3: expected a divisor of the 4 query heads"):
        Softmax().build(DIM, 4, 3, HEAD_DIM, 0, 1)
    with pytest.raises(Refused, match="window=0"):
        Softmax(window=0)


# ------------------------------------------------------------------------------------------------------------ the sink

CPU = torch.device("cpu")


def sink_inputs(T=6, S=9, dtype=torch.float64):
    shapes = (HEADS, T), (KV_HEADS, S), (KV_HEADS, S)
    return [draw(2, h, n, HEAD_DIM, seed=i).to(dtype).requires_grad_() for i, (h, n) in enumerate(shapes)]


def with_a_further_key(q, k, v, sink, see, bias=0.0):
    """A key with score c_h and value 0, in front of all, in plain softmax attention."""
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.mT / HEAD_DIM**0.5 + bias).masked_fill(~see, -math.inf)
    number = sink[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat((number, scores), -1).softmax(-1)
    return weights @ torch.cat((torch.zeros_like(v[:, :, :1]), v), 2)


@pytest.mark.parametrize("T", [1, 6, 9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_sink_is_a_further_key_of_value_zero(T, masked, biased):
    inputs, sink = sink_inputs(T), draw(HEADS, seed=5).double().requires_grad_()
    see = torch.ones(T, 9, dtype=torch.bool).tril(9 - T)[None, None]
    if masked:
        see = see & (draw(2, 1, T, 9, seed=6) > -0.5)
        see[0, 0, 0] = False
    bias = draw(1, HEADS, T, 9, seed=7).double() if biased else None
    visible = Visible(T, 9, see if masked else None, CPU)
    want = with_a_further_key(*inputs, sink, see, 0.0 if bias is None else bias)
    got = sink_attention(*inputs, visible, sink, bias)
    torch.testing.assert_close(got, want)
    up = draw(*got.shape, seed=8).double()
    for have, need in zip(*(torch.autograd.grad((x * up).sum(), [*inputs, sink]) for x in (got, want))):
        torch.testing.assert_close(have, need)
    with torch.no_grad():  # from the log-sum-exp
        torch.testing.assert_close(sink_attention(*inputs, visible, sink, bias), want)
    if masked:
        assert not got[0, :, 0].any()


@pytest.mark.parametrize("trained", [False, True])
def test_a_sink_of_minus_infinity_is_none_and_one_of_zero_adds_one(trained):
    inputs = sink_inputs(9)
    visible = Visible(9, 9, None, CPU)
    with torch.set_grad_enabled(trained):
        none = sink_attention(*inputs, visible, torch.full((HEADS,), -math.inf))
        one = sink_attention(*inputs, visible, torch.zeros(HEADS))
    plain, lse = attend(*inputs)
    torch.testing.assert_close(none, plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(one, plain * (lse.exp() / (1 + lse.exp()))[..., None])


@pytest.mark.parametrize("trained", [False, True])
def test_a_sink_makes_no_matrix_of_scores(trained):
    n = 512
    q, k, v = (draw(1, 2, n, 16, seed=s).requires_grad_(trained) for s in range(3))
    with PeakMemory() as seen:
        out = sink_attention(q, k, v, Visible(n, n, None, CPU), torch.zeros(2))
        if trained:
            out.sum().backward()
    assert seen.largest < n * n / 4


@pytest.mark.parametrize("knobs", [Softmax(sink=True), Softmax(sink=True, window=4)], ids=str)
@pytest.mark.parametrize("position", [Rope(), Alibi()], ids=str)
def test_a_sink_keeps_the_contract(contract, knobs, position):
    contract(knobs, position).check_all()


def test_a_sink_is_one_number_a_head_and_starts_at_zero():
    module = Softmax(sink=True).build(*SHAPE)
    assert torch.equal(module.sink, torch.zeros(HEADS)) and module.sink.requires_grad
    assert Softmax().build(*SHAPE).sink is None
    module.bfloat16()
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            y, _ = module(draw(1, 5, DIM).bfloat16(), Context.of(1, 5))
        assert y.dtype == torch.bfloat16 and y.isfinite().all()


def test_a_window_of_one_token_holds_nothing_and_goes_on():
    """Also when padding was told before and isn't any more."""
    module, x = Softmax(window=1).build(*SHAPE), draw(2, 5, DIM)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    _, state, cursor = read(module, x[:, :3], 3, valid=valid)
    assert state.length == 0
    y, _, _ = read(module, x[:, 3:], 2, cursor, state)
    torch.testing.assert_close(y, read(module, x[:, 3:], 2)[0])
