"""Train a model on L-CUBE and judge it: how much of the past does it use, at which distance?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from longspan.evaluation.lcube.model import GaussianBatches, GaussianModel, GaussianNLL, WithBackbone
from longspan.evaluation.lcube.plan import LCube
from longspan.evaluation.lcube.scores import Scores, score
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.training import TrainConfig, Trainer, TrainResult

Progress = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Size:
    """The benchmark, the sizes of a small decoder, and the budget of its training: the same for all that are compared."""

    plan: LCube = field(default_factory=LCube)
    dim: int = 96
    layers: int = 2
    heads: int = 8
    table: bool = True
    """Add a learned table of positions to the inputs, whatever position scheme the mixer has."""
    steps: int = 1000
    batch: int = 64
    lr: float = 3e-3
    held_out: int = 256
    """Sequences judged on."""
    decoder: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the decoder's config."""

    def config(self, seed: int) -> TrainConfig:
        """AdamW, the rate up over three tenths of the steps and down along a cosine to 0."""
        return TrainConfig(steps=self.steps, lr=self.lr, warmup=3 * self.steps // 10, final_lr=0.0, weight_decay=0.01,
                           betas=(0.9, 0.999), clip=1.0, seed=seed, log_every=max(1, self.steps // 10))


def build(parts: Mapping[str, Any], size: Size, seed: int = 0) -> WithBackbone:
    """A small decoder of `parts` (``mixer=…, position=…, side_path=…, stack=…``, methods or names) that reads vectors."""
    shape: dict[str, Any] = {"dim": size.dim, "n_layers": size.layers, "n_heads": size.heads} | dict(size.decoder) | dict(parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = Decoder(DecoderConfig(1, **shape))
        backbone.embed.requires_grad_(False)  # there are no tokens
        return WithBackbone(size.plan, backbone, shape["dim"], size.table)


def fit(
    model: GaussianModel, size: Size, seed: int = 0, progress: Progress | None = None, *, config: TrainConfig | None = None,
    resume: bool = False, **places: Any,
) -> TrainResult:
    """Train any model in place. All models see the same sequences in the same order for a seed.

    `config` stands in for the size's own; `places` are those of `Trainer` (out, tensorboard).
    """
    batches, config = GaussianBatches(size.plan, size.batch, seed), config or size.config(seed)
    return Trainer(model, batches, config, GaussianNLL(size.plan), progress=progress, **places).run(resume)


def judged(model: GaussianModel, size: Size, seed: int = 0) -> Scores:
    """The scores of a model on held-out sequences, the same for all models."""
    x = GaussianBatches(size.plan, size.held_out, seed, "held-out").sequences(0)
    return score(size.plan, model.predict, x.to(next(model.parameters()).device))


def utilisation_of(parts: Mapping[str, Any], size: Size, seed: int = 0, progress: Progress | None = None) -> Scores:
    """Train a small decoder of `parts` from nothing and judge it: the whole benchmark at one length.

    Raises `Refused` for parts and sizes that don't fit, and `Diverged` when the loss is no longer finite.
    """
    model = build(parts, size, seed)
    fit(model, size, seed, progress)
    return judged(model, size, seed)


def at_length(size: Size, length: int) -> Size:
    """The same benchmark and budget at `length` tokens. `Refused` unless that is a power of two."""
    settings = {f.name: getattr(size.plan, f.name) for f in dataclasses.fields(size.plan) if f.name != "H"}
    return dataclasses.replace(size, plan=LCube.of_length(length, **settings))
