"""L2A's layer against two plain attentions, its gate in values and gradients, its two stores, and what it refuses."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from longspan.kernels import attend, attend_rows
from longspan.layers import Context
from longspan.layers.attention.l2a import FIRES, L2A, OPEN, Gate, L2AModule, open_gate, prune
from longspan.layers.attention.softmax import Softmax
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused

DIM, HEADS, KV_HEADS, HEAD_DIM, TIME = 16, 4, 2, 4, 12
SHAPE = (DIM, HEADS, KV_HEADS, HEAD_DIM, 0, 1)
ROPE = Rope().build(*SHAPE)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(router=1.0, seed=0, **knobs) -> L2AModule:
    torch.manual_seed(seed)
    module = L2A(**({"window": 4} | knobs)).build(*SHAPE).eval()
    torch.nn.init.normal_(module.router.weight, std=router or 1.0)
    if not router:
        torch.nn.init.zeros_(module.router.weight)
    return module


def read(module, x, state=None, before=None, residual=None, **given):
    ctx = Context.of(*x.shape[:2], before=before, **given)
    ctx = dataclasses.replace(ctx, residual=x if residual is None else residual, position=ROPE)
    y, state = module(x, ctx, state)
    return y, state, ctx


def always(fire: bool):
    """A router that lets everything, or nothing, through."""
    return lambda u, ctx: Gate(torch.full(u.shape[:2], 0.5), torch.full(u.shape[:2], fire))


def softmax_twin(module, window=None):
    """Plain attention with a part's weights."""
    twin = Softmax(window=window).build(*SHAPE).eval()
    twin.load_state_dict(module.state_dict())
    return twin


# ---------------------------------------------------------------------------------------------------------- the layer


def test_gate_of_ones_is_two_dense_attentions():
    module, x = build(), draw(2, TIME, DIM)
    module.gate = always(True)
    y, _, ctx = read(module, x)
    local, _ = softmax_twin(module.local, 4)(x, ctx)
    everything, _ = softmax_twin(module.everything)(module.norm(x + local), ctx)
    torch.testing.assert_close(y, local + everything, atol=1e-5, rtol=1e-5)
    assert everything.abs().max() > 1e-2


def test_gate_of_zeros_is_the_local_model_bit_for_bit():
    module, x = build(), draw(2, TIME, DIM)
    module.gate = always(False)
    y, _, ctx = read(module, x)
    assert torch.equal(y, softmax_twin(module.local, 4)(x, ctx)[0])


@pytest.mark.parametrize("window", [TIME, TIME + 1, 500])
def test_a_wide_window_is_full_attention(window):
    module, x = build(window=window), draw(2, TIME, DIM)
    module.gate = always(False)
    y, _, ctx = read(module, x)
    assert torch.equal(y, softmax_twin(module.local)(x, ctx)[0])


def test_a_window_of_four_sees_four():
    module, x = build(window=4), draw(1, TIME, DIM)
    module.gate = always(False)
    y = read(module, x)[0]
    x[:, 3] += 5.0
    changed = (read(module, x)[0] - y).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False] * 3 + [True] * 4 + [False] * 5


def test_sparse_equals_dense_in_values_and_gradients():
    x, weights = draw(3, TIME, DIM), draw(3, TIME, DIM, seed=5)
    found = {}
    for implementation in ("sparse", "dense"):
        module = build(implementation=implementation, leak=0.0).train()
        y, _, ctx = read(module, x)
        grads = torch.autograd.grad((y * weights).sum(), list(module.parameters()))
        found[implementation] = y, grads
        assert 0.2 < ctx.auxiliary[FIRES][0].float().mean() < 0.8
    (a, a_grads), (b, b_grads) = found.values()
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for have, want in zip(a_grads, b_grads, strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


def test_the_leak_changes_no_value():
    x = draw(2, TIME, DIM)
    plain, leaking = build(leak=0.0).train(), build(leak=1.0).train()
    torch.testing.assert_close(read(plain, x)[0], read(leaking, x)[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("leak", [0.0, 1.0])
def test_straight_through_gradient(leak):
    """dLoss/dz_t = <dLoss/dx_t, o_global a_t> p(1-p)/T; without the leak 0 for skipped tokens."""
    module, x, weights = build(leak=leak).train(), draw(2, TIME, DIM), draw(2, TIME, DIM, seed=5)
    kept = {}

    def gate(u, ctx):
        z = (u @ module.router.weight[0]).detach().requires_grad_()
        kept.update(z=z, u=u, gate=open_gate(z, 0.1, 0.5))
        return kept["gate"]

    module.gate = gate
    y, _, ctx = read(module, x)
    (grad,) = torch.autograd.grad((y * weights).sum(), kept["z"])
    p, m = kept["gate"].p, kept["gate"].m
    everything = softmax_twin(module.everything)(kept["u"], ctx)[0]
    want = (weights * everything).sum(-1) * p * (1 - p) / 0.1
    want = want if leak else want * m
    torch.testing.assert_close(grad, want, atol=1e-5, rtol=1e-4)
    assert m.any() and not m.all()


def test_the_leak_is_one_coin_a_layer_and_step():
    module, x = build(leak=0.3).train(), draw(1, TIME, DIM)
    leaked = []
    module.everything.gated = lambda u, ctx, held, gate, *, all_rows, leak: leaked.append(leak) or (u * 0, None)
    torch.manual_seed(0)
    for _ in range(300):
        read(module, x)
    assert 60 < sum(leaked) < 120
    module.eval()
    read(module, x)
    assert leaked[-1] is False


@pytest.mark.parametrize("implementation", ["sparse", "dense"])
@pytest.mark.parametrize("position", [None, Rope(), Alibi()], ids=str)
def test_it_keeps_the_contract(contract, position, implementation):
    """Cuts, padding, packed documents, states, with a window that matters."""
    contract(L2A(window=4, implementation=implementation), position).check_all()


# ------------------------------------------------------------------------------------------------------------ the gate


def test_a_zero_router_lets_all_through():
    module = build(router=0.0)
    ctx = read(module, draw(2, TIME, DIM))[2]
    assert ctx.auxiliary[FIRES][0].all() and (ctx.auxiliary[OPEN][0] == 0.5).all()
    z = torch.zeros(1, TIME, requires_grad=True)
    penalty = open_gate(z, 0.1, 0.5).p.square().sum()
    assert penalty.item() == TIME / 4
    (grad,) = torch.autograd.grad(penalty, z)
    torch.testing.assert_close(grad, torch.full_like(z, 0.25 / 0.1))


@pytest.mark.parametrize(("temperature", "theta"), [(0.1, 0.5), (1.0, 0.7), (0.02, 0.1)])
def test_the_gate_of_inference_is_that_of_training(temperature, theta):
    module, x = build(temperature=temperature, theta=theta, leak=0.0), draw(2, 50, DIM)
    answers, gates = [], []
    for training in (False, True):
        y, _, ctx = read(module.train(training), x)
        answers.append(y)
        gates.append(ctx.auxiliary[FIRES][0])
    assert torch.equal(gates[0], gates[1]) and torch.equal(answers[0], answers[1])
    soft = ctx.auxiliary[OPEN][0]
    clear = (soft - theta).abs() > 1e-6
    assert torch.equal((soft >= theta)[clear], gates[0][clear])
    assert gates[0].any() and not gates[0].all()


def test_no_token_fires_and_the_graph_lives():
    module, x = build(leak=0.0).train(), draw(2, TIME, DIM)
    module.norm.weight.data.zero_()
    module.router.weight.data.fill_(1.0)
    module.gate = lambda u, ctx: open_gate((u @ module.router.weight[0]) - 1.0, 0.1, 0.5)
    y, _, ctx = read(module, x)
    assert torch.equal(y, softmax_twin(module.local, 4)(x, ctx)[0])
    grads = torch.autograd.grad(y.sum(), list(module.everything.parameters()))
    assert all(not g.any() for g in grads)


# --------------------------------------------------------------------------------------------------- states and refusals


def test_prefill_then_decode_is_one_forward():
    module, x = build(), draw(2, TIME, DIM)
    whole = read(module, x)[0]
    y, state, ctx = read(module, x[:, :7])
    outs = [y]
    for t in range(7, TIME):
        y, state, ctx = read(module, x[:, t : t + 1], state, ctx.after)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-5)


def test_two_stores():
    """Local keys and values of the last window - 1 tokens (with their places), global ones of all, skipped or not."""
    module = build()
    _, state, _ = read(module, draw(2, TIME, DIM))
    token = 2 * 2 * KV_HEADS * HEAD_DIM * 4
    assert (state.local.length, state.everything.length) == (3, TIME)
    assert state.everything.nbytes == TIME * token and state.local.nbytes == 3 * (token + 2 * 8)


def test_one_token_and_padding():
    module = build()
    assert read(module, draw(1, 1, DIM))[0].shape == (1, 1, DIM)
    valid = torch.ones(2, TIME, dtype=torch.bool)
    valid[0, :5] = False
    fires = read(module, draw(2, TIME, DIM), valid=valid)[2].auxiliary[FIRES][0]
    assert not fires[0, :5].any() and fires[1].any()


def test_pruned_layers_hold_no_global_keys():
    modules, x = [build(seed=i) for i in range(3)], draw(1, TIME, DIM)
    before = [read(m, x)[1] for m in modules]
    prune(modules, [1])
    states = [read(m, x)[1] for m in modules]
    assert states[1].everything is None and torch.equal(read(modules[1], x)[0], softmax_twin(modules[1].local, 4)(
        x, read(modules[1], x)[2])[0])
    assert sum(s.nbytes for s in states) == sum(s.nbytes for s in before) - before[1].everything.nbytes
    with pytest.raises(Refused, match=r"leaves no layer with global attention.*allow_local_only=True"):
        prune(modules, [0, 2])
    with pytest.raises(Refused, match="layer 3: expected layers from 0 to 2"):
        prune(modules, [3])
    prune(modules, [0, 2], allow_local_only=True)
    assert not any(m.everything for m in modules)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"temperature": 0.0}, "temperature=0.0: expected a number above 0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"theta": 0.0}, "theta=0.0: expected a share between 0 and 1"),
        ({"theta": 1.0}, "theta=1.0: expected a share between 0 and 1"),
        ({"leak": 1.5}, "leak=1.5"),
        ({"implementation": "spars"}, "did you mean 'sparse'"),
    ],
)
def test_refused_knobs(knobs, message):
    with pytest.raises(Refused, match=message):
        L2A(**knobs)


def test_other_refusals():
    with pytest.raises(Refused, match="n_kv_heads=3: expected a divisor of the 4 query heads"):
        L2A().build(DIM, 4, 3, HEAD_DIM, 0, 1)
    module, x = build(), draw(1, TIME, DIM)
    module.router.weight.data[0, 0] = float("nan")
    with pytest.raises(Refused, match="12 router logits are NaN"):
        read(module, x)
    module = build()
    module.gate = lambda u, ctx: Gate(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"the gate \(1, 3\) doesn't fit the tokens \(1, 12\)"):
        read(module, x)
    with pytest.raises(ValueError, match="don't fit the tokens"):
        open_gate(torch.zeros(2, 3), 0.1, 0.5, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"ctx.residual"):
        build()(x, Context.of(1, TIME))


# ---------------------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("tile", [2, 5, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_equal_dense_times_gate(tile, masked):
    q, k, v = draw(3, 4, 9, 8), draw(3, 2, 14, 8, seed=1), draw(3, 2, 14, 6, seed=2)
    rows = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 0, 1], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    mask = None
    if masked:
        mask = torch.rand(3, 1, 9, 14, generator=torch.Generator().manual_seed(4)) < 0.6
        mask |= torch.eye(14, dtype=torch.bool)[5:]
    inputs = [t.requires_grad_() for t in (q, k, v)]
    weights = draw(3, 4, 9, 6, seed=3)
    got = attend_rows(q, k, v, rows, mask=mask, tile=tile)
    want = attend(q, k, v, mask=mask, return_lse=False)[0] * rows[:, None, :, None]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad((got * weights).sum(), inputs), torch.autograd.grad((want * weights).sum(), inputs)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_rows_take_a_bias_and_a_shape():
    q, k, v, bias = draw(2, 4, 6, 8), draw(2, 2, 6, 8, seed=1), draw(2, 2, 6, 8, seed=2), draw(1, 4, 6, 6, seed=3)
    rows = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]], dtype=torch.bool)
    causal = bias.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True) * rows[:, None, :, None]
    torch.testing.assert_close(attend_rows(q, k, v, rows, bias=bias), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"rows should be Boolean of shape \(2, 6\)"):
        attend_rows(q, k, v, rows[:, :5])
