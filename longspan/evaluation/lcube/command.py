"""What a command line runs: any mixer on L-CUBE, at one length or trained anew at several.

    l-cube                          the benchmark as it stands
    l-cube(beta=0.6, rho=0.9)       its settings, those of `LCube` but the length, which is the context
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan import grammar
from longspan.evaluation.lcube.judge import Progress, Size, at_length, build, fit, judged
from longspan.evaluation.lcube.plan import LCube
from longspan.evaluation.lcube.scores import utilised_length
from longspan.layers import Mixer, Position, SidePath, Stack
from longspan.models.decoder import count_parameters
from longspan.registry import Refused, nearest
from longspan.training import TrainConfig

NAME = "l-cube"
LEAST_HELD_OUT = 256


@dataclass(frozen=True)
class JudgeOptions:
    """Everything the command takes. Parts are names or methods."""

    mixer: Mixer | str = "softmax"
    position: Position | str | None = None
    side_path: SidePath | str | None = None
    stack: Stack | str = "plain"
    task: str = NAME
    context: int | Sequence[int] = 64
    """Tokens of a sequence, a power of two; several lengths train a model each and give the utilised length."""
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None
    mlp_dim: int | None = None
    table: bool = True
    """Add a learned table of positions to the inputs: which slots depend on the past is a matter of a token's index."""
    steps: int = 1000
    batch: int = 64
    lr: float = 3e-3
    held_out: int = LEAST_HELD_OUT
    precision: str = "float32"
    segments: int = 1
    seed: int = 0
    out: str | Path | None = None
    """Folder for checkpoints; one below it for each of several lengths."""
    resume: bool = False
    checkpoint_every: int = 0
    tensorboard: str | Path | None = None
    text: str | Path | None = None
    objective: Any = None
    """Refused, like `text`: the sequences are drawn, and the objective is their likelihood."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The contexts, each once, in order."""
        given = self.context if isinstance(self.context, Sequence) else [self.context]
        return tuple(sorted(set(given)))

    def size(self) -> Size:
        """The benchmark (at its smallest length) and the budget; refuses what makes no sense."""
        for name in ("text", "objective"):
            if getattr(self, name) is not None:
                raise Refused(f"{name}={str(getattr(self, name))!r} with task={self.task!r}: expected one of the two.")
        for name, least in (("batch", 1), ("held_out", LEAST_HELD_OUT)):
            if getattr(self, name) < least:
                raise Refused(f"{name}={getattr(self, name)}: expected at least {least}.")
        if not self.lengths:
            raise Refused("context=[]: expected at least one length, such as 64.")
        return Size(plan_of(self.task, self.lengths[0]), self.dim, self.layers, self.heads, self.table, self.steps, self.batch,
                    self.lr, self.held_out, {"n_kv_heads": self.kv_heads, "mlp_dim": self.mlp_dim})

    def config(self, size: Size) -> TrainConfig:
        """The loop's settings."""
        return dataclasses.replace(size.config(self.seed), precision=self.precision, segments=self.segments,
                                   checkpoint_every=self.checkpoint_every)


def plan_of(task: str, length: int) -> LCube:
    """The benchmark that a text such as ``l-cube(beta=0.6)`` names, at `length` tokens. `Refused` for anything else."""
    parts = grammar.parse(task)
    call = parts[0].call
    if len(parts) > 1 or parts[0].at is not None or call.name != NAME:
        raise Refused(f"task={task!r}: expected {NAME}, with settings or without, such as {NAME}(beta=0.75).")
    known = [f.name for f in dataclasses.fields(LCube) if f.name != "H"]
    for name in call.settings:
        if name not in known:
            raise Refused(f"task={task!r}: {nearest(name, known, 'setting')}")
    return LCube.of_length(length, **call.settings)


def judge(options: JudgeOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Train and judge as `options` say and report plain data: parts, utilisation as a whole, by distance and across the middle.

    `progress(step, metrics)` is called for some steps of each length in turn. Raises `Refused` for options that can't work
    and `Diverged` when the loss is no longer finite. The caller's random state is left alone.
    """
    size, lengths = options.size(), options.lengths
    sizes = [at_length(size, n) for n in lengths]
    parts = {name: getattr(options, name) for name in ("mixer", "position", "side_path", "stack")}
    reports: dict[int, dict[str, Any]] = {}
    shape: Any = None
    for n, of in zip(lengths, sizes):
        model = build(parts, of, options.seed).to("cuda" if torch.cuda.is_available() else "cpu")
        shape = model.backbone.config
        result = fit(model, of, options.seed, progress, config=options.config(of), resume=options.resume,
                     out=_below(options.out, n, lengths), tensorboard=_below(options.tensorboard, n, lengths))
        saved = None if result.checkpoint is None else str(result.checkpoint)
        reports[n] = judged(model, of, options.seed).report() | {
            "parameters": count_parameters(model), "seconds": result.seconds, "model": saved}
    report: dict[str, Any] = {name: None if (part := getattr(shape, name)) is None else str(part) for name in parts}
    report |= {"data": options.task, "steps": options.steps,
               "utilised length": utilised_length({n: found["across the middle"] for n, found in reports.items()})}
    return report | (reports[lengths[0]] if len(lengths) == 1 else {"by length": reports})


def _below(folder: str | Path | None, length: int, lengths: Sequence[int]) -> Path | None:
    if folder is None:
        return None
    return Path(folder) if len(lengths) == 1 else Path(folder) / str(length)
