"""The small decoder: any parts, one result however the sequence is cut, saved without pickle."""

import dataclasses
import json

import pytest
import torch

from longspan import registry
from longspan.layers import SidePath, SidePathModule
from longspan.layers.attention.softmax import Softmax
from longspan.layers.base import LayerModule
from longspan.layers.memory.linear import LinearAttention
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.none import NoPositions
from longspan.layers.positions.rope import Rope
from longspan.layers.sidepaths.short_conv import ShortConv
from longspan.layers.stacks.plain import Plain
from longspan.models.decoder import Decoder, DecoderConfig, count_parameters
from longspan.registry import Refused

VOCAB, TIME = 31, 12


def make(seed=0, **parts):
    torch.manual_seed(seed)
    parts = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "stack": Plain()} | parts
    model = Decoder(DecoderConfig(VOCAB, **parts)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.2)
    return model


def ids(batch=3, time=TIME, seed=1):
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


BUILDS = {
    "rope": {"mixer": Softmax(), "position": Rope()},
    "alibi-window-conv": {"mixer": Softmax(window=5), "position": Alibi(), "side_path": ShortConv()},
    "linear-conv": {"mixer": LinearAttention(gated=True), "position": NoPositions(), "side_path": ShortConv()},
}
every_build = pytest.mark.parametrize("parts", BUILDS.values(), ids=BUILDS)
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@every_build
def test_whole_chunks_and_single_tokens_agree(parts):
    model = make(**parts)
    whole = model(ids()).logits
    for cuts in ([1] * TIME, [5, 1, 6]):
        state, out, a = None, [], 0
        for n in cuts:
            got = model(ids()[:, a : a + n], state=state)
            state, a = got.state, a + n
            out.append(got.logits)
        torch.testing.assert_close(torch.cat(out, 1), whole, **CLOSE)
        assert state.cursor.total.tolist() == [TIME] * 3


@every_build
def test_padding_and_packing_change_nothing(parts):
    model, text = make(**parts), ids()
    valid = torch.ones(3, TIME, dtype=torch.bool)
    valid[0, :5] = False
    valid[1, 4:6] = False
    got = model(text, valid=valid).logits
    for row in range(3):
        alone = model(text[row : row + 1, valid[row]]).logits[0]
        torch.testing.assert_close(got[row, valid[row]], alone, **CLOSE)
    packed = model(text, segments=torch.tensor([[0] * 5 + [1] * 7]).expand(3, -1)).logits
    torch.testing.assert_close(packed, torch.cat((model(text[:, :5]).logits, model(text[:, 5:]).logits), 1), **CLOSE)


@every_build
def test_generation_is_greedy_rereading(parts):
    model, text = make(**parts), ids()
    want = text
    for _ in range(6):
        want = torch.cat((want, model(want).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(text, 6), want[:, TIME:])
    assert torch.equal(model.generate(text, 6, chunk=5), want[:, TIME:])


def test_generation_with_padding_on_any_side():
    model, text = make(), ids()
    valid = torch.ones(3, TIME, dtype=torch.bool)
    valid[0, :4], valid[1, -5:] = False, False
    for chunk in (None, 4):
        got = model.generate(text, 5, valid=valid, chunk=chunk)
        for row in range(3):
            assert torch.equal(got[row], model.generate(text[row : row + 1, valid[row]], 5)[0])


def test_generation_stops_at_the_end_token():
    model, text = make(), ids()
    plain = model.generate(text, 8)
    end = int(plain[0, 2])
    got = model.generate(text, 8, end=end)
    for row, full in zip(got.tolist(), plain.tolist()):
        stop = full.index(end) + 1 if end in full else len(full)
        assert row[:stop] == full[: min(stop, len(row))] and set(row[stop:]) <= {end}
    assert model.generate(text[:1], 8, end=end).shape[1] == plain[0].tolist().index(end) + 1
    assert model.generate(text, 0).shape == (3, 0)


def test_sampling_follows_its_generator_and_leaves_training_mode_alone():
    model = make().train()
    draws = [model.generate(ids(), 5, temperature=1.0, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert model.training


def test_reordered_states_continue_the_reordered_rows():
    model, text, order = make(**BUILDS["linear-conv"]), ids(), torch.tensor([2, 2, 0])
    state = model(text[:, :8]).state
    got = model(text[order][:, 8:], state=state.reorder(order)).logits
    torch.testing.assert_close(got, model(text).logits[order][:, 8:], **CLOSE)


def test_keep_embeds_and_positions():
    model, text = make(), ids()
    full = model(text)
    assert torch.equal(model(text, keep=2).logits, full.logits[:, -2:]) and model(text, keep=0).logits.shape[1] == 0
    torch.testing.assert_close(model(embeds=model.embed(text)).logits, full.logits)
    shifted = model(text, positions=torch.arange(TIME).expand(3, -1) + 500).logits
    torch.testing.assert_close(shifted, full.logits, atol=1e-4, rtol=1e-4)
    spread = model(text, positions=torch.arange(TIME).expand(3, -1) * 3).logits
    assert (spread - full.logits).abs().max() > 1e-3


@every_build
def test_saved_and_loaded_is_the_same(parts, tmp_path):
    model = make(**parts, tie_head=parts["position"] != Alibi())
    model.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    torch.manual_seed(5)
    dice = torch.get_rng_state()
    again = Decoder.load(tmp_path).eval()
    assert torch.equal(torch.get_rng_state(), dice)
    assert again.config == model.config
    assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_loading_refuses_what_is_not_there(tmp_path):
    with pytest.raises(Refused, match=r"no config\.json there"):
        Decoder.load(tmp_path)
    make().save(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"n_laiers": 2}))
    with pytest.raises(Refused, match="did you mean 'n_layers'"):
        Decoder.load(tmp_path)


def test_names_and_defaults():
    config = DecoderConfig(VOCAB, dim=24, n_heads=3)
    assert (config.mixer, config.position, config.stack, config.side_path) == (Softmax(), Rope(), Plain(), None)
    assert (config.n_kv_heads, config.head_dim, config.mlp_dim) == (3, 8, 64)
    assert DecoderConfig(VOCAB, mixer="linear-attention").position == NoPositions()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"dim": 10, "n_heads": 4}, "dim=10: expected a multiple of n_heads=4"),
        ({"n_kv_heads": 3}, "n_kv_heads=3: expected a divisor"),
        ({"n_kv_heads": 0}, "n_kv_heads=0: expected a whole number of at least 1"),
        ({"n_layers": 0}, "n_layers=0: expected a whole number of at least 1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"mixer": "sofmax"}, "did you mean 'softmax'"),
        ({"mixer": "linear-attention", "position": "rope"}, "takes no rotate from a position scheme"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(Refused) as refused:
        DecoderConfig(VOCAB, **bad)
    assert message in str(refused.value)


def test_calls_that_make_no_sense():
    model = make()
    for call in (lambda: model(), lambda: model(ids()[:, :0]), lambda: model(ids(), embeds=torch.ones(1, 1, 16))):
        with pytest.raises(ValueError, match="forward takes"):
            call()
    with pytest.raises(ValueError, match="at least one real token"):
        model.generate(ids(), 1, valid=torch.zeros(3, TIME, dtype=torch.bool))


def test_parts_of_all_layers_can_share_weights(tmp_path):
    @registry.method("test-shared-gain", kind="side-path", summary="One gain for all layers.")
    class SharedGain(SidePath):
        def build(self, dim, n_heads, n_kv_heads, head_dim, layer, n_layers):
            return Gain()

        def tie(self, modules):
            for module in modules[1:]:
                module.gain = modules[0].gain

    class Gain(SidePathModule):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x, ctx, state=None):
            return self.gain * ctx.residual, None

    try:
        model, without = make(side_path=SharedGain()), make()
        assert count_parameters(model) == count_parameters(without) + 1
        assert isinstance(model.stack.layers[0].side_path, LayerModule)
        model.stack.layers[1].side_path.gain.data.fill_(0.25)
        model.save(tmp_path)
        again = Decoder.load(tmp_path).eval()
        assert torch.equal(again(ids()).logits, model(ids()).logits)
        assert again.stack.layers[0].side_path.gain is again.stack.layers[1].side_path.gain
    finally:
        registry._methods.pop("test-shared-gain")


def test_a_zero_side_path_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    with_path = Decoder(DecoderConfig(VOCAB, side_path=ShortConv())).eval()
    without = Decoder(dataclasses.replace(with_path.config, side_path=None)).eval()
    without.load_state_dict({k: v for k, v in with_path.state_dict().items() if "side_path" not in k})
    assert torch.equal(with_path(ids()).logits, without(ids()).logits)
