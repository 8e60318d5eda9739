"""The entmax mixer against its definition, whole and in pieces, and in tiles."""

import dataclasses

import pytest
import torch

from longspan.kernels.entmax import entmax
from longspan.layers import Context, PositionModule
from longspan.layers.attention.entmax import Entmax
from longspan.layers.attention.softmax import Softmax
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused, get

DIM, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 8
SHAPE = (DIM, HEADS, KV_HEADS, HEAD_DIM, 0, 1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(method, seed=0, size=3.0):
    """A module whose scores are strong enough for zeros."""
    torch.manual_seed(seed)
    module = method.build(*SHAPE)
    with torch.no_grad():
        module.q_proj.weight *= size
    return module


def by_hand(module, alpha, x, position):
    B, T, _ = x.shape
    q, k, v = (p(x).view(B, T, -1, HEAD_DIM).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    places = torch.arange(T).expand(B, T)
    q, k = position.rotate(q, k, places)
    scores = q @ k.repeat_interleave(2, 1).mT / HEAD_DIM**0.5
    bias = position.bias(places, places)
    scores = scores if bias is None else scores + bias
    weights = entmax(scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf), alpha)
    return module.o_proj((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("position", [None, Rope(), Alibi()], ids=str)
def test_equals_the_formula(alpha, position):
    module = build(Entmax(alpha=alpha)).double()
    scheme = PositionModule() if position is None else position.build(*SHAPE)
    x = draw(2, 90, DIM).double()
    got, _ = module(x, dataclasses.replace(Context.of(2, 90), position=scheme))
    torch.testing.assert_close(got, by_hand(module, alpha, x, scheme), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_tiles_chunks_and_single_tokens_agree(alpha):
    """Long enough for several tiles: the contract's sequences are shorter than a row of them."""
    module, x = build(Entmax(alpha=alpha)), draw(1, 150, DIM).requires_grad_()
    weights = draw(1, 150, DIM, seed=9)

    def run(cuts):
        out, state, before, at = [], None, None, 0
        for n in cuts:
            ctx = Context.of(1, n, before=before)
            y, state = module(x[:, at : at + n], ctx, state)
            out.append(y)
            before, at = ctx.after, at + n
        y = torch.cat(out, 1)
        return y, torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])

    whole, gradients = run([150])
    for cuts in ([100, 3, 40, 7], [70] + [1] * 80):
        y, found = run(cuts)
        torch.testing.assert_close(y, whole, atol=2e-5, rtol=1e-4)
        for have, want in zip(found, gradients):
            torch.testing.assert_close(have, want, atol=3e-4, rtol=1e-3)


def test_documents_in_a_long_row_do_not_leak():
    module, x = build(Entmax()), draw(1, 120, DIM)
    segments = torch.tensor([[0] * 70 + [1] * 50])
    y, _ = module(x, Context.of(1, 120, segments=segments))
    for part in (slice(0, 70), slice(70, 120)):
        alone, _ = module(x[:, part], Context.of(1, part.stop - part.start))
        torch.testing.assert_close(y[:, part], alone, atol=2e-5, rtol=1e-4)


def test_alpha_near_one_is_softmax():
    soft, near = build(Softmax(), size=1.0), build(Entmax(alpha=1.001), size=1.0)
    x = draw(1, 40, DIM)
    torch.testing.assert_close(near(x, Context.of(1, 40))[0], soft(x, Context.of(1, 40))[0], atol=1e-2, rtol=0)


def test_autocast_computes_weights_in_float32():
    module, x = build(Entmax()), draw(1, 80, DIM)
    exact = module(x, Context.of(1, 80))[0].detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = module(x, Context.of(1, 80))
    assert got.dtype == torch.bfloat16
    assert float((got.detach().float() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("alpha", [1.0, 1, 0.5, -2.0, float("nan"), float("inf"), True])
def test_values_of_alpha_that_are_refused(alpha):
    with pytest.raises(Refused, match="alpha"):
        Entmax(alpha=alpha)


def test_alpha_of_one_is_told_where_softmax_is():
    with pytest.raises(Refused, match="'softmax'"):
        Entmax(alpha=1.0)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(Refused, match="divisor"):
        Entmax().build(DIM, 4, 3, HEAD_DIM, 0, 1)


def test_the_card_belongs_to_its_system():
    card = get("entmax").card
    assert (card.system, card.kind, card.knob("alpha").default) == ("adasplash2", "mixer", 1.5)
