"""Gated attention: open gates are plain attention, and a gate is the sigmoid of the layer's input."""

import dataclasses

import pytest
import torch

from longspan.layers import Context
from longspan.layers.attention.gated import Gated
from longspan.layers.attention.softmax import Softmax
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.rope import Rope
from longspan.models.decoder import count_parameters
from longspan.registry import Refused

DIM, HEADS, HEAD_DIM = 16, 4, 8
SHAPE = (DIM, HEADS, 2, HEAD_DIM, 0, 1)
GATES = ["elementwise", "headwise"]


def pair(gated):
    """A gated module, and a plain one of the same other weights."""
    torch.manual_seed(0)
    plain = Softmax(window=gated.window).build(*SHAPE).double()
    module = gated.build(*SHAPE).double()
    module.load_state_dict(plain.state_dict(), strict=False)
    return module, plain


def inputs():
    return torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("position", [Rope(), Alibi()], ids=str)
def test_an_open_gate_is_plain_attention(gate, position):
    module, plain = pair(Gated(gate=gate, bias=True, window=5))
    with torch.no_grad():
        module.gate_proj.weight.zero_()
        module.gate_proj.bias.fill_(30.0)
    ctx = dataclasses.replace(Context.of(2, 9), position=position.build(*SHAPE))
    torch.testing.assert_close(module(inputs(), ctx)[0], plain(inputs(), ctx)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_multiplies_each_heads_output(gate):
    module, plain = pair(Gated(gate=gate))
    plain.o_proj.weight.data = torch.eye(32).double()[:DIM]
    heads = torch.cat([plain_heads(plain, inputs(), a) for a in (0, 16)], -1).view(2, 9, HEADS, HEAD_DIM)
    opened = (inputs() @ module.gate_proj.weight.mT).sigmoid().view(2, 9, HEADS, -1)
    want = (heads * opened).flatten(2) @ module.o_proj.weight.mT
    torch.testing.assert_close(module(inputs(), Context.of(2, 9))[0], want)


def plain_heads(plain, x, start):
    """Sixteen channels of the heads' outputs, from `start`."""
    plain.o_proj.weight.data = torch.eye(32).double()[start : start + 16]
    return plain(x, Context.of(*x.shape[:2]))[0]


@pytest.mark.parametrize(("gate", "cost"), [("elementwise", DIM * HEADS * HEAD_DIM), ("headwise", DIM * HEADS)])
def test_what_a_gate_costs(gate, cost):
    module, plain = pair(Gated(gate=gate))
    assert count_parameters(module) - count_parameters(plain) == cost


@pytest.mark.parametrize("knobs", [Gated(gate="headwise"), Gated(window=4, bias=True)], ids=str)
def test_padding_documents_windows_and_cuts(contract, knobs):
    contract(knobs, Rope()).check_all()


def test_refusals():
    with pytest.raises(Refused, match="did you mean 'headwise'"):
        Gated(gate="headwis")
    with pytest.raises(Refused, match="n_kv_heads=3"):
        Gated().build(DIM, 4, 3, HEAD_DIM, 0, 1)
