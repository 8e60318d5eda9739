"""RePo in transformers models: identity at rho = 1, caches, generation, padding, packing, training, memory, saving."""

import copy
import dataclasses
import json
import types

import pytest
import torch
from generating import check_generate
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids
from transformers import DynamicCache

from longspan.layers import Context
from longspan.layers.attention.softmax import Softmax
from longspan.layers.positions.repo import Repo
from longspan.models import load
from longspan.registry import Refused
from longspan.training import Batch, TrainConfig, train
from longspan.training.peak import PeakMemory
from longspan.training.retrofit import RetrofitOptions, parse, train_retrofit
from longspan.training.retrofits import Tuned, retrofit_of
from longspan.training.retrofits.repo import RepoAttention, RepoRetrofit, plain_frequencies, repo_layers, without_positions

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]


def spread(model, std=0.6):
    """Weights large enough that places differ by several."""
    g = torch.Generator().manual_seed(3)
    for attention in repo_layers(model).values():
        for weight in attention.learned.parameters():
            weight.data.normal_(std=std, generator=g)
    return model


def converted(family="llama", layers=3, config=None, **knobs):
    return spread(RepoRetrofit(**knobs).convert(tiny(family, layers=layers, **(config or {}))))


def close(got, want, atol=1e-4):
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ against what is known


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per_query_head", [False, True])
def test_rho_of_one_is_the_model_as_it_was(family, per_query_head):
    base, ids = tiny(family), tiny_ids(2, 20)
    method = RepoRetrofit(start=0, rho=1.0, per_query_head=per_query_head)
    close(spread(method.convert(base))(ids).logits, base(ids).logits, atol=1e-5)
    assert type(base.model.layers[0].self_attn).__name__ != "RepoAttention"  # a copy was converted


class AtTheIndex(torch.nn.Module):
    """Places that are the index after all, whatever the token."""

    def forward(self, x):
        return torch.arange(x.shape[1]).float().expand(x.shape[0], 1, -1)


def olmo2():
    """The published backbone: norms over all heads, and an attention that reads the residual stream as it is."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return seeded(Olmo2ForCausalLM, Olmo2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=128,
                                                num_attention_heads=4, num_key_value_heads=4, pad_token_id=2))


def cohere():
    """Neighbouring channels make a pair."""
    from transformers import CohereConfig, CohereForCausalLM

    return seeded(CohereForCausalLM, CohereConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=128,
                                                  num_attention_heads=4, num_key_value_heads=2, pad_token_id=2, bos_token_id=1,
                                                  eos_token_id=2))


def seeded(cls, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config).eval().requires_grad_(False)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2) if weight.dim() > 1 else weight.mul_(1.3)
    return model


@pytest.mark.parametrize("family", [*FAMILIES, olmo2, cohere], ids=lambda f: f if isinstance(f, str) else f.__name__)
def test_standing_at_the_index_is_the_model_as_it_was(family):
    base, ids = tiny(family) if isinstance(family, str) else family(), tiny_ids(2, 20)
    model = RepoRetrofit(start=0).convert(base)
    for attention in repo_layers(model).values():
        attention.learned = AtTheIndex()
    close(model(ids).logits, base(ids).logits, atol=3e-5)
    close(RepoRetrofit(start=0, rho=1.0).convert(base)(ids).logits, base(ids).logits, atol=1e-5)
    assert not torch.allclose(spread(RepoRetrofit(start=0).convert(base))(ids).logits, base(ids).logits, atol=1e-2)


def test_one_layer_equals_the_layer_room():
    """The same weights and places in `longspan.layers` give the same attention, whole and per query head."""
    for per_query_head in (False, True):
        model = converted(layers=1, start=0, per_query_head=per_query_head)
        attention, x = model.model.layers[0].self_attn, torch.randn(2, 9, 32)
        width, heads, kv, head_dim = 32, 4, 2, 8
        assert (attention.head_dim, attention.groups) == (head_dim, heads // kv)
        ours = Softmax().build(width, heads, kv, head_dim, 0, 1)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(ours, name, getattr(attention, name))
        theta = model.config.rope_parameters["rope_theta"]
        position = Repo(start=0, theta=theta, per_query_head=per_query_head).build(width, heads, kv, head_dim, 0, 1)
        position.learned = attention.learned
        want, _ = ours(x, dataclasses.replace(Context.of(2, 9), position=position))
        got, _ = attention(x, model.model.rotary_emb(x, torch.arange(9)[None]))
        close(got, want, atol=1e-5)


def test_a_blend_reads_position_ids():
    model, ids = converted(start=0, rho=0.4), tiny_ids(1, 12)
    moved = torch.arange(12)[None] * 3
    assert not torch.allclose(model(ids, position_ids=moved).logits, model(ids).logits, atol=1e-3)
    content = converted(start=0)
    close(content(ids, position_ids=moved, attention_mask=torch.ones_like(ids)).logits, content(ids).logits, atol=1e-6)
    with pytest.raises(ValueError, match=r"rho=0.4 needs position_ids"):
        x = torch.randn(1, 4, 32)
        model.model.layers[0].self_attn(x, model.model.rotary_emb(x, torch.arange(4)[None]))


def test_zero_assignment_is_no_position():
    """Equal to the base with the rotation taken out of those layers; the control trains q and k alone."""
    base, ids = tiny("llama", layers=3), tiny_ids(2, 16)
    model = RepoRetrofit(start=1).convert(base)
    Tuned.ready(model)
    without_positions(model)

    def unturned(this, hidden_states, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return type(this).forward(this, hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), **kwargs)

    plain = copy.deepcopy(base)
    for layer in plain.model.layers[1:]:
        layer.self_attn.forward = types.MethodType(unturned, layer.self_attn)
    close(model(ids).logits, plain(ids).logits, atol=1e-5)
    asked = {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad}
    assert asked == {"q_proj", "k_proj"}


def test_yarn_stays_with_the_layers_below():
    """Scaled models: learned layers keep the plain base, and rho = 1 is still the model as it was."""
    scaled = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0,
                                  "original_max_position_embeddings": 64}}
    base, ids = tiny("llama", **scaled), tiny_ids(1, 20)
    model = RepoRetrofit(start=1).convert(base)
    attention = model.model.layers[1].self_attn
    want = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(attention._inv_freq, want)
    assert not torch.allclose(model.model.rotary_emb.inv_freq, want)
    close(RepoRetrofit(start=0, rho=1.0).convert(base)(ids).logits, base(ids).logits, atol=1e-5)


# -------------------------------------------------------------------------------------------------- reading and writing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per_query_head", [False, True])
def test_prefill_then_decode_is_one_forward(family, per_query_head):
    model, ids = converted(family, per_query_head=per_query_head, start=0), tiny_ids(2, 20)
    whole = model(ids, use_cache=False).logits
    out = model(ids[:, :12], use_cache=True)
    outs = [out.logits]
    for part in (slice(12, 16), *(slice(t, t + 1) for t in range(16, 20))):
        out = model(ids[:, part], past_key_values=out.past_key_values, use_cache=True)
        outs.append(out.logits)
    close(torch.cat(outs, 1), whole, atol=3e-5)
    assert type(out.past_key_values) is DynamicCache
    heads = 4 if per_query_head else 2
    assert out.past_key_values.layers[0].keys.shape[1] == heads


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generate_greedy_beams_and_cropping(implementation):
    model, ids = converted(), tiny_ids(2, 12)
    model.set_attn_implementation(implementation)
    check_generate(model, ids)
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(9)
    close(model(ids[:, 9:], past_key_values=cache).logits, model(ids).logits[:, 9:])


def test_left_padding_changes_nothing():
    model, ids = converted(), tiny_ids(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    both = model.generate(ids, attention_mask=mask, **options)
    alone = model.generate(ids[:1, 6:], attention_mask=mask[:1, 6:], **options)
    assert torch.equal(both[0, 16:], alone[0, 10:])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    loud = ids.clone()
    loud[0, :6] = 77
    one, other = (model(x, attention_mask=mask, position_ids=places).logits for x in (ids, loud))
    close(one[0, 6:], other[0, 6:], atol=1e-5)
    close(one[:1, 6:], model(ids[:1, 6:]).logits)
    close(one[1:], model(ids[1:]).logits)


def test_packed_documents_do_not_leak():
    model, ids = converted(), tiny_ids(2, 16)
    packed = Tuned(model)(ids, segments=torch.tensor([[0] * 7 + [1] * 9] * 2)).logits
    close(packed[:, :7], model(ids[:, :7], use_cache=False).logits)
    close(packed[:, 7:], model(ids[:, 7:], use_cache=False).logits)
    places = torch.cat((torch.arange(7), torch.arange(9))).expand(2, -1)
    close(model(ids, position_ids=places, use_cache=False).logits, packed)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[:, -2:] = False
    with pytest.raises(Refused, match="padding and packed documents in one batch"):
        Tuned(model)(ids, segments=torch.ones_like(ids), valid=valid)


def test_a_later_token_moves_no_earlier_place():
    model, ids = converted(), tiny_ids(1, 14)
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 120
    assert torch.equal(model(changed).logits[:, :9], model(ids).logits[:, :9])
    close(model(torch.cat((ids, changed))).logits[:1], model(ids).logits, atol=1e-5)


def test_a_deep_copy_is_a_model_of_its_own():
    model, ids = converted(), tiny_ids(1, 10)
    want = model(ids).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, want)
    for attention in repo_layers(twin).values():
        attention.learned.assign.weight.data.mul_(-3)
    twin.set_attn_implementation("eager")
    assert not torch.allclose(twin(ids).logits, want, atol=1e-3) and torch.equal(model(ids).logits, want)
    assert model.model.layers[1].self_attn.config is model.config and twin.model.layers[1].self_attn.config is twin.config


# ------------------------------------------------------------------------------------------------------------- training


def batches_of(ids):
    return lambda index: Batch(ids[:, :-1], ids[:, 1:])


def test_only_places_and_queries_and_keys_are_trained():
    model = RepoRetrofit().convert(tiny("llama", layers=3))
    tuned, before = Tuned.ready(model), copy.deepcopy(dict(model.named_parameters()))
    result = train(tuned, batches_of(tiny_ids(2, 20)), TrainConfig(steps=3, lr=1e-2, log_every=1))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    parts = ("learned.gate", "learned.content", "learned.assign", "q_proj", "k_proj")
    assert moved == {f"model.layers.{i}.self_attn.{part}.weight" for i in (1, 2) for part in parts}
    assert result.history[-1]["nll"] < result.history[0]["nll"]


def test_a_zero_assignment_can_be_left():
    model = spread(RepoRetrofit(start=0).convert(tiny("llama", layers=1)))
    learned = model.model.layers[0].self_attn.learned
    learned.assign.weight.data.zero_()
    Tuned.ready(model)(tiny_ids(2, 12)).logits.square().sum().backward()
    assert learned.assign.weight.grad.any() and not learned.gate.weight.grad.any() and not learned.content.weight.grad.any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_makes_no_square_of_the_length(checkpointing):
    """Forward and backward through the fused function: no tensor has S x S elements. The eager one has them."""
    model = converted(layers=2, start=0, config={"positions": 2048, "vocab": 32})
    if checkpointing:
        model.gradient_checkpointing_enable()
    tuned, S = Tuned.ready(model).train(), 1024
    ids = tiny_ids(1, S, vocab=32)
    seen = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with PeakMemory() as seen[implementation]:
            tuned(ids).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in repo_layers(model)[1].learned.parameters())
    assert seen["sdpa"].largest < S * S <= seen["eager"].largest


def test_parameters():
    """2 D d_p + d_p N for each learned layer, nothing below the first."""
    base = tiny("llama", layers=6)
    count = sum(p.numel() for p in base.parameters())
    cases = [({}, range(2, 6), 2 * 32 * 4 + 4 * 2), ({"start": 5, "d_p": 3}, range(5, 6), 2 * 32 * 3 + 3 * 2),
             ({"per_query_head": True, "start": 0}, range(6), 2 * 32 * 4 + 4 * 4), ({"start": 6}, range(0), 0)]
    for knobs, layers, each in cases:
        model = RepoRetrofit(**knobs).convert(base)
        assert sum(p.numel() for p in model.parameters()) - count == len(layers) * each
        assert list(repo_layers(model)) == list(layers)


def test_first_weights_are_the_retrofits_own():
    """Converting draws nothing from the caller's dice; a seed gives the same weights again."""
    state = torch.get_rng_state()
    first, again, other = (RepoRetrofit(seed=s).convert(tiny("llama", layers=3)) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [[p for a in repo_layers(m).values() for p in a.learned.parameters()] for m in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1]))
    assert not any(torch.equal(a, b) for a, b in zip(weights[0], weights[2]))
    assert not torch.equal(weights[0][0], weights[0][3]) and all(bool((p.abs() <= 0.06).all()) for p in weights[0])


def test_low_precision_keeps_frequencies_and_angles():
    model, ids = converted(), tiny_ids(1, 12)
    want = model(ids).logits
    low = copy.deepcopy(model).bfloat16()
    attention = low.model.layers[1].self_attn
    assert attention._inv_freq.dtype == torch.float32
    assert attention.learned(torch.randn(1, 3, 32, dtype=torch.bfloat16)).dtype == torch.float32
    got = low(ids).logits
    assert got.dtype == torch.bfloat16 and (got - want).abs().mean() < 0.1 * want.std()


# -------------------------------------------------------------------------------------------------- keeping and commands


def test_saved_and_loaded(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    loaded = load(folder, dtype="float32", device="cpu")
    model = spread(RepoRetrofit(start=1, d_p=3).convert(loaded.model))
    model.save_pretrained(tmp_path / "new")
    loaded.tokenizer.save_pretrained(tmp_path / "new")
    again, ids = load(tmp_path / "new", dtype="float32", device="cpu").model, tiny_ids(1, 20)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert retrofit_of(again) == RepoRetrofit(start=1, d_p=3) and list(repo_layers(again)) == [1]
    with pytest.raises(Refused, match="already has the retrofit repo-retrofit"):
        RepoRetrofit().convert(again)


def test_the_command_retrofits(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = RetrofitOptions("repo(start=0)", model=folder, text=tmp_path / "text.txt", context=24, steps=20, lr=1e-2, batch=4,
                              eval_batches=1, log_every=5, out=tmp_path / "out", device="cpu")
    report = train_retrofit(options)
    json.dumps(report)
    assert report["retrofit"] == "repo-retrofit(start=0)" and report["objective"] == "next-token"
    assert report["held_out_after"]["nll"] < report["held_out_before"]["nll"]
    model = load(report["model"], dtype="float32", device="cpu").model
    assert report["trained"] == sum(p.numel() for n, p in model.named_parameters() if ".learned." in n or "q_proj" in n
                                    or "k_proj" in n)
    assert parse("repo(rho=0.5)") == RepoRetrofit(rho=0.5)


def test_the_bundled_models_start_and_size():
    """D = 576, 3 key heads, 20 layers from the tenth on, without reading any weight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=576, intermediate_size=8, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                         vocab_size=8, pad_token_id=2, rope_theta=100_000.0)
    with torch.device("meta"):
        base = LlamaForCausalLM(config)
    model = RepoRetrofit().convert(base, in_place=True)
    assert list(repo_layers(model)) == list(range(10, 30))
    added = sum(p.numel() for a in repo_layers(model).values() for p in a.learned.parameters())
    assert added == 20 * (2 * 576 * 72 + 72 * 3)


@pytest.mark.slow
def test_rho_of_one_is_the_bundled_model():
    loaded = load(dtype="float32", device="cpu")
    ids = torch.tensor([loaded.tokenizer("A token stands where its content says, not where it was written. " * 8)["input_ids"]])
    with torch.no_grad():
        want = loaded.model(ids).logits
        moved = RepoRetrofit().convert(loaded.model)(ids).logits
        got = RepoRetrofit(rho=1.0).convert(loaded.model, in_place=True)(ids).logits
    close(got, want, atol=1e-3)
    assert (moved - want).abs().max() > 1.0


# -------------------------------------------------------------------------------------------------------------- refused


def test_models_that_do_not_fit():
    from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

    for model in (GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)),
                  BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2))):
        with pytest.raises(Refused, match="has no rotary positions"):
            RepoRetrofit().convert(model)
    with pytest.raises(Refused, match="layer 0's attention has no k_proj; expected q_proj, k_proj, v_proj, o_proj"):
        RepoRetrofit(start=0).convert(tiny("phi3"))
    with pytest.raises(Refused, match=r"the model has 2 layers; expected start from 0 to 2"):
        RepoRetrofit(start=3).convert(tiny("llama"))
    with pytest.raises(Refused, match="a width of 36 has no eighth; expected d_p given, such as d_p=4"):
        RepoRetrofit(start=0).convert(tiny("llama", hidden=36, head_dim=8))
    for wrong, sentence in (({"start": -1}, "start=-1"), ({"d_p": 0}, "d_p=0"), ({"rho": -0.1}, "rho=-0.1")):
        with pytest.raises(Refused, match=sentence):
            RepoRetrofit(**wrong)


def test_a_class_that_does_more_is_found_out_before_anything_is_changed():
    base = tiny("llama")
    attention = base.model.layers[0].self_attn

    def doubled(this, **kwargs):
        out, weights = type(this).forward(this, **kwargs)
        return 2 * out, weights

    attention.forward = types.MethodType(doubled, attention)
    with pytest.raises(Refused, match="its attention does more than project, normalise, turn and attend"):
        RepoRetrofit(start=0).convert(base, in_place=True)
    assert base.model.layers[0].self_attn is attention
    base = tiny("llama")
    base.config.rope_parameters = {"rope_type": "default"}
    with pytest.raises(Refused, match="names no rope_theta"):
        RepoRetrofit(start=0).convert(base)


def test_places_that_are_not_finite_name_their_layer():
    model, ids = converted(), tiny_ids(1, 6)
    model.model.layers[2].self_attn.learned.gate.weight.data[0, 0] = float("inf")
    with pytest.raises(Refused, match="layer 2 gives a token the position"):
        model(ids)
    big = converted()
    big.model.layers[1].self_attn.learned.assign.weight.data.mul_(1e8)
    with pytest.warns(UserWarning, match="layer 1 gives a token a position of size"):
        big(ids)


def test_attentions_are_refused():
    with pytest.raises(Refused, match="output_attentions=True"):
        converted()(tiny_ids(1, 6), output_attentions=True)


def test_one_token_has_no_position():
    model, ids = converted(start=0), tiny_ids(1, 1)
    assert all(isinstance(layer.self_attn, RepoAttention) for layer in model.model.layers)
    close(model(ids).logits, tiny("llama", layers=3)(ids).logits, atol=1e-5)
    assert len(plain_frequencies(dataclasses.replace(model.model.layers[0].self_attn.turn, model=model, decoder=model.model,
                                                     layers=tuple(model.model.layers)), 0)) == 4
