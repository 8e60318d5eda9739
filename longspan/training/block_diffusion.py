"""Training of the small block-diffusion model: the objective, its texts, and the command that makes the shipped weights.

    python -m longspan.training.block_diffusion --out longspan/models/trained/block-diffusion

For every block a ratio of its bytes is masked; the model sees [noised; clean] (`BlockDiffusion.noised_logits`) and is
asked for the masked bytes. Cross-entropy is weighted by one over the ratio, at most 10: with weights of 1/ratio the mean
over ratios bounds the text's negative log-likelihood (MDLM, arXiv:2406.07524).

Texts are windows of Python's help topics. In a third of them a line ``key ABCD = 1234`` is planted early, and its first
half again right before a later block, which then opens with the number: something far away that a block needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.models.block_diffusion import BlockDiffusion, BlockDiffusionConfig
from longspan.registry import Refused, knob, method
from longspan.training.base import Batch, Objective, Outcome, dice
from longspan.training.config import TrainConfig
from longspan.training.data import Bytes, TextBatches, read_text
from longspan.training.loop import Progress, evaluate, train

KEY, VALUE = 4, 4
"""Letters of a planted key, digits of its value."""
PLANTED = 1 / 3
"""Share of the rows with a planted line."""
CONFIG = TrainConfig(steps=600, lr=3e-3, warmup=20, final_lr=0.02, weight_decay=0.1, log_every=50)
BATCH = 6


@method("block-diffusion", kind="objective", paper="arXiv:2503.09573",
        summary="Cross-entropy of masked bytes, block by block, each block after the clean ones.")
class BlockDenoising(Objective):
    """-log p of masked bytes, each weighted by min(1 / the block's mask ratio, `most`), averaged over all bytes.

    Ratios are uniform in [1/B, 1]; which bytes are masked is a function of the batch's number alone. The metric ``nll`` is
    the plain mean over masked bytes.
    """

    most: float = knob(10.0, "largest weight of a masked byte", low=1.0)

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        if not isinstance(model, BlockDiffusion):
            raise Refused(f"objective {self}: a {type(model).__name__} doesn't write in blocks; expected the model that "
                          "`python -m longspan.training.block_diffusion` trains.")
        noised, masked, weight = noise(batch.ids, model.config.block, model.config.mask_id, batch.index, self.most)
        logits = model.noised_logits(noised, batch.ids)[masked].float()
        losses = F.cross_entropy(logits, batch.ids[masked], reduction="none")
        loss = (losses * weight[masked]).sum() / masked.numel()
        right = (logits.argmax(-1) == batch.ids[masked]).float().mean().item()
        return Outcome(loss, float(masked.numel()), {"nll": losses.mean().item(), "accuracy": right})


def noise(ids: Int[Tensor, "B T"], block: int, mask_id: int, index: int,
          most: float = 10.0) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Masked copies of `ids`, where they are masked, and the weight of every position: a function of `index`.

    At least one position of every block is masked.
    """
    draw = torch.Generator().manual_seed(index)
    rows, time = ids.shape
    blocks = -(-time // block)
    ratio = 1 / block + (1 - 1 / block) * torch.rand(rows, blocks, 1, generator=draw)
    chance = torch.rand(rows, blocks, block, generator=draw)
    chance[..., time - block * (blocks - 1) :][:, -1] = 2.0  # beyond the end of the text
    masked = (chance < ratio) | (chance == chance.amin(-1, keepdim=True))
    weight = (1 / ratio).clamp(max=most).expand(-1, -1, block)
    masked, weight = (x.flatten(1)[:, :time].to(ids.device) for x in (masked, weight))
    return ids.masked_fill(masked, mask_id), masked, weight


@dataclass(frozen=True, eq=False)
class PlantedText:
    """Windows of a text, a third of them with a key-value line and its key again before a later block."""

    text: TextBatches
    block: int

    def __call__(self, index: int) -> Batch:
        batch = self.text(index)
        draw = dice(self.text.seed + 1, self.text.split, index)
        for row in batch.ids:
            if draw.random() < PLANTED:
                plant(row, self.block, draw)
        return Batch(batch.ids, batch.ids, index=index)


def plant(row: Int[Tensor, " T"], block: int, draw: np.random.Generator) -> int:
    """Write a line into the first quarter of a row, and its key again before a block of the second half, in place; returns
    where that block starts.

    Raises ValueError when the row is too short.
    """
    blocks = len(row) // block
    key = "".join(draw.choice(list(string.ascii_uppercase), KEY))
    value = "".join(draw.choice(list(string.digits), VALUE))
    told, asked = f"\nkey {key} = {value}\n".encode(), f"\nkey {key} = ".encode()
    if len(row) // 4 < len(told) or blocks < 4:
        raise ValueError(f"a row of {len(row)} bytes in blocks of {block} is too short for a planted line")
    at = int(draw.integers(0, len(row) // 4 - len(told) + 1))
    later = block * int(draw.integers(blocks // 2, blocks))
    for start, piece in ((at, told), (later - len(asked), asked), (later, f"{value}\n".encode())):
        row[start : start + len(piece)] = torch.tensor(list(piece), dtype=row.dtype)
    return later


def batches(config: BlockDiffusionConfig, split: str = "train", *, batch: int = BATCH, seed: int = 0) -> PlantedText:
    """Windows of the help topics, as long as the model's window; the last tenth of the text is held out."""
    tokens = Bytes().encode(read_text("topics"))
    return PlantedText(TextBatches(tokens, config.window, batch, seed, split), config.block)


def trained(config: BlockDiffusionConfig | None = None, options: TrainConfig = CONFIG, *, batch: int = BATCH,
            progress: Progress | None = None) -> tuple[BlockDiffusion, dict[str, float]]:
    """A model trained from scratch, in evaluation mode, and its loss on held-out text. A function of the settings alone."""
    config = config or BlockDiffusionConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = BlockDiffusion(config)
    train(model, batches(config, batch=batch, seed=options.seed), options, BlockDenoising(), progress=progress)  # type: ignore[call-arg]
    held_out = evaluate(model, batches(config, "held-out", batch=batch, seed=options.seed), 8, BlockDenoising())  # type: ignore[call-arg]
    return model.eval(), held_out


def main(words: Sequence[str] | None = None) -> None:
    """Train and save in float16."""
    parser = argparse.ArgumentParser(prog="python -m longspan.training.block_diffusion", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for model.safetensors and config.json")
    parser.add_argument("--steps", type=int, default=CONFIG.steps, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=CONFIG.seed, help="seed of weights and texts")
    given = parser.parse_args(words)
    options = dataclasses.replace(CONFIG, steps=given.steps, seed=given.seed, warmup=min(CONFIG.warmup, given.steps))

    def told(step: int, metrics: dict[str, float]) -> None:
        print(f"step {step}: loss {metrics['loss']:.3f}, nll {metrics['nll']:.3f}", file=sys.stderr)

    model, held_out = trained(options=options, progress=told)
    model.save(given.out, torch.float16)
    print(f"held out: nll {held_out['nll']:.3f}, accuracy {held_out['accuracy']:.3f}\n{given.out}")


if __name__ == "__main__":
    main()
