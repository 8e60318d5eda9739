"""What ``longspan train`` does: build a small decoder from parts, train it, judge it on held-out data, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.layers import Mixer, Position, SidePath, Stack
from longspan.models.decoder import Decoder, DecoderConfig, count_parameters
from longspan.registry import Refused, nearest
from longspan.training.base import Batches, Objective
from longspan.training.config import TrainConfig
from longspan.training.data import SYNTHETIC, Bytes, TextBatches, Tokenizer, TokenizerFile, read_text
from longspan.training.loop import Progress, Trainer, TrainResult, evaluate

DEFAULT_TEXT = "topics"


@dataclass(frozen=True)
class TrainOptions:
    """Everything the command takes. Parts are names or methods; the data is a `text` or a synthetic `task`."""

    mixer: Mixer | str = "softmax"
    position: Position | str | None = None
    side_path: SidePath | str | None = None
    stack: Stack | str = "plain"
    objective: Objective | str = "next-token"
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None
    mlp_dim: int | None = None
    dropout: float = 0.0
    context: int = 128
    text: str | Path | None = None
    """``topics``, ``stdlib``, or a path; read when no `task` is named."""
    task: str | None = None
    """``copy`` or ``recall``."""
    tokenizer: str | Path | None = None
    """A ``tokenizer.json``; None reads bytes."""
    steps: int = 300
    batch: int = 8
    accumulate: int = 1
    lr: float = 2e-3
    warmup: int | None = None
    """None: a tenth of the steps."""
    schedule: str = "cosine"
    precision: str = "float32"
    segments: int = 1
    detach_every: int = 1
    reach: int | None = None
    seed: int = 0
    out: str | Path | None = None
    resume: bool = False
    checkpoint_every: int = 0
    keep_last: int = 2
    log_every: int = 10
    tensorboard: str | Path | None = None
    eval_batches: int = 8
    device: str | None = None
    """None: a GPU if there is one."""

    def config(self) -> TrainConfig:
        """The loop's settings; refuses what makes no sense."""
        names = ["steps", "lr", "schedule", "accumulate", "precision", "segments", "detach_every", "reach", "seed"]
        names += ["log_every", "checkpoint_every", "keep_last"]
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        return TrainConfig(warmup=warmup, **{name: getattr(self, name) for name in names})

    def decoder(self, vocab_size: int) -> DecoderConfig:
        """The model's sizes and parts for a vocabulary."""
        return DecoderConfig(
            vocab_size,
            dim=self.dim,
            n_layers=self.layers,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,
            mlp_dim=self.mlp_dim,
            mixer=self.mixer,
            position=self.position,
            side_path=self.side_path,
            stack=self.stack,
            dropout=self.dropout,
        )


def train(options: TrainOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Train as `options` say and report plain data: parts, sizes, losses before and after on held-out data, speed.

    `progress(step, metrics)` is called for every logged step. Raises `Refused` for options that can't work and
    `Diverged` when the loss is no longer finite. The caller's random state is left alone.
    """
    config = options.config()
    for name in ("batch", "eval_batches", "context"):
        if getattr(options, name) < 1:
            raise Refused(f"{name}={getattr(options, name)}: expected at least 1.")
    device = _device(options.device)
    data, held_out, vocab_size, tokenizer = _data(options)
    shape = options.decoder(vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        model = Decoder(shape).to(device)
    trainer = Trainer(
        model, data, config, options.objective, out=options.out, progress=progress, tensorboard=options.tensorboard
    )
    before = evaluate(model, held_out, options.eval_batches, options.objective)
    result = trainer.run(options.resume)
    after = evaluate(model, held_out, options.eval_batches, options.objective)
    return _report(options, model, result, before, after) | _sample(model, data, tokenizer)


def _device(asked: str | None) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise Refused(f"device={asked!r}: expected cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused(f"device={asked!r}: PyTorch finds no GPU here; expected cpu.")
    return device


def _data(options: TrainOptions) -> tuple[Batches, Batches, int, Tokenizer | None]:
    """Training batches, held-out batches, vocabulary size, and the tokenizer of a text."""
    if options.task is not None:
        if options.text is not None:
            raise Refused(f"text={str(options.text)!r} with task={options.task!r}: expected one of the two.")
        if options.task not in SYNTHETIC:
            raise Refused(nearest(options.task, SYNTHETIC, "task"))
        make = SYNTHETIC[options.task].fit
        train, test = (make(options.context, options.batch, options.seed, s) for s in ("train", "held-out"))
        return train, test, train.vocab_size, None
    tokenizer: Tokenizer = Bytes() if options.tokenizer is None else TokenizerFile(options.tokenizer)
    tokens = torch.as_tensor(tokenizer.encode(read_text(options.text or DEFAULT_TEXT)))
    parts = [TextBatches(tokens, options.context, options.batch, options.seed, s) for s in ("train", "held-out")]
    return parts[0], parts[1], tokenizer.vocab_size, tokenizer


def _report(
    options: TrainOptions, model: Decoder, result: TrainResult, before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    shape = model.config
    parts = {name: getattr(shape, name) for name in ("mixer", "position", "side_path", "stack")}
    return {name: None if part is None else str(part) for name, part in parts.items()} | {
        "data": options.task or str(options.text or DEFAULT_TEXT),
        "context": options.context,
        "parameters": count_parameters(model),
        "steps": result.steps,
        "resumed_from": result.resumed_from,
        "train": result.last,
        "held_out_before": before,
        "held_out_after": after,
        "seconds": result.seconds,
        "model": None if result.checkpoint is None else str(result.checkpoint),
    }


@torch.no_grad()
def _sample(model: Decoder, data: Batches, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Bytes of state after one full context, means of what the layers report, and a short continuation of a text."""
    prompt = data(0).ids[:1].to(next(model.parameters()).device)
    read = model(prompt, keep=0)
    found: dict[str, Any] = {"state_bytes": read.state.nbytes}
    if read.ctx.auxiliary:  # what layers say of themselves: a bound, a firing rate
        found["reported"] = {name: [float(t.float().mean()) for t in terms] for name, terms in read.ctx.auxiliary.items()}
    if tokenizer is not None:
        prompt = prompt[:, : min(32, prompt.shape[1])]
        written = model.generate(prompt, 64)
        found |= {"prompt": tokenizer.decode(prompt[0].tolist()), "sample": tokenizer.decode(written[0].tolist())}
    return found
