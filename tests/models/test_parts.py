"""Finding a model's parts: every family's real class, small and with random weights; the bundled model with its own."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from tiny_models import FAMILIES, tiny, tiny_config, tiny_ids
from torch import nn

from longspan.models.load import load
from longspan.models.parts import LOOKED_FOR, find_parts, kv_bytes_per_token
from longspan.registry import Refused

CLOSE = {"atol": 2e-6, "rtol": 0}
SCALED = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                 "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}


def watch(model, positions=None, length=24):
    """Run a forward; per layer: (cos, sin) given to attention, and input and output of o_proj."""
    parts, seen = find_parts(model), {}
    hooks = []
    for i in range(parts.n_layers):
        def before(module, args, kwargs, i=i):
            seen[i, "rope"] = kwargs["position_embeddings"]

        def after(module, args, out, i=i):
            seen[i, "o_proj"] = (args[0], out)

        hooks.append(parts.attention(i).register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(parts.attention(i).o_proj.register_forward_hook(after))
    with torch.no_grad():
        model(tiny_ids(2, length).to(model.device), position_ids=positions)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_of_every_family(family):
    parts = find_parts(tiny(family))
    assert (parts.n_layers, parts.n_heads, parts.n_kv_heads, parts.head_dim) == (2, 4, 2, 8)
    assert parts.pairing == "halves"
    assert [parts.attention(i).layer_idx for i in range(2)] == [0, 1]
    assert [parts.window(i) for i in range(2)] == ([16, None] if family in ("gemma2", "gemma3") else [None, None])
    assert [parts.is_sliding(i) for i in range(2)] == [w is not None for w in map(parts.window, range(2))]


@pytest.mark.parametrize("family", FAMILIES)
def test_head_contributions_sum_to_the_output(family):
    model = tiny(family)
    parts, seen = find_parts(model), watch(model)
    for i in range(2):
        heads, out = seen[i, "o_proj"]
        weight = parts.o_proj(i)
        assert weight.shape == (32, 4, 8)
        each = torch.einsum("bthd,chd->bthc", heads.view(2, -1, 4, 8), weight)
        torch.testing.assert_close(each.sum(2), out, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_is_what_the_layers_get(family):
    model = tiny(family)
    positions = torch.stack([torch.arange(24), torch.arange(100, 124)])
    seen, parts = watch(model, positions), find_parts(model)
    for i in range(2):
        for ours, theirs in zip(parts.rope(positions, i), seen[i, "rope"]):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rope_is_that_of_the_latest_forward(kind):
    model = tiny("llama", rope_parameters=dict(SCALED[kind]), positions=16 if kind == "dynamic" else 256)
    seen, parts = watch(model), find_parts(model)
    before = {name: b.clone() for name, b in parts.decoder.rotary_emb.named_buffers()}
    for ours, theirs in zip(parts.rope(torch.arange(24), 1), seen[1, "rope"]):
        assert torch.equal(ours, theirs[0])
    early = parts.rope(torch.arange(4), 1)[0]  # alone short enough for the unscaled angles, but its keys are scaled
    assert torch.equal(early, seen[1, "rope"][0][0, :4])
    assert all(torch.equal(b, before[name]) for name, b in parts.decoder.rotary_emb.named_buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_unrotate_gives_back_queries_and_keys_before_rotation(family):
    """Layer 0 sees the same input at any positions, so its queries differ by the rotation alone."""
    model, stored = tiny(family), {}
    parts = find_parts(model)

    def keep(module, q, k, v, mask, **kwargs):
        stored.setdefault(module.layer_idx, []).append((q, k))
        return v.repeat_interleave(2, 1).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("test_parts_keep", keep)
    model.set_attn_implementation("test_parts_keep")
    shifted = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(1))
    for positions in (torch.zeros_like(shifted), shifted):
        model(tiny_ids(2, 24), position_ids=positions)
    (q0, k0), (q, k) = stored[0]
    cos, sin = parts.rope(shifted, 0)
    assert (q - q0).abs().max() > 0.1
    torch.testing.assert_close(parts.unrotate(q, cos, sin), q0, **CLOSE)
    torch.testing.assert_close(parts.unrotate(k, cos, sin), k0, **CLOSE)
    torch.testing.assert_close(parts.rotate(k0, cos, sin), k, **CLOSE)


@pytest.mark.parametrize("kind", SCALED)
def test_unrotate_undoes_rotate_also_where_rotation_scales(kind):
    parts = find_parts(tiny("llama", rope_parameters=dict(SCALED[kind])))
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = parts.rope(torch.tensor([[0, 3, 50, 900, 7000], [5, 4, 3, 2, 1]]), 0)
    torch.testing.assert_close(parts.unrotate(parts.rotate(x, cos, sin), cos, sin), x, **CLOSE)


def test_a_partial_rotation_leaves_the_other_channels_alone():
    parts = find_parts(tiny("phi3"))
    x = torch.randn(1, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = parts.rope(torch.tensor([10, 20, 30]), 0)
    assert cos.shape == (3, 4)
    turned = parts.rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert (turned[..., :4] - x[..., :4]).abs().amax((0, 1, 3)).min() > 0.1
    torch.testing.assert_close(parts.unrotate(turned, cos, sin), x, **CLOSE)


def test_positions_may_differ_by_head():
    parts = find_parts(tiny())
    x = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.randint(0, 99, (2, 2, 5), generator=torch.Generator().manual_seed(1))
    together = parts.rotate(x, *parts.rope(positions, 0))
    for b in range(2):
        for h in range(2):
            assert torch.equal(together[b, h], parts.rotate(x[b, h], *parts.rope(positions[b, h], 0)))


def test_rotation_keeps_dtype_and_refuses_too_many_channels():
    parts = find_parts(tiny())
    cos, sin = parts.rope(torch.arange(3), 0)
    assert parts.rotate(torch.ones(1, 2, 3, 8, dtype=torch.bfloat16), cos, sin).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="8 channels"):
        parts.rotate(torch.ones(1, 2, 3, 4), cos, sin)


def test_gemma3_rotates_sliding_and_full_layers_differently():
    parts = find_parts(tiny("gemma3"))
    sliding, full = (parts.rope(torch.tensor([40]), i)[0] for i in range(2))
    assert not torch.allclose(sliding, full, atol=1e-3)


@pytest.mark.parametrize("name", ["Cohere", "Glm"])
def test_neighbouring_channels_are_told_from_halves(name):
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    parts = find_parts(model)
    assert parts.pairing == "neighbours"
    rotation = __import__("sys").modules[type(parts.attention(0)).__module__].apply_rotary_pos_emb
    x = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6)[None]
    theirs = rotation(x, x, *parts.decoder.rotary_emb(x, positions))[0]
    torch.testing.assert_close(parts.rotate(x, *parts.rope(positions, 0)), theirs, **CLOSE)


def test_a_layer_without_rotation_is_followed_where_it_says_so():
    config = transformers.SmolLM3Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, vocab_size=128, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    parts = find_parts(transformers.SmolLM3ForCausalLM(config))
    still = [i for i in range(4) if torch.equal(parts.rope(torch.tensor([7]), i)[0], torch.ones(1, 8))]
    assert still == [i for i in range(4) if not config.no_rope_layers[i]] == [3]


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_known_only_to_the_config(family):
    parts = find_parts(tiny(family, sliding_window=20))
    assert [parts.window(i) for i in range(2)] == [20, 20]


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_bytes_are_those_of_a_full_cache(family):
    model = tiny(family)
    cache = transformers.DynamicCache()
    model(tiny_ids(1, 10), past_key_values=cache)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert kv_bytes_per_token(model) * 10 == held
    assert kv_bytes_per_token(model, torch.bfloat16) * 20 == held


@pytest.mark.parametrize("family", FAMILIES)
def test_meta_models(family):
    with torch.device("meta"):
        model = getattr(transformers, type(tiny(family)).__name__)(tiny_config(family))
    parts = find_parts(model)
    assert parts.o_proj(1).shape == (32, 4, 8)
    assert parts.rope(torch.arange(5, device="meta"), 1)[0].device.type == "meta"
    assert kv_bytes_per_token(model) == 2 * 2 * 2 * 8 * 4


def test_a_device_map_with_a_layer_on_disk(tmp_path):
    whole = tiny("qwen2")
    whole.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload", dtype=torch.float32)
    assert model.model.layers[1].self_attn.o_proj.weight.is_meta
    ours, theirs = find_parts(model), find_parts(whole)
    for i in range(2):
        torch.testing.assert_close(ours.o_proj(i), theirs.o_proj(i), **CLOSE)
        assert torch.equal(ours.rope(torch.arange(9), i)[0], theirs.rope(torch.arange(9), i)[0])


def test_an_output_projection_that_is_no_plain_linear_layer():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny()
    plain = find_parts(model).o_proj(0).clone()
    scaled = Scaled(32, 32, bias=True)
    scaled.weight.data.copy_(model.model.layers[0].self_attn.o_proj.weight)
    model.model.layers[0].self_attn.o_proj = scaled
    torch.testing.assert_close(find_parts(model).o_proj(0), 2 * plain, **CLOSE)


# ------------------------------------------------------------------------------------------------------------- refusals


def small(name, **extra):
    config = getattr(transformers, f"{name}Config")(**extra)
    with torch.device("meta"):
        return getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)


@pytest.mark.parametrize(("make", "because"), [
    (lambda: nn.Linear(2, 2), "no get_decoder()"),
    (lambda: small("GPT2", n_layer=1), "decoder.layers is missing"),
    (lambda: small("OPT", num_hidden_layers=1), "self_attn has no o_proj, no num_key_value_groups"),
    (lambda: small("Mamba", num_hidden_layers=1), "layer 0 has no self_attn"),
    (lambda: small("DeepseekV3", num_hidden_layers=1), "self_attn has no head_dim"),
    (lambda: small("GptOss", num_hidden_layers=1), "also has sinks"),
    (lambda: small("FalconH1", num_hidden_layers=1), "state in mamba beside"),
    (lambda: small("Exaone4", num_hidden_layers=4), "rotates only some layers"),
])
def test_an_unknown_layout_names_what_was_looked_for(make, because):
    with pytest.raises(Refused) as refusal:
        find_parts(make())
    assert because in str(refusal.value) and LOOKED_FOR in str(refusal.value)


def test_shared_keys_and_uneven_layers_are_refused():
    model = tiny()
    model.model.layers[1].self_attn.is_kv_shared_layer = True
    with pytest.raises(Refused, match="layer 1 reads another layer's keys"):
        find_parts(model)
    model = tiny()
    model.model.layers[1].self_attn.num_key_value_groups = 4
    with pytest.raises(Refused, match="layers differ"):
        find_parts(model)
    model = tiny()
    model.model.layers = model.model.layers[1:]
    with pytest.raises(Refused, match="layer_idx is 1"):
        find_parts(model)


def test_an_unknown_rotation_is_refused():
    attention = types.new_class("Attention", (nn.Module,), {}, lambda body: body.update(forward=lambda self: None))
    model = tiny()
    attention.__module__ = "json"  # any module without a rotation
    model.model.layers[0].self_attn.__class__ = attention
    with pytest.raises(Refused, match="doesn't rotate through apply_rotary_pos_emb"):
        find_parts(model)


def test_the_bundled_model():
    model, _ = load(dtype="float32")
    parts = find_parts(model)
    assert (parts.n_layers, parts.n_heads, parts.n_kv_heads, parts.head_dim) == (30, 9, 3, 64)
    assert kv_bytes_per_token(model, torch.bfloat16) == 2 * 30 * 3 * 64 * 2 == 23040
    seen = watch(model)
    heads, out = seen[29, "o_proj"]
    each = torch.einsum("bthd,chd->btc", heads.view(2, -1, 9, 64), parts.o_proj(29))
    torch.testing.assert_close(each, out, atol=2e-6 * out.abs().max().item(), rtol=0)
    assert torch.equal(parts.rope(torch.arange(24), 7)[1], seen[7, "rope"][1][0])
