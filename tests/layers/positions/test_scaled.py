"""Stretched rotary positions: the frequencies are those of transformers, and a model is afterwards what it was."""

import copy

import pytest
import torch
from tiny_models import tiny, tiny_ids
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longspan import Recipe
from longspan.layers import choose
from longspan.layers.positions import Yarn, inverse_frequencies
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused


def reference(kind, factor, dim=64, theta=1e5, original=8192):
    from transformers import LlamaConfig

    parameters = {"rope_type": kind, "factor": factor, "rope_theta": theta, "original_max_position_embeddings": original}
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=original,
                         rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 16.0])
@pytest.mark.parametrize(("name", "kind"), [("yarn", "yarn"), ("position-interpolation", "linear")])
def test_frequencies_are_those_of_transformers(name, kind, factor):
    wanted, growth = reference(kind, factor)
    found, scale = choose(name, "position").__class__(factor=factor).stretched(inverse_frequencies(64, 1e5), 1e5, 8192)
    assert torch.allclose(found.float(), wanted.float(), rtol=1e-5)
    assert scale == pytest.approx(growth)


def test_ntk_divides_the_slowest_pair_and_leaves_the_fastest():
    before = inverse_frequencies(64, 1e4)
    after, scale = choose("ntk", "position").__class__(factor=8.0).stretched(before, 1e4, 128)
    assert after[0] == before[0] and scale == 1
    assert float(after[-1]) == pytest.approx(float(before[-1]) / 8)


@pytest.mark.parametrize("name", ["position-interpolation", "ntk", "yarn"])
@pytest.mark.parametrize("dim", [2, 16, 64])
def test_a_factor_of_one_changes_nothing(name, dim):
    before = inverse_frequencies(dim, 1e4)
    after, scale = choose(name, "position").__class__(factor=1.0).stretched(before, 1e4, 128)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)
    assert scale == 1


@pytest.mark.parametrize("text", ["yarn(factor=4)", "ntk", "position-interpolation(factor=2)"])
def test_a_pretrained_model_runs_stretched_and_comes_back(text):
    model, ids = tiny("llama"), tiny_ids(1, 60)
    plain, state = model(ids).logits, copy.deepcopy(dict(model.named_buffers()))
    with Recipe.parse(text).on(model):
        inside = model(ids).logits
    assert not torch.allclose(inside, plain)
    assert torch.equal(model(ids).logits, plain)
    assert all(torch.equal(state[name], b) for name, b in model.named_buffers())


def test_it_equals_transformers_own_scaling():
    model, ids = tiny("llama"), tiny_ids(1, 60)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": config.max_position_embeddings}
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    with Recipe.parse("yarn(factor=4)").on(model):
        assert torch.allclose(model(ids).logits, other(ids).logits, atol=1e-5)
    with pytest.raises(Refused, match="scales its positions already"), Recipe.parse("ntk").on(other):
        pass


def test_decoding_agrees_with_reading():
    model, ids = tiny("llama"), tiny_ids(1, 50)
    with Recipe.parse("yarn(factor=2) + knorm(budget=0.999)").on(model):
        written = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=2)
        again = model(written[:, :-1]).logits.argmax(-1)
    assert torch.equal(again[:, 49:], written[:, 50:])


def test_a_longer_text_may_be_read():
    assert Recipe.parse("yarn(factor=4) + full").window(8192) == 32768
    assert Recipe.parse("full").window(8192) == 8192
    assert Recipe.parse("yarn(factor=2, original=100)").window(8192) == 200


def test_a_decoder_trained_here_takes_it():
    ids = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    model = Decoder(DecoderConfig(50, dim=32, n_layers=1, n_heads=2, position=Yarn(factor=2.0, original=12))).eval()
    whole = model(ids).logits
    state, parts = None, []
    for piece in ids.split(7, 1):
        out = model(piece, state=state)
        state = out.state
        parts.append(out.logits)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("text", ["yarn(factor=0.5)", "yarn(beta_fast=1, beta_slow=2)", "rope"])
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(Refused, match=r"expected|position scheme"):
        Recipe.parse(text)
