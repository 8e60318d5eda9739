"""L2A's objective against its formula, and its retrofit of transformers models: layers, cache, training, pruning, saving."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from generating import check_generate
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids
from transformers import DynamicCache

from longspan.layers.attention.l2a import L2A
from longspan.models import load
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused
from longspan.training import Batch, Recall, TrainConfig, Trainer, TrainOptions, train
from longspan.training.command import train as command
from longspan.training.l2a import L2ANextToken, firing_rates, penalty
from longspan.training.next_token import NextToken
from longspan.training.retrofit import RetrofitOptions, parse, train_retrofit
from longspan.training.retrofits import Tuned, retrofit_of
from longspan.training.retrofits.l2a import L2ARetrofit, chosen_layers, most_skipped, skip_rates
from longspan.training.retrofits.two_stores import TwoStoreCache

TASK = Recall(pairs=4, queries=4, keys=6, values=5, batch=8)


def decoder(router=None, **knobs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(TASK.vocab_size, dim=16, n_heads=2, mixer=L2A(**({"window": 4} | knobs))))
        if router is not None:
            for layer in model.stack.layers:
                torch.nn.init.normal_(layer.mixer.router.weight, std=router)
    return model


# ------------------------------------------------------------------------------------------------------- the objective


def test_a_zero_router_costs_a_quarter():
    """R is L/4 as the paper's sum over tokens, 1/4 as a mean; lambda times it is added to the cross-entropy."""
    model, batch = decoder(), TASK(0)
    plain = NextToken()(model, batch).loss
    mean, total = L2ANextToken(lambda_mean=0.2)(model, batch), L2ANextToken(lambda_mean=0.0, lambda_reg=0.2)(model, batch)
    torch.testing.assert_close(mean.loss, plain + 0.2 * 0.25)
    torch.testing.assert_close(total.loss, plain + 0.2 * 0.25 * batch.ids.shape[1])
    assert mean.metrics["skip"] == 0.0 and mean.metrics["fires_0"] == mean.metrics["fires_1"] == 1.0
    assert total.metrics["penalty"] == pytest.approx(batch.ids.shape[1] / 4)


def test_penalty_and_rates_by_hand_without_padding():
    p = [torch.tensor([[0.5, 1.0, 0.0], [0.2, 0.9, 0.9]]), torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.9, 0.9]])]
    valid = torch.tensor([[True, True, True], [True, False, False]])
    sums = [0.25 + 1.0 + 0.04, 0.01 + 0.04 + 0.09 + 0.16]
    assert penalty(p, valid).item() == pytest.approx(sum(sums) / 2 / 4)
    assert penalty(p, valid, per_token=False).item() == pytest.approx(sum(sums) / 2 / 2)
    fires = [x >= 0.5 for x in p]
    assert firing_rates(fires, valid).tolist() == [0.5, 0.0]
    assert firing_rates(fires).tolist() == pytest.approx([4 / 6, 2 / 6])


def test_padding_counts_nowhere():
    model, batch = decoder(router=1.0), TASK(0)
    longer = torch.nn.functional.pad(batch.ids, (0, 5)), torch.nn.functional.pad(batch.labels, (0, 5), value=-100)
    valid = torch.nn.functional.pad(torch.ones_like(batch.ids, dtype=torch.bool), (0, 5))
    a, b = L2ANextToken()(model, batch), L2ANextToken()(model, Batch(*longer, valid=valid))
    torch.testing.assert_close(a.loss, b.loss)
    assert a.metrics == pytest.approx(b.metrics, abs=1e-5)
    assert 0.05 < a.metrics["skip"] < 0.95


def test_the_weight_rises_after_the_warm_up():
    linear = L2ANextToken(lambda_mean=0.1, warmup=0.4)
    assert [linear.weight(x) for x in (0.0, 0.39, 0.4, 0.7, 1.0)] == pytest.approx([0, 0, 0, 0.05, 0.1])
    cosine = L2ANextToken(lambda_mean=0.1, warmup=0.4, schedule="cosine")
    assert cosine.weight(0.55) == pytest.approx(0.1 * (0.5 - 0.5 * math.cos(math.pi / 4)))
    constant = L2ANextToken(lambda_mean=0.1, warmup=0.4, schedule="constant")
    assert [constant.weight(x) for x in (0.3, 0.41)] == [0.0, 0.1]


def test_the_loop_says_how_far_it_is():
    """lambda is 0 at the first step and whole at the last, whatever is accumulated."""
    config = TrainConfig(steps=5, log_every=1, accumulate=2)
    history = train(decoder(), TASK, config, L2ANextToken(lambda_mean=0.1, warmup=0.5)).history
    assert [row["lambda"] for row in history] == pytest.approx([0, 0, 0, 0.05, 0.1])


def test_the_price_makes_tokens_skip_and_a_resumed_run_is_the_same(tmp_path):
    config = TrainConfig(steps=30, lr=5e-3, log_every=1, checkpoint_every=20, keep_last=3)
    objective = L2ANextToken(lambda_mean=1.0, warmup=0.2)
    want = Trainer(model := decoder(), TASK, config, objective, out=tmp_path).run()
    assert want.history[0]["skip"] == 0.0 and want.last["skip"] > 0.5
    free = train(decoder(), TASK, config_without_checkpoints(config), L2ANextToken(lambda_mean=0.0)).last
    assert free["skip"] < want.last["skip"]
    for folder in tmp_path.glob("step-00000030"):
        (folder / "run.json").unlink()
    Trainer(again := decoder(), TASK, config, objective, out=tmp_path).run(resume=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def config_without_checkpoints(config):
    return dataclasses.replace(config, checkpoint_every=0)


def test_the_command_trains_the_mixer(tmp_path):
    options = TrainOptions(L2A(window=4), objective=L2ANextToken(), task="recall", context=16, steps=3, dim=16, heads=2,
                           batch=4, eval_batches=1, out=tmp_path)
    report = command(options)
    assert report["mixer"] == "l2a(window=4)" and "skip" in report["held_out_after"]
    assert Decoder.load(report["model"]).config.mixer == L2A(window=4)


def test_refused_objectives():
    with pytest.raises(Refused, match=r"lambda_mean=-0.1"):
        L2ANextToken(lambda_mean=-0.1)
    with pytest.raises(Refused, match=r"lambda_reg=-1.0"):
        L2ANextToken(lambda_reg=-1.0)
    with pytest.raises(Refused, match="expected one of the two"):
        L2ANextToken(lambda_mean=0.1, lambda_reg=1e-8)
    with pytest.raises(Refused, match="no layer of the model has a gate"):
        L2ANextToken()(Decoder(DecoderConfig(TASK.vocab_size, dim=16)), TASK(0))


# -------------------------------------------------------------------------------------------------------- the retrofit


def routed(family="llama", std=0.5, **knobs):
    """A converted tiny model of which some tokens fire."""
    model = L2ARetrofit(**({"window": 6} | knobs)).convert(tiny(family))
    g = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "mixer"):
            layer.self_attn.mixer.router.weight.data.normal_(std=std, generator=g)
    return model


def test_the_start_attends_twice_with_the_same_weights():
    """One layer by hand: x + s + a, s within the window, a over everything, both with the base's weights."""
    base = tiny("llama", layers=1)
    model, ids = L2ARetrofit(window=6).convert(base), tiny_ids(2, 20)
    got = model(ids, use_cache=False, output_hidden_states=False).logits
    wide = copy.deepcopy(base)
    x = wide.model.embed_tokens(ids)
    places = torch.arange(20)[None]
    layer, turned = wide.model.layers[0], wide.model.rotary_emb(x, places)
    band = torch.ones(20, 20, dtype=torch.bool).tril()
    local = band & torch.ones(20, 20, dtype=torch.bool).triu(-5)
    for mask in (local, band):
        added, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=turned, attention_mask=mask[None, None])
        x = x + added
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    torch.testing.assert_close(got, wide.lm_head(wide.model.norm(x)), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, base(ids).logits, atol=1e-2)
    assert type(base.model.layers[0].self_attn).__name__ == "LlamaAttention"  # a copy was converted


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_prefill_then_decode_is_one_forward(family):
    model, ids = routed(family), tiny_ids(2, 24)
    whole = model(ids, use_cache=False).logits
    out = model(ids[:, :15], use_cache=True)
    outs = [out.logits]
    for t in range(15, 24):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        outs.append(out.logits)
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-4, rtol=1e-4)
    token = 2 * 2 * 2 * 8 * 4
    assert out.past_key_values.layer_bytes() == [24 * token + 5 * (token + 2 * 8)] * 2
    rates = skip_rates(model, lambda index: Batch(ids, ids), 1)
    assert 0.05 < sum(rates.values()) / 2 < 0.95


def test_generate_greedy_and_beams():
    model, ids = routed(), tiny_ids(2, 12)
    check_generate(model, ids)
    with pytest.raises(Refused, match="can't give back the 2 tokens"):
        model(ids, use_cache=True).past_key_values.crop(2)


def test_padding_and_packed_documents_do_not_leak():
    model, ids = routed(), tiny_ids(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    alone = model(ids[:1, 6:], use_cache=False).logits
    places = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=places, use_cache=True)
    torch.testing.assert_close(out.logits[:1, 6:], alone, atol=1e-4, rtol=1e-4)
    longer = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    step = model(ids[:, :1], attention_mask=longer, position_ids=places[:, -1:] + 1,
                 past_key_values=out.past_key_values, use_cache=True).logits
    again = model(torch.cat((ids[:1, 6:], ids[:1, :1]), 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(step[:1], again, atol=1e-4, rtol=1e-4)
    segments = torch.tensor([[0] * 7 + [1] * 9] * 2)
    packed = Tuned(model)(ids, segments=segments).logits
    torch.testing.assert_close(packed[:, :7], model(ids[:, :7], use_cache=False).logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed[:, 7:], model(ids[:, 7:], use_cache=False).logits, atol=1e-4, rtol=1e-4)
    places = torch.cat((torch.arange(7), torch.arange(9))).expand(2, -1)
    by_places = model(ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(by_places, packed, atol=1e-4, rtol=1e-4)


def test_only_attention_norms_and_router_are_trained():
    model = L2ARetrofit(window=6).convert(tiny("llama"))
    tuned = Tuned.ready(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    ids = tiny_ids(2, 20)
    batch = Batch(ids[:, :-1], ids[:, 1:])
    train(tuned, lambda index: batch, TrainConfig(steps=2, lr=1e-3, log_every=1), L2ANextToken(warmup=0.0))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    frozen = {name for name in before if "mlp" in name or "embed" in name or "lm_head" in name}
    assert frozen and not moved & frozen
    assert moved == before.keys() - frozen
    assert {"model.norm.weight", "model.layers.1.self_attn.mixer.router.weight"} <= moved


def test_prune_drops_weights_and_keys():
    model, ids = routed(), tiny_ids(1, 20)
    cache = model(ids, use_cache=True).past_key_values
    rates = skip_rates(model, lambda index: Batch(ids, ids), 1)
    worst = most_skipped(rates, 1)
    assert rates[worst[0]] == max(rates.values())
    token, weights = 2 * 2 * 8 * 4, sum(p.numel() for p in model.parameters())
    L2ARetrofit().prune(model, worst)
    pruned = model(ids, use_cache=True).past_key_values
    assert cache.nbytes - pruned.nbytes == 20 * token
    assert pruned.nbytes == sum(pruned.layer_bytes())
    assert weights - sum(p.numel() for p in model.parameters()) == 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32
    assert skip_rates(model, lambda index: Batch(ids, ids), 1).keys() == rates.keys() - set(worst)
    other = 1 - worst[0]
    with pytest.raises(Refused, match="allow_local_only=True"):
        L2ARetrofit().prune(model, [other])
    L2ARetrofit().prune(model, [other], allow_local_only=True)
    assert model(ids, use_cache=True).past_key_values.nbytes == 2 * 5 * (token + 8)
    assert most_skipped({0: 0.5, 1: 0.5, 2: 0.1}, 1) == [1]


def test_saved_and_loaded(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    loaded = load(folder, dtype="float32", device="cpu")
    model = L2ARetrofit(window=5, theta=0.4).convert(loaded.model)
    model.model.layers[0].self_attn.mixer.router.weight.data.normal_()
    L2ARetrofit().prune(model, [1])
    model.save_pretrained(tmp_path / "new")
    loaded.tokenizer.save_pretrained(tmp_path / "new")
    again, ids = load(tmp_path / "new", dtype="float32", device="cpu").model, tiny_ids(1, 20)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert retrofit_of(again) == L2ARetrofit(window=5, theta=0.4) and again.config.longspan_retrofit["pruned"] == [1]
    with pytest.raises(Refused, match="already has the retrofit l2a-retrofit"):
        L2ARetrofit().convert(again)
    with pytest.raises(Refused, match="has no retrofit"):
        retrofit_of(loaded.model)
    with pytest.raises(Refused, match="device_map="):
        load(tmp_path / "new", device_map="auto")
    entry = json.loads((tmp_path / "new" / "config.json").read_text())
    entry["num_hidden_layers"] = 1
    (tmp_path / "new" / "config.json").write_text(json.dumps(entry))
    with pytest.raises(Refused):
        load(tmp_path / "new")


def test_some_layers_of_a_model_with_windows():
    """Layers that aren't converted keep their own cache beside the two stores."""
    base = tiny("mistral", sliding_window=8, layers=3)
    with pytest.raises(Refused, match='already has a window of 8 tokens; say which layers to convert, such as layers="0-2"'):
        L2ARetrofit().convert(base)
    model, ids = routed_from(base, "0,2"), tiny_ids(1, 20)
    whole = model(ids, use_cache=False).logits
    out = model(ids[:, :13], use_cache=True)
    rest = [model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True).logits for t in range(13, 20)]
    torch.testing.assert_close(torch.cat((out.logits, *rest), 1), whole, atol=1e-4, rtol=1e-4)
    bytes_ = out.past_key_values.layer_bytes()
    assert bytes_[0] == bytes_[2] and bytes_[1] != bytes_[0] > 0
    assert chosen_layers("0-1, 3", 4) == [0, 1, 3]
    for wrong in ("4", "a", "", "0-", "2-1"):
        with pytest.raises(Refused, match="expected"):
            chosen_layers(wrong, 4)


def routed_from(base, layers):
    model = L2ARetrofit(window=6, layers=layers).convert(base)
    model.model.layers[0].self_attn.mixer.router.weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    return model


def test_models_and_caches_that_do_not_fit():
    with pytest.raises(Refused, match="layer 0 differs from Llama's in resid_attn_dropout"):
        L2ARetrofit().convert(tiny("phi3"))
    model, ids = routed(), tiny_ids(1, 6)
    filled = tiny("llama")(ids, use_cache=True).past_key_values
    with pytest.raises(Refused, match="expected none, an empty DynamicCache"):
        model(ids, past_key_values=filled)
    assert isinstance(model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values, TwoStoreCache)
    with pytest.raises(Refused, match="output_attentions=True"):
        model(ids, output_attentions=True)
    with pytest.raises(Refused, match="attention_mask of shape"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(Refused, match="whole sequences"):
        Tuned(model)(ids, state=1)


def test_the_command_retrofits(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = RetrofitOptions("l2a(window=8)", model=folder, text=tmp_path / "text.txt", context=24, steps=20, lr=5e-3,
                              batch=4, eval_batches=1, log_every=5, out=tmp_path / "out", device="cpu")
    seen = []
    report = train_retrofit(options, lambda step, metrics: seen.append(step))
    json.dumps(report)
    assert report["held_out_after"]["nll"] < report["held_out_before"]["nll"] and seen[-1] == 20
    assert report["retrofit"] == "l2a-retrofit(window=8)" and "skip" not in report["held_out_base"]
    model = load(report["model"], dtype="float32", device="cpu").model
    ids = tiny_ids(1, 24)
    assert report["cache_bytes"] == model(ids, use_cache=True).past_key_values.nbytes
    assert report["trained"] == sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for n, p in model.named_parameters() if "mlp" in n or "embed" in n or "lm_head" in n)
    with pytest.raises(Refused, match="already holds a run"):
        train_retrofit(options)


def test_retrofits_by_name():
    assert parse("l2a(window=9)") == parse("l2a-retrofit(window=9)") == L2ARetrofit(window=9)
    with pytest.raises(Refused, match="unknown retrofit 'l2b'; did you mean 'l2a'"):
        parse("l2b")
    with pytest.raises(Refused, match="window=0"):
        parse("l2a(window=0)")
    with pytest.raises(Refused, match=r"theta=1.0"):
        L2ARetrofit(theta=1.0)
