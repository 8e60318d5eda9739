"""The block-diffusion model: its masks by their definition, training's view against writing's, and what loads it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_blocks import BLOCK, close, masks, random_ids, tiny_blocks

from longspan.decoding.blocks import BlockReader, Prefix, block_attention, read_blocks
from longspan.evaluation.base import check_round_trip
from longspan.models import load
from longspan.models.block_diffusion import (
    BlockDiffusion,
    BlockDiffusionConfig,
    ByteTokenizer,
    block_mask,
    is_block_diffusion,
    training_mask,
)
from longspan.models.load import TRAINED, context_window, fingerprint, trained_here
from longspan.registry import Refused


@pytest.fixture(scope="module")
def model():
    return tiny_blocks()


def test_masks_by_their_definition():
    time, block = 10, 4
    found, own = training_mask(time, block), block_mask(time, block)
    for i in range(2 * time):
        for j in range(2 * time):
            a, b = i % time // block, j % time // block
            noised_i, noised_j = i < time, j < time
            want = a == b and noised_j if noised_i and noised_j else b < a if noised_i else not noised_j and b <= a
            assert bool(found[i, j]) == want, (i, j)
    assert torch.equal(own, found[time:, time:])


def test_training_sees_what_writing_sees(model):
    """Noised block b, all blocks at once, against block b alone after the prefix of the clean ones before it."""
    clean = random_ids(2, 4 * BLOCK)
    noised = torch.where(torch.rand(clean.shape, generator=torch.Generator().manual_seed(1)) < 0.5, model.config.mask_id, clean)
    with torch.no_grad():
        together = model.noised_logits(noised, clean)
        for b in range(4):
            prefix = read_blocks(model, Prefix.empty(model, 2), clean[:, : b * BLOCK])
            here = noised[:, b * BLOCK : (b + 1) * BLOCK]
            alone = model(here, prefix.places(BLOCK), block_attention(BlockReader(prefix, BLOCK))).logits
            close(together[:, b * BLOCK : (b + 1) * BLOCK], alone)


def test_who_depends_on_whom(model):
    clean = random_ids(1, 3 * BLOCK)
    noised = masks(model, 1, 3 * BLOCK)
    with torch.no_grad():
        before = model.noised_logits(noised, clean)
        changed = clean.clone()
        changed[:, BLOCK + 1] = (changed[:, BLOCK + 1] + 1) % 256
        after = model.noised_logits(noised, changed)
        close(before[:, : 2 * BLOCK], after[:, : 2 * BLOCK], atol=0.0)
        assert not torch.allclose(before[:, 2 * BLOCK :], after[:, 2 * BLOCK :], atol=1e-3)
        noised[:, BLOCK - 1] = 7
        within = model.noised_logits(noised, clean)
        assert not torch.allclose(before[:, 0], within[:, 0], atol=1e-4), "a block attends in both directions"
        close(before[:, BLOCK:], within[:, BLOCK:], atol=0.0)


def test_logits_are_of_bytes_and_never_of_the_mask(model):
    out = model(masks(model), torch.arange(BLOCK)[None], block_attention(BlockReader(Prefix.empty(model), BLOCK)))
    assert out.logits.shape == (1, BLOCK, 256) and len(out.k) == len(out.v) == 2 and out.k[0].shape == (1, 2, BLOCK, 8)
    for ids, places in ((torch.zeros(1, 0, dtype=torch.long),) * 2, (torch.zeros(1, 3, dtype=torch.long), torch.arange(4)[None])):
        with pytest.raises(ValueError, match="ids and places"):
            model(ids, places, lambda layer, q, k, v: q)


def test_saved_models_load_again(model, tmp_path):
    model.save(tmp_path / "wide")
    again = BlockDiffusion.load(tmp_path / "wide")
    assert again.config == BlockDiffusionConfig(**{**vars(model.config), "name_or_path": str(tmp_path / "wide")})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    model.save(tmp_path / "half", torch.float16)
    assert BlockDiffusion.load(tmp_path / "half").dtype == torch.float32
    assert BlockDiffusion.load(tmp_path / "half", "auto").dtype == torch.float16
    half = BlockDiffusion.load(tmp_path / "half", torch.float64)
    assert torch.equal(half.embed.weight, model.embed.weight.half().double())
    assert fingerprint(tmp_path / "half") == fingerprint(half) == fingerprint(BlockDiffusion.load(tmp_path / "half"))


def test_folders_that_hold_no_such_model_are_refused(model, tmp_path):
    with pytest.raises(Refused, match=r"no config\.json"):
        BlockDiffusion.load(tmp_path)
    model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"embed.weight": weights["embed.weight"][:5]}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="don't fit"):
        BlockDiffusion.load(tmp_path)
    assert not is_block_diffusion(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[1]")
    assert not is_block_diffusion(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert not is_block_diffusion(tmp_path)


@pytest.mark.parametrize("changes, words", [
    ({"block": 0}, "block=0"), ({"dim": 30}, "dim=30"), ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads=3"),
    ({"window": -1}, "window")])
def test_sizes_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(Refused, match=words):
        BlockDiffusionConfig(**changes)


def test_configs_with_unknown_entries_are_refused():
    plain = BlockDiffusionConfig().to_dict()
    assert BlockDiffusionConfig.from_dict(plain) == BlockDiffusionConfig()
    with pytest.raises(Refused, match="did you mean 'block'"):
        BlockDiffusionConfig.from_dict(plain | {"blok": 4})
    with pytest.raises(Refused, match="model_type='llama'"):
        BlockDiffusionConfig.from_dict({"model_type": "llama"})


def test_the_tokenizer_gives_bytes_back():
    tokenizer = ByteTokenizer()
    text = "naïve – 7\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) == tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text == tokenizer.decode(torch.tensor(ids))
    assert tokenizer(["a", "bc"])["input_ids"] == [[97], [98, 99]] and tokenizer.decode([255]) == "\ufffd"
    assert tokenizer.decode(97) == "a" and len(tokenizer) == 256
    check_round_trip(tokenizer)


def test_the_model_that_comes_along_loads_by_name():
    assert "block-diffusion" in trained_here()
    loaded = load("block-diffusion")
    assert loaded.name == "block-diffusion" and loaded.model.denoises_blocks and not loaded.model.training
    assert loaded.model.dtype == torch.float32 and context_window(loaded.model) == 256 and loaded.model.config.block == 16
    assert loaded.fingerprint == fingerprint(loaded.model)
    weights = TRAINED / "block-diffusion" / "model.safetensors"
    assert weights.stat().st_size <= 1.5e6 and {t.dtype for t in load_file(weights).values()} == {torch.float16}
    assert load(str(TRAINED / "block-diffusion"), dtype="auto").model.dtype == torch.float16
    with pytest.raises(Refused, match="device_map"):
        load("block-diffusion", device_map="auto")
    with pytest.raises(Refused, match="did you mean 'block-diffusion'"):
        load("block-difusion")
