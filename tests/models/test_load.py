"""Loading: every form a model comes in, the cache of conversions, and everything that is refused."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import FAMILIES, TOKENS, tiny, tiny_ids, tiny_tokenizer

from longspan.models.load import context_window, default_dtype, encode, fingerprint, load
from longspan.registry import Refused


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama saved with a tokenizer, as a user would have it."""
    place = tmp_path / "tiny-llama"
    tiny("llama", vocab=len(TOKENS)).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def logits(model, ids=None):
    with torch.no_grad():
        return model(tiny_ids(2, 40) if ids is None else ids).logits


# -------------------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_from_a_folder(family, tmp_path):
    model = tiny(family, vocab=len(TOKENS))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype="float32")
    assert type(loaded.model) is type(model) and not loaded.model.training
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.name == tmp_path.name and loaded.folder == tmp_path
    assert loaded.fingerprint == fingerprint(tmp_path) == fingerprint(model) == fingerprint(loaded.model)
    assert context_window(loaded.model) == 256


def test_it_unpacks_and_the_tokenizer_is_ready_for_batches(folder):
    model, tokenizer = load(str(folder))
    assert model.dtype is default_dtype("cpu")[0]
    assert tokenizer.padding_side == "left" and tokenizer.pad_token == "</s>"
    batch = tokenizer(["the", "the the the"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "<s>the</s>"


def test_dtypes(folder):
    assert load(folder, dtype="auto").model.dtype is torch.float32  # as it was saved
    assert load(folder, dtype="torch.bfloat16").model.dtype is torch.bfloat16
    assert load(folder, dtype=torch.float64).model.dtype is torch.float64
    with pytest.raises(Refused, match="did you mean 'bfloat16'"):
        load(folder, dtype="bfloat17")
    with pytest.raises(Refused, match="floating dtype"):
        load(folder, dtype=torch.int8)


def test_the_default_dtype_follows_the_hardware(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_bf16": True})
    assert default_dtype("cpu") == (torch.bfloat16, "this CPU multiplies bfloat16 in hardware (amx_bf16)")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False})
    assert default_dtype("cpu") == (torch.float32, "this CPU has no bfloat16 instructions")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert default_dtype("cuda")[0] is torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert default_dtype("cuda:1")[0] is torch.bfloat16


def test_devices_and_device_maps(folder):
    whole = load(folder, dtype="float32")
    assert load(folder, device="meta", dtype="float32").model.device.type == "meta"
    mapped = load(folder, device_map={"": "cpu"}, dtype="float32")
    assert torch.equal(logits(mapped.model), logits(whole.model))
    with pytest.raises(Refused, match="exclude each other"):
        load(folder, device="cpu", device_map="auto")


def test_bos_is_never_added_twice(folder):
    tiny_tokenizer(add_bos_token=True).save_pretrained(folder)
    _, tokenizer = load(folder)
    assert encode(tokenizer, "the").input_ids == [1, TOKENS.index("the")]
    written = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert encode(tokenizer, written).input_ids == [1, TOKENS.index("the"), 2]
    assert encode(tokenizer, [written, written]).input_ids == [[1, TOKENS.index("the"), 2]] * 2


# ------------------------------------------------------------------------------------------------------------- refusals


def test_pickled_weights_are_refused_and_never_opened(folder, monkeypatch):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a pickle was opened"))
    with pytest.raises(Refused, match=r"only as pytorch_model.bin.*save_pretrained\(new_folder\)"):
        load(folder)
    with pytest.raises(Refused, match="only safetensors"):
        load(folder / "pytorch_model.bin")


def test_safetensors_are_preferred_when_both_are_there(folder, monkeypatch):
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a pickle was opened"))
    assert load(folder).name == "tiny-llama"


def test_a_pickled_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(Refused, match=r"adapter only as adapter_model.bin"):
        load(folder)


def test_code_in_a_folder_runs_only_when_asked_for(folder, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n"
                                   "from transformers import LlamaConfig, LlamaForCausalLM\n"
                                   "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
                                   "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnModel"],
               "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="trust_remote_code=True if you trust"):
        load(folder)
    assert not ran.exists()
    assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnModel"
    assert ran.exists()


def test_a_missing_folder_gets_the_nearest_name(folder, monkeypatch):
    with pytest.raises(Refused, match=rf"did you mean {str(folder)!r}"):
        load(folder.parent / "tiny-lama")
    monkeypatch.chdir(folder.parent)
    with pytest.raises(Refused, match="did you mean 'tiny-llama'"):
        load("tiny-lama")
    with pytest.raises(Refused, match="did you mean 'smollm2-135m-instruct'"):
        load("smollm2-135m")
    with pytest.raises(Refused, match=r"expected a model folder, a .gguf file"):
        load("/nowhere/at/all")


def test_a_typo_beside_a_local_folder_never_reaches_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    typo = f"{folder.parent.name}/tiny-lama"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(Refused, match="did you mean"):
        load(typo)


def test_folders_that_are_no_model(folder, tmp_path):
    with pytest.raises(Refused, match=r"no config.json"):
        load(tmp_path)
    with pytest.raises(Refused, match="name its folder"):
        load(folder / "model.safetensors")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(Refused, match="no tokenizer"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Refused, match=r"no model.safetensors"):
        load(folder)


def test_a_class_that_transformers_does_not_know(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    with pytest.raises(Refused, match=r"can't be loaded as a causal language model.*no_such_model"):
        load(folder)


# ------------------------------------------------------------------------------------------------------------------ hub


@pytest.fixture
def offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_hub_id_is_found_in_the_local_copy(folder, tmp_path, offline):
    kept = tmp_path / "cache" / "hub" / "models--someone--tiny"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    folder.rename(kept / "snapshots" / ("0" * 40))
    loaded = load("someone/tiny", cache_dir=tmp_path / "cache", dtype="float32")
    assert loaded.name == "someone/tiny"
    assert torch.equal(logits(loaded.model), logits(tiny(vocab=len(TOKENS))))


def test_offline_is_respected(tmp_path, offline):
    with pytest.raises(Refused, match=r"no copy of the hub's is on this machine.*HF_HUB_OFFLINE is set"):
        load("someone/absent", cache_dir=tmp_path)


def test_nothing_but_safetensors_and_text_is_asked_of_the_hub(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **k: asked.append(k) or str(folder))
    load("someone/tiny")
    load("someone/tiny", trust_remote_code=True)
    assert [set(k["allow_patterns"]) for k in asked] == [
        {"*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"},
        {"*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"}]


# --------------------------------------------------------------------------------------------------------- fingerprints


def test_a_fingerprint_is_of_the_content(folder):
    base = fingerprint(folder)
    assert len(base) == 64 and base == fingerprint(load(folder, dtype="bfloat16").model)
    assert base != fingerprint(tiny(vocab=len(TOKENS), seed=1))
    assert base != fingerprint(tiny(vocab=len(TOKENS), rope_parameters={"rope_type": "default", "rope_theta": 5.0}))
    model = load(folder, dtype="float32").model
    model.model.layers[1].mlp.up_proj.weight.data += 0.01
    assert base != fingerprint(model)
    model = load(folder, dtype="float32").model
    model.config.pad_token_id = 0
    model.config.use_cache = False
    assert base == fingerprint(model)


# ---------------------------------------------------------------------------------------------------- the bundled model


def test_names_of_the_bundled_model(monkeypatch, tmp_path):
    from longspan.models.load import _resolve

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()  # a folder of that name needs ./ before it
    assert len({_resolve(name, False, None) for name in (None, "bundled", "Bundled", "smollm2-135m-instruct")}) == 1
    with pytest.raises(Refused, match=r"no config.json"):
        load(tmp_path / "bundled")
    with pytest.raises(Refused, match=r"no config.json"):
        load("./bundled")


def test_the_bundled_model_answers():
    loaded = load()
    assert loaded.name == "smollm2-135m-instruct"
    model, tokenizer = loaded
    assert context_window(model) == 8192 and tokenizer.padding_side == "left"
    assert tokenizer("Hello world! 123").input_ids == [19556, 905, 17, 216, 33, 34, 35]  # no BOS, digits one by one
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True) == (
        "The capital of France is Paris.")
