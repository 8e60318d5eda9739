"""Performer: unbiased features, forms that agree at any size of key, directions that are kept."""

import dataclasses

import pytest
import torch

from longspan.layers import Context
from longspan.layers.attention.softmax import Softmax
from longspan.layers.memory.performer import Performer, log_features, orthogonal_directions, rescaled, running_max
from longspan.layers.positions.rope import Rope
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused

DIM, SHAPE = 16, (16, 4, 2, 8, 0, 2)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(**knobs):
    torch.manual_seed(0)
    return Performer(**knobs).build(*SHAPE)


def read(module, x, cuts, position=None, **given):
    out, state, before, a = [], None, None, 0
    for n in cuts:
        part = {name: t[:, a : a + n] for name, t in given.items()}
        ctx = Context.of(len(x), n, before=before, **part)
        if position is not None:
            ctx = dataclasses.replace(ctx, position=position)
        y, state = module(x[:, a : a + n], ctx, state)
        out.append(y)
        before, a = ctx.after, a + n
    return torch.cat(out, 1), state


def test_the_estimate_of_the_kernel_is_unbiased():
    draws, d = 10_000, 6
    q, k = draw(d, dtype=torch.float64) / 2, draw(d, seed=1, dtype=torch.float64) / 2
    blocks = orthogonal_directions(draws * d, d, torch.Generator().manual_seed(2)).view(draws, d, d)
    found = torch.stack([(log_features(q, w) + log_features(k, w)).exp().sum() for w in blocks])
    want = ((q @ k) / d**0.5).exp()
    assert (found.mean() - want).abs() < 3 * found.std() / draws**0.5
    assert 3 * found.std() / draws**0.5 < 0.05 * want  # the test can tell


def test_directions_are_orthogonal_in_blocks_and_as_long_as_gaussian_ones():
    w = orthogonal_directions(20, 8, torch.Generator().manual_seed(0))
    assert w.shape == (20, 8)
    for block in (w[:8], w[8:16], w[16:]):
        gram = block @ block.mT
        torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-10, rtol=0)
    many = orthogonal_directions(4000, 8, torch.Generator().manual_seed(1))
    torch.testing.assert_close(many.square().sum(-1).mean(), torch.tensor(8.0).double(), atol=0.3, rtol=0)
    torch.testing.assert_close(many.mT @ many / 4000, torch.eye(8).double(), atol=0.1, rtol=0)


def test_recurrent_and_quadratic_forms_agree():
    module, x = build(chunk=4), draw(2, 11, DIM)
    q, k, v = (p(x).view(2, 11, -1, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    phi_q, phi_k = (log_features(t, module.directions).exp() for t in (q, k))
    weights = (phi_q @ phi_k.repeat_interleave(2, 1).mT).tril()
    heads = weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(2, 1)
    want = module.o_proj(heads.transpose(1, 2).flatten(2))
    for cuts in ([11], [1] * 11, [5, 1, 5]):
        torch.testing.assert_close(read(module, x, cuts)[0], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [3.0, 20.0])
def test_forms_agree_for_large_keys_where_plain_exponentials_vanish(size):
    module, x = build(chunk=4).double(), draw(1, 12, DIM, dtype=torch.float64)
    x[:, 7] *= size
    x[:, 3:6] *= size / 2
    want, _ = read(module, x, [12])
    single = module.float()
    for cuts in ([12], [1] * 12, [5, 2, 5]):
        got, state = read(single, x.float(), cuts)
        assert got.isfinite().all() and state.memory.isfinite().all()
        torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-3)


def test_a_loud_later_key_leaves_earlier_rows_alone():
    module, x = build(chunk=16), draw(1, 12, DIM)
    want, _ = read(module, x, [12])
    x[:, 8] *= 30.0
    torch.testing.assert_close(read(module, x, [12])[0][:, :8], want[:, :8], atol=1e-6, rtol=0)


def test_a_loud_document_leaves_the_next_one_alone():
    module, x = build(), draw(1, 12, DIM)
    x[:, :5] *= 30.0
    segments = torch.tensor([[0] * 5 + [1] * 7])
    alone, _ = read(module, x[:, 5:], [7])
    for cuts in ([12], [1] * 12, [3, 4, 5]):
        got, _ = read(module, x, cuts, segments=segments)
        torch.testing.assert_close(got[:, 5:], alone, atol=1e-5, rtol=1e-5)


def test_running_max_stays_inside_documents():
    x = draw(2, 3, 37)
    assert torch.equal(running_max(x), x.cummax(-1).values)
    document = (draw(2, 37, seed=1) > 1).cumsum(1)
    got = running_max(x, document)
    for b in range(2):
        for t in range(37):
            own = (document[b] == document[b, t]) & (torch.arange(37) <= t)
            assert torch.equal(got[b, :, t], x[b][:, own].amax(-1))


def test_keys_are_measured_by_the_largest_so_far():
    logs = draw(1, 2, 6, 5) * 10
    logs[:, :, 0] = -torch.inf
    k, decay, top = rescaled(logs, None, None)
    largest = logs.amax(-1).cummax(-1).values
    assert torch.equal(top, largest[..., -1]) and (k <= 1).all() and (decay <= 0).all() and not k[:, :, 0].any()
    torch.testing.assert_close(decay[..., 2:], -largest[..., 1:].diff())
    assert not decay[..., :2].any()


@torch.no_grad()
def test_more_features_come_nearer_to_softmax():
    torch.manual_seed(0)
    exact, x = Softmax().build(*SHAPE), draw(2, 24, DIM) / 2
    position, errors = Rope().build(*SHAPE), []
    for features in (8, 64, 4096):
        module = Performer(features=features).build(*SHAPE)
        module.load_state_dict(exact.state_dict(), strict=False)
        want, _ = read(exact, x, [24], position)
        errors.append(float((read(module, x, [24], position)[0] - want).norm() / want.norm()))
    assert errors[0] > 1.5 * errors[1] > 4.5 * errors[2] and errors[2] < 0.05


def test_directions_come_from_a_seed_and_are_saved_with_the_weights(tmp_path):
    assert torch.equal(build(seed=3).directions, build(seed=3).directions)
    assert not torch.equal(build(seed=3).directions, build(seed=4).directions)
    model = Decoder(DecoderConfig(20, dim=16, n_heads=2, mixer=Performer(features=10)))
    layers = [m for m in model.modules() if hasattr(m, "directions")]
    assert len(layers) == 2 and not torch.equal(layers[0].directions, layers[1].directions)
    layers[0].directions += 0.5
    model.save(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(Decoder.load(tmp_path)(ids).logits, model(ids).logits)
    assert not any("directions" in name for name, _ in model.named_parameters())


def test_the_state_has_a_fixed_size():
    module = build(features=10)
    sizes = {read(module, draw(3, n, DIM), [n])[1].nbytes for n in (1, 7, 100)}
    assert sizes == {3 * 2 * (9 * 10 + 1) * 4}


@pytest.mark.parametrize("knobs", [Performer(features=3, chunk=1), Performer(features=50, chunk=4)], ids=str)
def test_padding_documents_and_cuts(contract, knobs):
    contract(knobs, Rope()).check_all()


def test_half_precision_keeps_its_memory_in_float32():
    y, state = read(build().bfloat16(), draw(1, 5, DIM).bfloat16(), [3, 2])
    assert y.dtype == torch.bfloat16 and state.memory.dtype == state.top.dtype == torch.float32


def test_refusals():
    with pytest.raises(Refused, match="features=0"):
        Performer(features=0)
    with pytest.raises(Refused, match="takes no bias from a position scheme"):
        DecoderConfig(16, mixer="performer", position="alibi")
    with pytest.raises(Refused, match="n_kv_heads=3"):
        Performer().build(8, 4, 3, 2, 0, 1)
