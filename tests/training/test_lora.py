"""LoRA starts as the model it changes, trains adapters only, and comes back from its folder merged or apart."""

import copy
import json
import sys

import pytest
import torch
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan.models import load
from longspan.registry import Refused
from longspan.training import Batch, TrainConfig, train
from longspan.training.next_token import NextToken
from longspan.training.retrofit import RetrofitOptions, parse, train_retrofit
from longspan.training.retrofits import Tuned, retrofit_of
from longspan.training.retrofits.l2a import L2ARetrofit
from longspan.training.retrofits.lora import LoRA, merged, projections
from longspan.training.self_distillation import SelfDistillation

IDS = tiny_ids(2, 13)
BATCH = Batch(IDS[:, :-1], IDS[:, 1:])


def trained(model, steps=3, objective="next-token"):
    tuned = Tuned.ready(model)
    train(tuned, lambda index: BATCH, TrainConfig(steps=steps, lr=1e-2, log_every=1), objective)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2"])
@pytest.mark.parametrize("mlp", [False, True])
def test_the_start_is_the_model_itself(family, mlp):
    base, state = tiny(family), torch.get_rng_state()
    model = LoRA(rank=3, mlp=mlp).convert(base)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    names = projections(base, mlp)
    assert all(".self_attn." in name or ".mlp." in name for name in names) and any(".mlp." in n for n in names) == mlp
    inside = {n.split(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n}
    assert inside == set(names) and not model.training


def test_only_adapters_are_trained():
    model = LoRA(rank=2).convert(tiny("llama"))
    before = copy.deepcopy(dict(model.named_parameters()))
    first = NextToken()(Tuned(model), BATCH).loss
    trained(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_" in name} and len(moved) == 2 * 4 * 2
    assert NextToken()(Tuned(model), BATCH).loss < first


def test_the_addition_is_scaled():
    """y = W x + alpha/rank B A x."""
    model = trained(LoRA(rank=2, alpha=6.0).convert(tiny("llama")))
    layer, x = model.model.layers[0].self_attn.q_proj, torch.randn(4, 32)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3.0 * x @ a.T @ b.T)
    assert LoRA(rank=2).convert(tiny("llama")).model.layers[0].self_attn.q_proj.scaling["default"] == 2.0


def test_seeds_choose_the_first_matrices():
    first = [LoRA(seed=seed).convert(tiny("llama")).model.layers[1].self_attn.v_proj.lora_A["default"].weight
             for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_half_precision_keeps_wide_adapters():
    model = LoRA(rank=2).convert(tiny("llama").bfloat16())
    wide = {p.dtype for name, p in model.named_parameters() if ".lora_" in name}
    assert wide == {torch.float32} and model(IDS).logits.dtype == torch.bfloat16
    trained(model)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    assert merged(model).model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_saved_apart_and_loaded_merged_or_apart(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    for merge in (True, False):
        loaded = load(folder, dtype="float32", device="cpu")
        model = trained(LoRA(rank=2, merge=merge).convert(loaded.model), objective=SelfDistillation())
        model.save_pretrained(tmp_path / str(merge))
        loaded.tokenizer.save_pretrained(tmp_path / str(merge))
        again = load(tmp_path / str(merge), dtype="float32", device="cpu").model
        adapters = [name for name, _ in again.named_parameters() if ".lora_" in name]
        if merge:
            torch.testing.assert_close(again(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)
            assert not adapters and not hasattr(again.config, "longspan_retrofit") and type(again) is type(loaded.model)
            assert not torch.allclose(again(IDS).logits, loaded.model(IDS).logits, atol=1e-3)
            with pytest.raises(Refused, match="has no retrofit"):
                retrofit_of(again)
        else:
            assert torch.equal(again(IDS).logits, model(IDS).logits)
            assert adapters and retrofit_of(again) == LoRA(rank=2, merge=False)
            torch.testing.assert_close(merged(again)(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)


def test_the_command_distils_with_adapters(tmp_path):
    folder = write_tiny_folder(tmp_path / "base")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = RetrofitOptions("lora(rank=2)", model=folder, text=tmp_path / "text.txt", context=24, steps=20, lr=1e-2, batch=4,
                              objective=SelfDistillation(Y=8), eval_batches=1, log_every=5, out=tmp_path / "out", device="cpu")
    report = train_retrofit(options)
    json.dumps(report)
    assert report["retrofit"] == "lora-retrofit(rank=2)" and report["objective"] == "self-distillation(Y=8)"
    assert {"nll", "kl"} <= report["train"].keys()
    assert report["held_out_before"]["nll"] == report["held_out_base"]["nll"] > report["held_out_after"]["nll"]
    assert report["trained"] == sum(2 * (32 + out) for out in (32, 16, 16, 32)) * 2
    assert not hasattr(load(report["model"], dtype="float32", device="cpu").model.config, "longspan_retrofit")


def test_refusals(monkeypatch):
    assert parse("lora(rank=4)") == LoRA(rank=4)
    for wrong in ({"rank": 0}, {"dropout": 1.0}, {"alpha": -1.0}):
        with pytest.raises(Refused, match=next(iter(wrong))):
            LoRA(**wrong)
    other = L2ARetrofit(window=4).convert(tiny("llama"))
    with pytest.raises(Refused, match="already has the retrofit l2a-retrofit"):
        LoRA().convert(other)
    with pytest.raises(Refused, match="lora-retrofit, which alone can be merged"):
        merged(other)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Refused, match=r"expected the extra longspan\[train\]"):
        LoRA().convert(tiny("llama"))
