"""FlashBlock's rule by heads: the calibration against plain means, and which heads read the prefix again."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from tiny_blocks import BLOCK, a_prefix, close, dense, masks, queries, read, record, tiny_blocks

from longspan.decoding.block_sampler import denoise, replay
from longspan.decoding.blocks import Denoising, Prefix, read_blocks
from longspan.decoding.denoising.flashblock import FlashBlock
from longspan.decoding.denoising.flashblock_heads import FlashBlockHeads, calibrate, main
from longspan.models.block_diffusion import BlockDiffusion
from longspan.registry import Refused


@pytest.fixture(scope="module")
def model():
    return tiny_blocks()


def written(path, moving, steps=4, layers=1, heads=4):
    """A calibration in which the heads `moving[step]` move."""
    cosine = torch.ones(steps, layers, heads)
    for step, which in moving.items():
        cosine[step, :, which] = 0.5
    save_file({"cosine": cosine, "change": torch.zeros_like(cosine)}, path)
    return FlashBlockHeads(profile=str(path))


def test_the_calibration_is_a_mean_over_neighbouring_steps(model):
    prefixes = [read(model, 4 * BLOCK, seed=s) for s in (1, 2)]
    found = calibrate(model, prefixes)
    assert found["cosine"].shape == found["change"].shape == (BLOCK, 2, 4)
    assert bool((found["cosine"][0] == 0).all()) and bool((found["change"][0] == math.inf).all())
    queries_of: list[list[torch.Tensor]] = []
    for prefix in prefixes:
        trajectory, mine = record(model, prefix), []

        def attention(layer, q, k, v, prefix=prefix, mine=mine):
            if layer == 0:
                mine.append(dense(prefix, q))
            return torch.zeros_like(q)

        for ids in trajectory.states:
            model(ids, prefix.places(BLOCK), attention)
        queries_of.append(mine)
    for t in range(1, BLOCK):
        cos = torch.stack([torch.cosine_similarity(m[t][0], m[t - 1][0], dim=-1).mean((0, 2)) for m in queries_of]).mean(0)
        moved = torch.stack([(m[t][1] - m[t - 1][1]).abs().mean((0, 2)) for m in queries_of]).mean(0)
        close(found["cosine"][t, 0], cos.detach())
        close(found["change"][t, 0], moved.detach())


def test_heads_that_move_are_computed_and_the_others_kept(tmp_path):
    """Heads 0 and 1 share a key-value head: reading it for head 1 leaves head 0 as it was."""
    method = written(tmp_path / "heads.safetensors", {1: [1], 2: [0, 1, 2, 3]})
    prefix, q, moved = a_prefix(20), queries(), queries(seed=8)
    reader = method.begin(prefix, BLOCK, BLOCK)
    reader.begin(0)
    first = reader.read(0, q)[0].clone()
    close(first, dense(prefix, q)[0])
    reader.begin(1)
    out = reader.read(0, moved)[0].clone()
    close(out[:, 1], dense(prefix, moved)[0][:, 1])
    close(out[:, [0, 2, 3]], first[:, [0, 2, 3]], atol=0.0)
    assert reader.reads.keys == (2 + 1) * 20
    reader.begin(2)
    close(reader.read(0, moved)[0], dense(prefix, moved)[0])
    reader.begin(3)
    close(reader.read(0, q)[0], dense(prefix, moved)[0], atol=1e-5)
    assert reader.reads.keys == (2 + 1 + 2) * 20, "nothing is read where no head moves"
    for step, save in ((4, False), (2, True)):  # beyond what was calibrated, and the saving pass
        reader.begin(step, save)
        close(reader.read(0, q)[0], dense(prefix, q)[0])


def test_thresholds_make_it_dense_or_never_fresh(model, tmp_path):
    prefix = read(model, 4 * BLOCK)
    file = tmp_path / "heads.safetensors"
    save_file(calibrate(model, [prefix]), file)
    trajectory = record(model, prefix)
    everything = FlashBlockHeads(profile=str(file), cosine=1.0, change=0.0)
    for a, b in zip(replay(model, everything, trajectory), trajectory.logits, strict=True):
        close(a, b)
    never = FlashBlockHeads(profile=str(file), cosine=-1.0, change=1e9)
    for a, b in zip(replay(model, never, trajectory), replay(model, FlashBlock(tau=1000), trajectory), strict=True):
        close(a, b)
    ids, grown = denoise(model, prefix, masks(model), never)
    close(grown.k[1], read_blocks(model, prefix, ids).k[1])


def test_calibrations_that_are_missing_or_of_another_model_are_refused(model, tmp_path):
    prefix = read(model, 2 * BLOCK)
    with pytest.raises(Refused, match="needs a calibration"):
        FlashBlockHeads().begin(prefix, BLOCK, BLOCK)
    with pytest.raises(Refused, match="no such file"):
        FlashBlockHeads(profile=str(tmp_path / "nowhere")).begin(prefix, BLOCK, BLOCK)
    with pytest.raises(Refused, match="1 layers, this one has 2"):
        written(tmp_path / "one.safetensors", {}).begin(prefix, BLOCK, BLOCK)
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(Refused, match="not a calibration"):
        FlashBlockHeads(profile=str(tmp_path / "other.safetensors")).begin(prefix, BLOCK, BLOCK)
    with pytest.raises(Refused, match="at least one block"):
        calibrate(model, [Prefix.empty(model)])


def test_the_command_writes_a_calibration(model, tmp_path):
    BlockDiffusion.save(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text, long enough for five prompts. " * 12)
    out = tmp_path / "heads.safetensors"
    main([str(tmp_path / "text.txt"), "--out", str(out), "--model", str(tmp_path / "model")])
    trajectory = record(model, read(model, 2 * BLOCK))
    found = replay(model, FlashBlockHeads(profile=str(out)), trajectory)
    assert all(bool(torch.isfinite(logits).all()) for logits in found)
    close(found[0], replay(model, Denoising(), trajectory)[0])
