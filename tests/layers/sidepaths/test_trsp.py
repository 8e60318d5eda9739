"""TRSP's gate, its module in every way of reading, and what it refuses."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from longspan.layers import Context
from longspan.layers.sidepaths.triangular import tri_box
from longspan.layers.sidepaths.trsp import TRSP, LengthGate, gamma
from longspan.models.decoder import Decoder, DecoderConfig, count_parameters
from longspan.registry import Refused


def noise(time=24, dim=3, batch=2, seed=0):
    return torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(seed))


def path(layer=0, seed=0, **knobs):
    torch.manual_seed(seed)
    return TRSP(**knobs).build(3, 1, 1, 3, layer, 4)


def read(module, x, cuts=None, length=None, before=None, state=None, **context):
    out, a = [], 0
    for n in cuts or [x.shape[1]]:
        piece = {name: t[:, a : a + n] for name, t in context.items()}
        ctx = Context.of(x.shape[0], n, before=before, length=length, **piece)
        y, state = module(torch.zeros_like(x[:, a : a + n]), dataclasses.replace(ctx, residual=x[:, a : a + n]), state)
        out.append(y)
        before, a = ctx.after, a + n
    return torch.cat(out, 1), state


# ----------------------------------------------------------------------------------------------------------------- the gate


def parameters(seed=0):
    g = torch.Generator().manual_seed(seed)
    w1, c1, w2 = torch.randn(3, 16, generator=g)
    return w1, c1, w2, torch.tensor(0.3), torch.tensor(0.4)


def test_the_gate_by_hand():
    w1, c1, w2, c2, kappa = parameters()
    r = 0.25
    opened = torch.sigmoid((w2 * torch.tanh(w1 * -2.0 + c1)).sum() + c2)
    torch.testing.assert_close(gamma(r, w1, c1, w2, c2, kappa), opened * r ** F.softplus(kappa))


def test_the_gate_is_bounded_and_whole_at_one():
    w1, c1, w2, c2, kappa = parameters()
    for r in (1e-6, 0.01, 0.5, 1.0):
        assert 0 <= gamma(r, w1, c1, w2, c2, kappa) <= r ** float(F.softplus(kappa)) * (1 + 1e-6) <= 1 + 1e-6
    assert torch.equal(gamma(1.0, w1, c1, w2, c2, kappa), torch.sigmoid((w2 * torch.tanh(c1)).sum() + c2))
    assert torch.equal(gamma(1e-9, w1, c1, w2, c2, kappa), gamma(1e-6, w1, c1, w2, c2, kappa))


def test_without_its_network_the_gate_follows_the_ratio():
    w1, c1, w2, c2, kappa = parameters()
    found = torch.stack([gamma(2**layer / 8192, w1, c1, 0 * w2, c2, kappa) for layer in range(14)])
    ratio = torch.tensor([2**layer / 8192 for layer in range(14)]) ** F.softplus(kappa)
    torch.testing.assert_close(found / ratio, torch.sigmoid(c2).expand(14))
    assert (found.diff() > 0).all()


def test_the_gate_at_the_start():
    """About 0.5 r^0.69: thousandths in the first layer of 8K tokens, near one half where the window reaches them all."""
    torch.manual_seed(0)
    gates = [LengthGate() for _ in range(20)]
    assert all(torch.equal(g.first.weight, gates[0].first.weight) for g in gates)  # the dice are left alone
    gates = []
    for seed in range(20):
        torch.manual_seed(seed)
        gates.append(LengthGate())
    first, last = (torch.stack([g(b, 8192) for g in gates]) for b in (1, 8192))
    assert first.min() > 0.0003 and first.max() < 0.003 and last.min() > 0.2 and last.max() < 0.8
    assert 0.4 < last.mean() < 0.6
    assert sum(p.numel() for p in gates[0].parameters()) == 50
    assert F.softplus(gates[0].kappa).item() == pytest.approx(0.693, abs=1e-3)


# --------------------------------------------------------------------------------------------------------------- the module


def test_adds_the_gated_filter_of_the_residual_stream():
    module, x = path(layer=2), noise()
    y, _ = read(module, x)
    torch.testing.assert_close(y, module.gate(4, 24) * tri_box(x, 5))
    torch.testing.assert_close(read(module, x, length=64)[0], module.gate(4, 64) * tri_box(x, 5))
    assert y.norm() <= module.gate(4, 24) * x.norm()
    one, _ = read(path(layer=3), x[:, :1])
    torch.testing.assert_close(one, path(layer=3).gate(1, 1) * x[:, :1] / 4)


@pytest.mark.parametrize("layer", [1, 2, 4, 40])
def test_every_layer_keeps_the_contract(contract, layer):
    """Windows that slide within the 13 tokens, one that just doesn't, and one far beyond."""
    checks = contract(TRSP())
    checks.module = TRSP().build(16, 4, 2, 16, layer, 50).eval()
    checks.check_all()
    checks.module = TRSP(l_ctx=13, allow_longer=True).build(16, 4, 2, 16, layer, 50).eval()
    checks.check_all()


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_chunks_with_states_equal_one_shot(layer):
    module, x = path(layer, l_ctx=24), noise()
    whole, state = read(module, x)
    for cuts in ([1] * 24, [7, 9, 1, 7]):
        torch.testing.assert_close(read(module, x, cuts)[0], whole, atol=1e-6, rtol=0)
    held = state.sums[0].numel() * 2 if state.sums else state.inputs.numel()
    assert held == 2 * 3 * min(2 * 2**layer, 24 if layer == 2 else 2)


def test_the_length_read_so_far():
    """Without a declared length, or when asked for, each call's gate and window follow the tokens read."""
    for knobs, length in (({}, None), ({"l_ctx": "current"}, 99)):
        module, x = path(layer=3, **knobs), noise()
        y, state = read(module, x, [4, 20], length)
        torch.testing.assert_close(y[:, :4], module.gate(4, 4) * tri_box(x[:, :4], 5))
        torch.testing.assert_close(y[:, 4:], module.gate(8, 24) * tri_box(x, 9)[:, 4:])
        assert state.inputs.shape[1] == 16
        step, _ = read(module, x[:, :1], before=Context.of(2, 24).after, state=state)
        want = module.gate(8, 25) * tri_box(torch.cat((x, x[:, :1]), 1), 9)[:, 24:]
        torch.testing.assert_close(step, want)


def test_the_length_of_a_padded_batch_is_its_longest_row():
    module, x = path(layer=1), noise()
    valid = torch.arange(24) >= torch.tensor([[10], [4]])
    y, _ = read(module, x, valid=valid)
    for row, a in ((0, 10), (1, 4)):
        torch.testing.assert_close(y[row, a:], module.gate(2, 20) * tri_box(x[row : row + 1, a:], 3)[0])
    segments = (torch.arange(24) >= 9).long().expand(2, -1)
    y, state = read(module, x, [20, 4], segments=segments)
    torch.testing.assert_close(y[:, 9:20], module.gate(2, 11) * tri_box(x[:, 9:20], 3))
    torch.testing.assert_close(y[:, 20:], module.gate(2, 15) * tri_box(x[:, 9:], 3)[:, 11:])
    assert state.count.tolist() == [15, 15]


def test_sums_take_no_more_memory_as_the_text_grows():
    module = path(layer=20, l_ctx=4096)
    sizes = {read(module, noise(n))[1].nbytes for n in (1, 50)}
    assert sizes == {2 * 2 * 3 * 4 + 2 * 8}
    _, state = read(module, noise(24))
    with pytest.raises(ValueError, match="declare the same length in every call"):
        read(path(layer=2, l_ctx=8, allow_longer=True), noise(24), state=state)


def test_gradients_reach_the_residual_stream_and_the_gate():
    module = path(layer=2).double()
    x = noise(9).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: read(module, x)[0], x)
    read(module, x)[0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.gate.parameters())


# -------------------------------------------------------------------------------------------------------------- the decoder


def decoder(side_path, layers=3):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(50, dim=16, n_heads=2, n_layers=layers, side_path=side_path))


@pytest.mark.parametrize("layers", [1, 5])
def test_fifty_parameters_whatever_the_depth(layers):
    assert count_parameters(decoder("trsp", layers)) - count_parameters(decoder(None, layers)) == 50


def test_a_closed_gate_is_the_plain_decoder_bit_for_bit():
    ids = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    plain, closed = decoder(None), decoder(TRSP(init_bias="-inf"))
    assert torch.equal(closed(ids).logits, plain(ids).logits)
    assert not torch.equal(decoder("trsp")(ids).logits, plain(ids).logits)
    closed(ids).logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in closed.parameters())


def test_saved_and_loaded_with_its_shared_gate(tmp_path):
    model, ids = decoder(TRSP(init_bias=float("-inf"), l_ctx=64)), torch.arange(20)[None]
    model.stack.layers[2].side_path.gate.second.bias.data.fill_(0.5)
    model.save(tmp_path)
    again = Decoder.load(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits) and again.config.side_path == TRSP(init_bias="-inf", l_ctx=64)
    assert len({id(layer.side_path.gate) for layer in again.stack.layers}) == 1


def test_generating_equals_reading_anew():
    model, ids = decoder(TRSP(l_ctx=40)), torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    written = model.generate(ids, 8)
    for _ in range(8):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(ids[:, 12:], written)


# ------------------------------------------------------------------------------------------------------------ what is refused


def test_refused_knobs():
    for value in (-1, 0, float("nan"), 3.5, True):
        with pytest.raises(Refused, match=r"trsp\(l_ctx=.*expected a whole number of at least 1"):
            TRSP(l_ctx=value)
    with pytest.raises(Refused, match=r"l_ctx='curent'.*did you mean 'current'"):
        TRSP(l_ctx="curent")
    for value in (float("nan"), float("inf"), "inf", "-6", "low", True):
        with pytest.raises(Refused, match=r"init_bias=.*expected a number such as -6, or \"-inf\""):
            TRSP(init_bias=value)
    assert TRSP(init_bias=float("-inf")) == TRSP(init_bias="-inf")


def test_refused_texts():
    with pytest.raises(Refused, match="a text of 24 tokens, L_ctx=23; expected no more tokens"):
        read(path(l_ctx=23), noise())
    with pytest.raises(Refused, match="a text of 24 tokens, L_ctx=20"):
        read(path(), noise(), [20, 4], length=20)
    y, _ = read(path(layer=9, l_ctx=23, allow_longer=True), noise())
    torch.testing.assert_close(y, path(layer=9).gate(23, 23) * tri_box(noise(), 24))
    for length in (-1, 0):
        with pytest.raises(Refused, match=f"L_ctx={length}"):
            read(path(), noise(), length=length)
    with pytest.raises(Refused, match="L_ctx=nan: expected a whole number"):
        read(path(), noise(), length=float("nan"))
    with pytest.raises(ValueError, match=r"residual stream ctx.residual \(B,T,C\), got None"):
        path()(noise(), Context.of(2, 24))
    with pytest.raises(ValueError, match=r"got \(24, 3\)"):
        path()(noise(), dataclasses.replace(Context.of(2, 24), residual=noise()[0]))
