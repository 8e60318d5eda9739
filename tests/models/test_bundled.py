"""Converting GGUF files laid out as llama.cpp does: what comes back, how it is cached, what is refused."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tiny_models import CHAT_TEMPLATE, MERGES, TOKENS, tiny, tiny_ids

from longspan.models import bundled
from longspan.models.load import context_window, fingerprint, load
from longspan.registry import Refused

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight, heads):
    """Rows of a head as llama.cpp wants them: 0, D/2, 1, D/2 + 1, …"""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, *, architecture="llama", bos=None, extra=None, factors=None, tokenizer=True):
    """A GGUF file of `model` with float32 tensors, written the way llama.cpp's converter lays it out."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_token_merges(MERGES)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHAT_TEMPLATE)
    if bos is not None:
        writer.add_add_bos_token(bos)
    for key, value in (extra or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
    for name, weight in model.named_parameters():
        base, suffix = name.rsplit(".", 1)
        block = ""
        if base.startswith("model.layers."):
            _, _, number, base = base.split(".", 3)
            block = f"blk.{number}."
        values = weight.detach().numpy()
        if architecture == "llama" and base in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleaved(values, config.num_attention_heads if "q_proj" in base else config.num_key_value_heads)
        writer.add_tensor(f"{block}{GGUF_NAMES[base]}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(model):
    """The model with its weights rounded to bfloat16, as a conversion stores them."""
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    return model


def logits(model, ids=None):
    with torch.no_grad():
        return model(tiny_ids(2, 40) if ids is None else ids).logits


# ----------------------------------------------------------------------------------------------------------------- GGUF


def llama(**config):
    return rounded(tiny("llama", vocab=len(TOKENS), **config))


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_comes_back_exactly(tied, tmp_path):
    model = llama(tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "a.gguf", model)
    loaded = load(file, dtype="float32", cache_dir=tmp_path / "cache")
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.name == "a" and context_window(loaded.model) == 256
    assert loaded.model.config.dtype is torch.float32 and loaded.fingerprint == fingerprint(loaded.model)
    text = "the  12\n 3"
    ids = loaded.tokenizer(text).input_ids
    assert loaded.tokenizer.convert_ids_to_tokens(ids) == ["the", "Ġ", "Ġ", "1", "2", "Ċ", "Ġ", "3"]
    assert loaded.tokenizer.decode(ids) == text and loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.tokenizer.padding_side == "left"


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path):
    write_gguf(tmp_path / "a.gguf", llama())
    assert load(tmp_path, cache_dir=tmp_path / "cache").folder.name.startswith("a-")
    write_gguf(tmp_path / "b.gguf", llama())
    with pytest.raises(Refused, match="2 GGUF files"):
        load(tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("bos", [True, False, None])
def test_the_file_says_whether_bos_is_added(bos, tmp_path):
    file = write_gguf(tmp_path / "a.gguf", llama(), bos=bos)
    _, tokenizer = load(file, cache_dir=tmp_path / "cache")
    assert tokenizer("the").input_ids == ([1] if bos else []) + [TOKENS.index("the")]


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_scaling_of_a_gguf_file(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "linear":
        del rope["original_max_position_embeddings"]
    model = llama(rope_parameters=rope)
    extra = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "a.gguf", model, extra=extra | {"llama.rope.scaling.original_context_length": 64})
    loaded = load(file, dtype="float32", cache_dir=tmp_path / "cache")
    assert torch.equal(logits(loaded.model), logits(model))
    assert not torch.allclose(logits(model), logits(llama()), atol=1e-3)


def test_frequency_factors_of_a_gguf_file(tmp_path):
    """Llama 3.1 comes with one divisor per frequency, which transformers' reader drops."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = llama(rope_parameters=rope)
    plain = llama().model.rotary_emb.inv_freq
    file = write_gguf(tmp_path / "a.gguf", model, factors=plain / model.model.rotary_emb.inv_freq)
    loaded = load(file, dtype="float32", cache_dir=tmp_path / "cache")
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(model), logits(llama()), atol=1e-3)


def test_another_architecture_goes_through_transformers(tmp_path):
    model = rounded(tiny("qwen2", vocab=len(TOKENS), hidden=32))
    file = write_gguf(tmp_path / "a.gguf", model, architecture="qwen2")
    loaded = load(file, dtype="float32", cache_dir=tmp_path / "cache")
    assert type(loaded.model).__name__ == "Qwen2ForCausalLM"
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-6, rtol=0)


def test_scaling_that_transformers_would_drop_is_refused(tmp_path):
    model = rounded(tiny("qwen2", vocab=len(TOKENS)))
    extra = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "a.gguf", model, architecture="qwen2", extra=extra)
    with pytest.raises(Refused, match="rotary scaling for long context"):
        load(file, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_gguf_files_that_are_none(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no such thing")
    with pytest.raises(Refused, match="not a GGUF file"):
        load(tmp_path / "a.gguf", cache_dir=tmp_path / "cache")
    whole = write_gguf(tmp_path / "b.gguf", llama()).read_bytes()
    (tmp_path / "c.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused, match="damaged or incomplete"):
        load(tmp_path / "c.gguf", cache_dir=tmp_path / "cache")
    write_gguf(tmp_path / "d.gguf", llama(), tokenizer=False)
    with pytest.raises(Refused, match="holds no tokenizer"):
        load(tmp_path / "d.gguf", cache_dir=tmp_path / "cache")
    write_gguf(tmp_path / "e.gguf", llama(), architecture="nosuch")
    with pytest.raises(Refused, match="'nosuch' can't be read"):
        load(tmp_path / "e.gguf", cache_dir=tmp_path / "cache")
    wrong = llama()
    wrong.model.norm.weight = torch.nn.Parameter(torch.ones(31))
    write_gguf(tmp_path / "f.gguf", wrong)
    with pytest.raises(Refused, match=r"tensor model.norm.weight is \(31,\), expected \(32,\)"):
        load(tmp_path / "f.gguf", cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


# ----------------------------------------------------------------------------------------------- the conversion's cache


def leftovers(cache):
    """What a conversion left behind beside its lock and its remembered hashes."""
    return sorted(p.name for p in (Path(cache) / "models").iterdir() if p.name not in ("conversion.lock", "hashes"))


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "a.gguf", llama())


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "own"))
    assert bundled.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("LONGSPAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_folder() == tmp_path / "longspan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bundled.cache_folder() == tmp_path / ".cache" / "longspan"


def test_converted_once_and_found_by_content(file, tmp_path, monkeypatch):
    first = bundled.converted(file, tmp_path / "cache")
    monkeypatch.setattr(bundled, "_write_model", lambda *a: pytest.fail("converted twice"))
    moved = file.rename(tmp_path / "deeper.gguf")
    moved = moved.rename(tmp_path / "a.gguf")
    assert bundled.converted(moved, tmp_path / "cache") == first
    monkeypatch.setattr(bundled.hashlib, "file_digest", lambda *a: pytest.fail("hashed again"))
    assert bundled.converted(moved, tmp_path / "cache") == first


def test_changed_content_is_converted_again(file, tmp_path):
    first = bundled.converted(file, tmp_path / "cache")
    write_gguf(file, llama(seed=1))
    second = bundled.converted(file, tmp_path / "cache")
    assert first != second and fingerprint(first) != fingerprint(second)
    assert leftovers(tmp_path / "cache") == sorted([first.name, second.name])


def test_an_error_while_converting_leaves_nothing(file, tmp_path, monkeypatch):
    def fail(gguf_file, folder):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(bundled, "_write_model", fail)
        with pytest.raises(RuntimeError, match="stopped"):
            bundled.converted(file, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []
    assert load(file, cache_dir=tmp_path / "cache").name == "a"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("moment", ["save_pretrained", "_flush"])
def test_a_killed_conversion_leaves_nothing_half_written(moment, file, tmp_path):
    cache = tmp_path / "cache"
    child = os.fork()
    if child == 0:  # the weights are written, then the config or the flushing kills it
        place = transformers.PreTrainedConfig if moment == "save_pretrained" else bundled
        setattr(place, moment, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
        try:
            bundled.converted(file, cache)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    (left,) = leftovers(cache)
    assert bundled._UNFINISHED in left and (cache / "models" / left / "model.safetensors").is_file()
    made = bundled.converted(file, cache)
    assert leftovers(cache) == [made.name]
    assert torch.equal(logits(load(file, dtype="float32", cache_dir=cache).model), logits(llama()))


def test_two_at_a_time_convert_once(file, tmp_path, monkeypatch):
    write, runs, found = bundled._write_model, [], []
    monkeypatch.setattr(bundled, "_write_model", lambda *a: (runs.append(a), write(*a)))
    threads = [threading.Thread(target=lambda: found.append(bundled.converted(file, tmp_path / "c"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1 and len(found) == 3 and len(set(found)) == 1


def test_a_finished_folder_that_lost_its_weights_is_made_again(file, tmp_path):
    made = bundled.converted(file, tmp_path / "cache")
    (made / "model.safetensors").unlink()
    assert bundled.converted(file, tmp_path / "cache") == made
    assert (made / "model.safetensors").is_file()


def test_a_cache_that_cannot_be_written_is_named(file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file, where a folder should be")
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "taken"))
    with pytest.raises(Refused, match="set LONGSPAN_CACHE to a folder"):
        load(file)


def test_the_stored_weights_are_bfloat16(file, tmp_path):
    from safetensors import safe_open

    made = bundled.converted(file, tmp_path / "cache")
    with safe_open(made / "model.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_the_direct_reader_gives_the_weights_of_transformers_reader():
    file = bundled.bundled_gguf()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16).state_dict()
    ours = load(dtype="bfloat16").model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
