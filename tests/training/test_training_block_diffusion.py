"""The objective of the block-diffusion model by hand, its texts, and the command that makes the weights."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from tiny_blocks import BLOCK, random_ids, tiny_blocks

from longspan.models.block_diffusion import BlockDiffusion, BlockDiffusionConfig
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused
from longspan.training import Batch, TrainConfig
from longspan.training.block_diffusion import CONFIG, BlockDenoising, batches, main, noise, plant, trained

SMALL = BlockDiffusionConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, mlp_dim=16, window=128)


def test_the_loss_by_hand():
    model, ids = tiny_blocks(), random_ids(2, 3 * BLOCK)
    found = BlockDenoising(most=3.0)(model, Batch(ids, ids, index=5))
    noised, masked, weight = noise(ids, BLOCK, 256, 5, 3.0)
    logp = model.noised_logits(noised, ids).log_softmax(-1)
    total = sum(-logp[b, t, ids[b, t]] * weight[b, t] for b in range(2) for t in range(3 * BLOCK) if masked[b, t])
    torch.testing.assert_close(found.loss, total / ids.numel())
    assert found.weight == ids.numel() and found.metrics["nll"] > 0
    assert noised[~masked].equal(ids[~masked]) and bool((noised[masked] == 256).all())


@pytest.mark.parametrize("time", [64, 61])
def test_noise_is_a_function_of_the_number_and_masks_every_block(time):
    ids = random_ids(40, time)
    noised, masked, weight = noise(ids, 16, 256, 3)
    again = noise(ids, 16, 256, 3)
    assert torch.equal(noised, again[0]) and not torch.equal(masked, noise(ids, 16, 256, 4)[1])
    assert masked.shape == ids.shape and all(bool(part.any(1).all()) for part in masked.split(16, 1))
    assert weight.min() >= 1.0 and weight.max() <= 10.0
    assert all(len(part.unique(dim=1)[0]) == 1 for part in weight.split(16, 1)), "one ratio a block"
    assert 0.4 < masked.float().mean() < 0.65, "ratios are uniform in [1/16, 1]"


def test_a_third_of_the_rows_have_a_planted_line():
    config = BlockDiffusionConfig()
    source = batches(config, batch=60)
    batch = source(0)
    texts = [bytes(row.tolist()).decode("utf-8", "replace") for row in batch.ids]
    found = [re.search(r"\nkey ([A-Z]{4}) = (\d{4})\n.*\nkey \1 = \2\n", text, re.DOTALL) for text in texts]
    assert 10 <= sum(f is not None for f in found) <= 30
    assert torch.equal(batch.ids, source(0).ids) and not torch.equal(batch.ids, batches(config, "held-out", batch=60)(0).ids)


def test_the_value_opens_a_later_block():
    row = torch.zeros(256, dtype=torch.long)
    for seed in range(8):
        text = row.clone()
        later = plant(text, 16, np.random.default_rng(seed))
        written = bytes(text.tolist())
        told = re.search(rb"\nkey ([A-Z]{4}) = (\d{4})\n", written)
        assert told is not None and told.end() <= 64 and later % 16 == 0 and 128 <= later < 256
        assert written[later - 12 : later + 5] == b"\nkey " + told[1] + b" = " + told[2] + b"\n"
    with pytest.raises(ValueError, match="too short"):
        plant(torch.zeros(40, dtype=torch.long), 16, np.random.default_rng(0))


def test_training_lowers_the_loss_and_is_a_function_of_its_settings():
    options = TrainConfig(steps=12, lr=1e-2, log_every=1)
    rows: list[float] = []
    model, held_out = trained(SMALL, options, batch=4, progress=lambda step, metrics: rows.append(metrics["nll"]))
    assert rows[-1] < rows[0] - 0.5 and held_out["nll"] < 5.2 and not model.training
    again, _ = trained(SMALL, options, batch=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_command_writes_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("longspan.training.block_diffusion.BlockDiffusionConfig", lambda: SMALL)
    main(["--out", str(tmp_path / "made"), "--steps", "1"])
    assert "held out: nll" in capsys.readouterr().out
    assert BlockDiffusion.load(tmp_path / "made", "auto").dtype == torch.float16
    assert dataclasses.asdict(CONFIG)["steps"] == 600


def test_other_models_are_refused():
    ids = random_ids(1, 16)
    with pytest.raises(Refused, match="Decoder doesn't write in blocks"):
        BlockDenoising()(Decoder(DecoderConfig(256, dim=16)), Batch(ids, ids))
