"""The small byte-level language model that operators are compared with, at lengths up to many times the trained one.

Text is Python's own source (the files of the standard library in a fixed random order, the last tenth held out), bytes
from 128 on read as 127. Held-out loss is measured on the same bytes at every length: cut into windows of that length, all
positions counted. So a longer window means more context for the same bytes, and a rising curve means that the operator
doesn't stand the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longspan.models.decoder import Decoder, DecoderConfig
from longspan.training import Bytes, TextBatches, TrainConfig, Trainer, read_text

VOCABULARY = 128
LENGTHS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class ByteLM:
    """Sizes of the model and of its training."""

    dim: int = 64
    layers: int = 2
    heads: int = 4
    length: int = 64
    steps: int = 500
    batch: int = 16
    lr: float = 1e-3
    held_out: int = 32
    """Windows of the longest length judged on."""
    decoder: dict[str, Any] = field(default_factory=dict)
    """Further entries of the decoder's config."""


@functools.cache
def source() -> Int[Tensor, " N"]:
    """The bytes."""
    return torch.as_tensor(Bytes().encode(read_text("stdlib"))).clamp(max=VOCABULARY - 1).long()


def build(size: ByteLM, seed: int = 0, **parts: Any) -> Decoder:
    """The decoder made of `parts` (``mixer=…, position=…, side_path=…, stack=…``), with first weights drawn by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"dim": size.dim, "n_layers": size.layers, "n_heads": size.heads} | size.decoder
        return Decoder(DecoderConfig(VOCABULARY, **shape, **parts))


def fit(size: ByteLM, seed: int = 0, objective: Any = "next-token", progress: Callable[[int, dict], None] | None = None,
        **parts: Any) -> Decoder:
    """A trained decoder. All operators see the same windows in the same order for a seed."""
    model = build(size, seed, **parts)
    train_on(model, size, seed, objective, progress)
    return model.eval()


def train_on(model: Any, size: ByteLM, seed: int = 0, objective: Any = "next-token",
             progress: Callable[[int, dict], None] | None = None) -> None:
    """Train a model in place: AdamW, the rate up over three tenths of the steps and down along a cosine."""
    config = TrainConfig(steps=size.steps, lr=size.lr, warmup=3 * size.steps // 10, final_lr=0.0, weight_decay=0.01, seed=seed,
                         log_every=max(1, size.steps // 10))
    Trainer(model, TextBatches(source(), size.length, size.batch, seed), config, objective, progress=progress).run()


@torch.no_grad()
def window_losses(model: Decoder, size: ByteLM, length: int, longest: int = max(LENGTHS)) -> Float[np.ndarray, " windows"]:
    """Nats per byte of each of `size.held_out` stretches of `longest` bytes, read in windows of `length`."""
    held = source()[round(len(source()) * 0.9) :]
    stride = max(longest, (len(held) - 1) // size.held_out)
    starts = [i * stride for i in range(size.held_out) if i * stride + longest < len(held)]
    found = []
    for start in starts:
        rows = held[start : start + longest].view(-1, length)
        asked = held[start + 1 : start + longest + 1].view(-1, length)
        logits = model.eval()(rows).logits
        found.append(float(F.cross_entropy(logits.flatten(0, 1).float(), asked.flatten())))
    return np.array(found)


def nats(model: Decoder, size: ByteLM, lengths: Sequence[int] = LENGTHS) -> dict[int, float]:
    """Held-out nats per byte at each length, over the same bytes."""
    return {n: float(window_losses(model, size, n, max(lengths)).mean()) for n in lengths}


def curves(size: ByteLM, arms: dict[str, dict[str, Any]], seeds: Sequence[int], lengths: Sequence[int] = LENGTHS,
           progress: Callable[[str], None] = lambda what: None) -> dict[str, Float[np.ndarray, "seeds lengths windows"]]:
    """Held-out nats per byte of every arm, a model's parts by name, trained with each seed."""
    found = {}
    for name, parts in arms.items():
        of_seeds = []
        for seed in seeds:
            progress(f"{name}, seed {seed}")
            model = fit(size, seed, **parts)
            of_seeds.append([window_losses(model, size, n, max(lengths)) for n in lengths])
        found[name] = np.array(of_seeds)
    return found
