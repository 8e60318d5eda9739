"""What ``longspan train --retrofit`` does: convert a pretrained model, train what its method trains, judge, keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan import registry
from longspan.layers import choose
from longspan.models import load
from longspan.models.load import context_window
from longspan.registry import Refused, nearest
from longspan.training.base import Objective
from longspan.training.config import TrainConfig
from longspan.training.data import TextBatches, read_text
from longspan.training.loop import Progress, Trainer, evaluate
from longspan.training.retrofits.base import Retrofit, Tuned

DEFAULT_TEXT = "topics"
SUFFIX = "-retrofit"


@dataclass(frozen=True)
class RetrofitOptions:
    """Everything the command takes. Learning rate, warm-up and clipping are by default the ones of L2A's recipe."""

    retrofit: Retrofit | str
    model: str | Path | None = None
    """None: the bundled model."""
    objective: Objective | str | None = None
    """None: what the retrofit asks for."""
    text: str | Path | None = None
    """``topics``, ``stdlib``, or a path."""
    context: int = 512
    steps: int = 300
    batch: int = 1
    accumulate: int = 1
    lr: float = 5e-5
    warmup: int | None = None
    """None: a twentieth of the steps."""
    schedule: str = "cosine"
    precision: str = "float32"
    seed: int = 0
    out: str | Path | None = None
    resume: bool = False
    checkpoint_every: int = 0
    keep_last: int = 2
    log_every: int = 10
    tensorboard: str | Path | None = None
    eval_batches: int = 4
    dtype: str | None = "float32"
    device: str | None = None

    def config(self) -> TrainConfig:
        """The loop's settings; refuses what makes no sense."""
        names = ["steps", "lr", "schedule", "accumulate", "precision", "seed", "log_every", "checkpoint_every", "keep_last"]
        warmup = self.steps // 20 if self.warmup is None else self.warmup
        return TrainConfig(warmup=warmup, weight_decay=0.0, **{name: getattr(self, name) for name in names})


def parse(text: str) -> Retrofit:
    """The retrofit a text names, with knobs in parentheses if wanted. That of a mixer goes by the mixer's name too."""
    from longspan import grammar

    parts = grammar.parse(text)
    known = [card.name for card in registry.cards(kind="retrofit")]
    call, short = parts[0].call, [name.removesuffix(SUFFIX) for name in known]
    name = call.name if call.name in known else call.name + SUFFIX
    if len(parts) != 1 or parts[0].at is not None or name not in known:
        raise Refused(f"--retrofit {text!r}: {nearest(call.name, short, 'retrofit')}")
    made = grammar.build(grammar.Call(name, call.settings, call.bare))
    return choose(made, "retrofit")


def train_retrofit(options: RetrofitOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Convert, train and report plain data: held-out figures of the base model, of the start and of the end.

    With `out` the trained model is written there as transformers writes models, beside the checkpoints; `longspan.load`
    reads it. Raises `Refused` for options that can't work and `Diverged` when the loss is no longer finite.
    """
    config = options.config()
    for name in ("batch", "eval_batches", "context"):
        if getattr(options, name) < 1:
            raise Refused(f"{name}={getattr(options, name)}: expected at least 1.")
    method: Retrofit = parse(options.retrofit) if isinstance(options.retrofit, str) else options.retrofit
    objective = choose(method.objective if options.objective is None else options.objective, "objective")
    loaded = load(options.model, dtype=options.dtype, device=options.device)
    if getattr(loaded.model, "denoises_blocks", False):
        raise Refused(f"{method}: {loaded.name} denoises blocks; expected a model that writes token by token, such as the "
                      "bundled one.")
    if options.context > context_window(loaded.model):
        raise Refused(f"context={options.context}: {loaded.name} reads at most {context_window(loaded.model)} tokens; expected "
                      "no more.")
    data, held_out = _data(options, loaded.tokenizer)
    base = evaluate(Tuned(loaded.model), held_out, options.eval_batches)
    model = method.convert(loaded.model, in_place=True)
    tuned = Tuned.ready(model)
    trainer = Trainer(tuned, data, config, objective, out=options.out, progress=progress, tensorboard=options.tensorboard,
                      trainable_only=True)
    before = evaluate(tuned, held_out, options.eval_batches, objective)
    result = trainer.run(options.resume)
    after = evaluate(tuned, held_out, options.eval_batches, objective)
    if options.out is not None:
        model.save_pretrained(options.out)
        loaded.tokenizer.save_pretrained(options.out)
    return {
        "retrofit": str(method),
        "base": loaded.name,
        "objective": str(objective),
        "data": str(options.text or DEFAULT_TEXT),
        "context": options.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": result.steps,
        "resumed_from": result.resumed_from,
        "train": result.last,
        "held_out_base": base,
        "held_out_before": before,
        "held_out_after": after,
        "cache_bytes": _cache_bytes(model, held_out(0).ids[:1]),
        "seconds": result.seconds,
        "model": None if options.out is None else str(options.out),
    }


def _data(options: RetrofitOptions, tokenizer: Any) -> tuple[TextBatches, TextBatches]:
    """Windows of the text for training, and of its last tenth for judging."""
    ids = tokenizer(read_text(options.text or DEFAULT_TEXT), add_special_tokens=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids)
    train, test = (TextBatches(tokens, options.context, options.batch, options.seed, s) for s in ("train", "held-out"))
    return train, test


@torch.no_grad()
def _cache_bytes(model: Any, ids: torch.Tensor) -> int | None:
    """Bytes of the model's own cache after one full context; None where it doesn't count them."""
    cache = model.eval()(ids.to(model.device), use_cache=True, logits_to_keep=1).past_key_values
    return getattr(cache, "nbytes", None)
