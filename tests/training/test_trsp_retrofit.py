"""TRSP's retrofit of transformers models: exactness, caches, padding, training, saving, and which models it refuses."""

import copy
import dataclasses
import json

import pytest
import torch
from generating import check_generate
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from longspan.layers.sidepaths.triangular import tri_box
from longspan.layers.sidepaths.trsp import TRSPModule
from longspan.models import load
from longspan.registry import Refused
from longspan.training import Batch, TrainConfig, train
from longspan.training.retrofit import RetrofitOptions, parse, train_retrofit
from longspan.training.retrofits import Tuned, retrofit_of
from longspan.training.retrofits.remembering import RememberingCache
from longspan.training.retrofits.trsp import TRSPRetrofit, gate_of

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma"]


def smoothed(family="llama", layers=4, **knobs):
    """A converted tiny model whose gate is well open."""
    return TRSPRetrofit(**({"init_bias": -1.0, "l_ctx": 64} | knobs)).convert(tiny(family, layers=layers))


def places_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_closed_gate_is_the_model_bit_for_bit(family):
    base, ids = tiny(family), tiny_ids(2, 20)
    model = TRSPRetrofit(init_bias=float("-inf")).convert(base)
    assert torch.equal(model(ids).logits, base(ids).logits)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert torch.equal(model(ids, attention_mask=mask).logits, base(ids, attention_mask=mask).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), base.generate(ids, **options))


@pytest.mark.slow
def test_a_closed_gate_is_the_bundled_model_bit_for_bit():
    loaded = load(dtype="float32")
    ids = torch.tensor([loaded.tokenizer("The quick brown fox jumps over the lazy dog. " * 10)["input_ids"]])
    with torch.no_grad():
        plain = loaded.model(ids).logits
        model = TRSPRetrofit(init_bias="-inf").convert(loaded.model, in_place=True)
        assert torch.equal(model(ids).logits, plain)
    assert sum(p.numel() for p in gate_of(model).parameters()) == 50


def test_adds_the_filtered_residual_stream_beside_attention():
    base, ids = tiny("llama"), tiny_ids(2, 20)
    model = TRSPRetrofit(init_bias=-1.0).convert(base)
    x, turned = base.model.embed_tokens(ids), base.model.rotary_emb(torch.zeros(1), torch.arange(20)[None])
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    for i, layer in enumerate(base.model.layers):
        attended, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=turned, attention_mask=mask)
        x = x + attended + gate_of(model)(2**i, 20) * tri_box(x, 2**i + 1)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    torch.testing.assert_close(model(ids, use_cache=False).logits, base.lm_head(base.model.norm(x)), **CLOSE)
    assert not torch.allclose(model(ids).logits, base(ids).logits, atol=1e-2)
    assert not hasattr(base.model, "length_gate")  # a copy was converted


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode_is_one_forward(family):
    model, ids = smoothed(family), tiny_ids(2, 24)
    whole = model(ids, use_cache=False).logits
    out = model(ids[:, :15], use_cache=True)
    outs = [out.logits]
    for t in range(15, 24):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        outs.append(out.logits)
    torch.testing.assert_close(torch.cat(outs, 1), whole, **CLOSE)
    cache = out.past_key_values
    assert [state.inputs.shape[1] for _, state in sorted(cache.states.items())] == [2, 4, 8, 16]
    assert cache.nbytes == sum(cache.layer_bytes()) > sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_the_length_read_so_far_is_the_reference():
    """By default a step's gate follows the tokens read: the first call's rows equal one forward over its own tokens."""
    model, ids = smoothed(l_ctx="current"), tiny_ids(1, 20)
    out = model(ids[:, :12], use_cache=True)
    torch.testing.assert_close(out.logits, model(ids[:, :12], use_cache=False).logits, **CLOSE)
    step = model(ids[:, 12:13], past_key_values=out.past_key_values, use_cache=True).logits
    assert not torch.allclose(step[:, 0], model(ids[:, :13], use_cache=False).logits[:, -1], **CLOSE)


def test_generate_greedy_and_beams():
    model, ids = smoothed(), tiny_ids(2, 12)
    check_generate(model, ids)
    with pytest.raises(Refused, match="can't give back the 2 tokens"):
        model(ids, use_cache=True).past_key_values.crop(-2)


@pytest.mark.parametrize("l_ctx", [64, 16])
def test_padding_does_not_leak(l_ctx):
    """On the left and in the middle; also where windows never slide."""
    model, ids = smoothed(l_ctx=l_ctx, layers=6), tiny_ids(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, 4:9] = 0, 0
    out = model(ids, attention_mask=mask, position_ids=places_of(mask), use_cache=True)
    for row in range(2):
        alone = model(ids[row : row + 1, mask[row].bool()], use_cache=False).logits
        torch.testing.assert_close(out.logits[row : row + 1, mask[row].bool()], alone, **CLOSE)
    longer = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    step = model(ids[:, :1], attention_mask=longer, position_ids=places_of(longer)[:, -1:],
                 past_key_values=out.past_key_values, use_cache=True).logits
    again = model(torch.cat((ids[:1, 6:], ids[:1, :1]), 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(step[:1], again, **CLOSE)


def test_left_padded_generation_equals_each_row_alone():
    model, ids = smoothed(l_ctx=32, layers=6), tiny_ids(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    together = model.generate(ids, attention_mask=mask, **options)[:, 14:]
    assert torch.equal(together[:1], model.generate(ids[:1, 5:], **options)[:, 9:])
    assert torch.equal(together[1:], model.generate(ids[1:], **options)[:, 14:])


def test_packed_documents_do_not_leak():
    model, ids = smoothed(), tiny_ids(2, 16)
    segments = torch.tensor([[0] * 7 + [1] * 9] * 2)
    packed = Tuned(model)(ids, segments=segments).logits
    torch.testing.assert_close(packed[:, :7], model(ids[:, :7], use_cache=False).logits, **CLOSE)
    torch.testing.assert_close(packed[:, 7:], model(ids[:, 7:], use_cache=False).logits, **CLOSE)
    places = torch.cat((torch.arange(7), torch.arange(9))).expand(2, -1)
    torch.testing.assert_close(model(ids, position_ids=places, use_cache=False).logits, packed, **CLOSE)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[:, 3:5] = False
    gaps = Tuned(model)(ids, segments=segments, valid=valid)
    torch.testing.assert_close(gaps.logits[:, 7:], packed[:, 7:], **CLOSE)
    alone = model(torch.cat((ids[:, :3], ids[:, 5:7]), 1), use_cache=False).logits
    torch.testing.assert_close(gaps.logits[:, :7][:, valid[0, :7]], alone, **CLOSE)
    with pytest.raises(Refused, match="expected one of the two"):
        model(ids, attention_mask=valid.long(), longspan_context=gaps.ctx)
    with pytest.raises(Refused, match="expected use_cache=False"):
        model(ids, position_ids=places, use_cache=True)


@pytest.mark.parametrize("what", ["gate", "attention", "all"])
def test_what_is_trained(what):
    model = smoothed(train=what, layers=2)
    tuned = Tuned.ready(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    ids = tiny_ids(2, 20)
    batch = Batch(ids[:, :-1], ids[:, 1:])
    train(tuned, lambda index: batch, TrainConfig(steps=2, lr=1e-3, log_every=1))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    gate = {f"model.length_gate.{name}" for name in ("first.weight", "first.bias", "second.weight", "second.bias", "kappa")}
    wanted = {"gate": gate, "attention": gate | {n for n in before if "self_attn" in n}, "all": set(before)}[what]
    assert moved == wanted


def test_gradient_checkpointing_gives_the_same_gradients():
    ids, found = tiny_ids(2, 20), []
    for checkpointed in (False, True):
        model = smoothed(layers=2).train().requires_grad_()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_copies_have_gates_of_their_own():
    model, ids = smoothed(), tiny_ids(1, 20)
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, model(ids).logits)
    gate_of(other).second.bias.data.fill_(-float("inf"))
    assert torch.equal(other(ids).logits, tiny("llama", layers=4)(ids).logits)
    assert not torch.equal(other(ids).logits, model(ids).logits)
    assert sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in tiny("llama", layers=4).parameters()) == 50


def test_saved_and_loaded(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    loaded = load(folder, dtype="float32", device="cpu")
    for method in (TRSPRetrofit(init_bias=-0.5, l_ctx=32, train="gate"), TRSPRetrofit(init_bias="-inf")):
        model = method.convert(loaded.model)
        gate_of(model).kappa.data.fill_(0.7)
        model.save_pretrained(tmp_path / "new")
        loaded.tokenizer.save_pretrained(tmp_path / "new")
        again, ids = load(tmp_path / "new", dtype="float32", device="cpu").model, tiny_ids(1, 20)
        assert torch.equal(again(ids).logits, model(ids).logits) and retrofit_of(again) == method
    json.loads((tmp_path / "new" / "config.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    with pytest.raises(Refused, match="already has the retrofit trsp-retrofit"):
        TRSPRetrofit().convert(again)
    with pytest.raises(Refused, match="nothing of it can be pruned"):
        method.prune(again, [0])


def test_bfloat16_models_keep_their_dtype():
    base = tiny("llama").bfloat16()
    model, ids = TRSPRetrofit(init_bias=0.0).convert(base), tiny_ids(1, 20)
    out = model(ids, use_cache=True)
    assert out.logits.dtype == torch.bfloat16 and gate_of(model).kappa.dtype == torch.float32
    assert {state.inputs.dtype for state in out.past_key_values.states.values()} == {torch.bfloat16}


def test_attention_that_answers_with_a_tensor_or_a_tuple():
    """Older classes answer with other tuples, newer ones may answer with a bare tensor."""
    model, ids = smoothed(layers=1), tiny_ids(1, 12)
    (hook,) = model.model.layers[0].self_attn._forward_hooks.values()
    x = torch.randn(1, 12, 32)
    ctx = dataclasses.replace(Tuned(model)(ids).ctx, residual=x)
    bare = hook(None, (), {"longspan_context": ctx}, torch.zeros_like(x))
    first, *rest = hook(None, (), {"longspan_context": ctx}, (torch.zeros_like(x), "weights", "more"))
    assert torch.equal(bare, first) and rest == ["weights", "more"] and bare.any()
    assert isinstance(hook.keywords["side"], TRSPModule)


def test_models_that_are_not_pre_norm_are_refused():
    looked = "expected pre-norm layers with input_layernorm, self_attn, post_attention_layernorm, mlp"
    for family in ("gemma2", "gemma3"):
        with pytest.raises(Refused, match=f"layer 0 does more than add self_attn of input_layernorm.*{looked}"):
            TRSPRetrofit().convert(tiny(family))
    with pytest.raises(Refused, match=f"GPT2LMHeadModel: no get_decoder.*{looked}"):
        TRSPRetrofit().convert(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    scaled = GraniteForCausalLM(GraniteConfig(**sizes, residual_multiplier=0.5))
    with pytest.raises(Refused, match="layer 0 does more than add"):
        TRSPRetrofit().convert(scaled)
    broken = tiny("llama")
    broken.model.layers[1].norm, broken.model.layers[1].post_attention_layernorm = torch.nn.Identity(), None
    with pytest.raises(Refused, match=f"layer 1 has no post_attention_layernorm; {looked}"):
        TRSPRetrofit().convert(broken)


def test_texts_and_caches_that_do_not_fit():
    model, ids = smoothed(l_ctx=10), tiny_ids(1, 11)
    with pytest.raises(Refused, match="a text of 11 tokens, L_ctx=10"):
        model(ids)
    assert smoothed(l_ctx=10, allow_longer=True)(ids).logits.isfinite().all()
    with pytest.raises(Refused, match="expected none, an empty DynamicCache"):
        model(ids[:, :5], past_key_values=tiny("llama", layers=4)(ids, use_cache=True).past_key_values)
    assert isinstance(model(ids[:, :5], past_key_values=DynamicCache(), use_cache=True).past_key_values, RememberingCache)
    with pytest.raises(Refused, match="output_attentions=True"):
        model(ids[:, :5], output_attentions=True)


def test_retrofits_by_name():
    assert parse("trsp") == parse("trsp-retrofit") == TRSPRetrofit()
    assert parse('trsp(init_bias="-inf", l_ctx=4096, train=gate)') == TRSPRetrofit(init_bias="-inf", l_ctx=4096, train="gate")
    for wrong in ("trsp(l_ctx=0)", "trsp(init_bias=low)", "trsp(train=everything)"):
        with pytest.raises(Refused):
            parse(wrong)


def test_the_command_retrofits(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = RetrofitOptions("trsp(train=all)", model=folder, text=tmp_path / "text.txt", context=24, steps=20, lr=5e-3,
                              batch=4, eval_batches=1, log_every=5, out=tmp_path / "out", device="cpu")
    report = train_retrofit(options)
    json.dumps(report)
    assert report["held_out_after"]["nll"] < report["held_out_before"]["nll"]
    assert report["held_out_before"]["nll"] == pytest.approx(report["held_out_base"]["nll"], abs=0.05)
    model = load(report["model"], dtype="float32", device="cpu").model
    assert report["trained"] == sum(p.numel() for p in model.parameters())
    assert report["cache_bytes"] == model(tiny_ids(1, 24), use_cache=True).past_key_values.nbytes
