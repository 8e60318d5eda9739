"""The one training loop.

Each step reads `accumulate` batches by their numbers, adds up the gradients of the summed losses (through segments, if
asked), divides by what was counted, clips, and lets AdamW move. Everything that decides the next weights is in the
checkpoint (weights, moments, random states) or a function of the step (batches, learning rate): a run that was killed
and resumed ends with the very bits of one that wasn't.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.layers import choose
from longspan.registry import Refused
from longspan.training.base import Batch, Batches, Objective, ObjectiveFunction
from longspan.training.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from longspan.training.config import HARMLESS, TrainConfig, learning_rate
from longspan.training.optimiser import clip_gradients, make_optimiser, scale_gradients, set_learning_rate
from longspan.training.truncation import Tally, backward

Progress = Callable[[int, dict[str, float]], None]


def contents(batches: Any) -> dict[str, Any]:
    """What decides the batches of a source that is a dataclass: its plain fields, and a digest of each tensor."""
    fields = dataclasses.fields(batches) if dataclasses.is_dataclass(batches) else ()
    found: dict[str, Any] = {"kind": type(batches).__name__} if fields else {}
    for f in fields:
        value = getattr(batches, f.name)
        if isinstance(value, Tensor):
            found[f.name] = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
        elif value is None or isinstance(value, str | int | float):
            found[f.name] = value
    return found


HISTORY_FILE = "history.jsonl"


class Diverged(RuntimeError):
    """Training can't go on: the loss or the gradient is no longer finite."""


@dataclass(frozen=True)
class TrainResult:
    """What a run did: completed steps, logged rows, seconds in this process, where it resumed, last checkpoint."""

    steps: int
    history: list[dict[str, float]] = field(repr=False)
    seconds: float
    resumed_from: int | None
    checkpoint: Path | None

    @property
    def last(self) -> dict[str, float]:
        """The last logged row."""
        return self.history[-1]


class Trainer:
    """Holds what a run needs: model, batches, settings, objective, optimiser and the folder for checkpoints.

    `out` takes checkpoints and ``history.jsonl``; without it nothing is written. `progress(step, metrics)` is called
    for every logged step. `tensorboard` is a folder for its event files. The model trains where its weights are.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        config: TrainConfig,
        objective: Objective | ObjectiveFunction | str = "next-token",
        *,
        out: str | Path | None = None,
        progress: Progress | None = None,
        tensorboard: str | Path | None = None,
        trainable_only: bool = False,
    ):
        self.model, self.batches, self.config = model, batches, config
        self.objective: Any = choose(objective, "objective") if isinstance(objective, str) else objective
        self.out = None if out is None else Path(out)
        self.progress, self.trainable_only = progress, trainable_only
        self.optimiser = make_optimiser(model, config)
        self.parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.history: list[dict[str, float]] = []
        self.last_checkpoint: Checkpoint | None = None
        self._board = None if tensorboard is None else _tensorboard(tensorboard)
        if config.checkpoint_every and out is None:
            raise Refused(f"checkpoint_every={config.checkpoint_every}: expected a folder to write to (out).")

    def run(self, resume: bool = False) -> TrainResult:
        """Train to the configured number of steps; with `resume`, from the newest checkpoint in `out` if there is one.

        Raises `Refused` when `out` already holds a run and `resume` is off, or holds one with other settings, and
        `Diverged` when the loss is no longer finite. The global random state is the caller's again afterwards.
        """
        started = time.perf_counter()
        devices = range(torch.cuda.device_count()) if self.device.type == "cuda" else []
        was_training = self.model.training
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.config.seed)
            first = self._resume() if self._earlier(resume) else self._afresh()
            self.model.train()
            try:
                for step in range(first, self.config.steps):
                    self._log(step + 1, self._step(step))
                    if self._due(step + 1):
                        self._save(step + 1)
            finally:
                self.model.train(was_training)
                if self._board is not None:
                    self._board.close()
        folder = None if self.last_checkpoint is None else self.last_checkpoint.folder
        return TrainResult(
            self.config.steps, self.history, time.perf_counter() - started, first if first else None, folder
        )

    # ------------------------------------------------------------------------------------------------------- a step

    def _step(self, step: int) -> dict[str, float]:
        started, tally, config = time.perf_counter(), Tally(), self.config
        self.optimiser.zero_grad(set_to_none=True)
        for micro in range(config.accumulate):
            index = step * config.accumulate + micro
            progress = step / max(1, config.steps - 1)
            batch = dataclasses.replace(self.batches(index), index=index, progress=progress).to(self.device)
            self._check_length(batch)
            backward(
                self.model,
                self._under_autocast,
                batch,
                tally,
                segments=config.segments,
                detach_every=config.detach_every,
                reach=config.reach,
                check=lambda loss: self._finite("loss", loss, step),
            )
        if tally.weight <= 0:
            raise ValueError(f"step {step + 1}: the batches hold no labelled token, so there is no loss")
        scale_gradients(self.parameters, 1.0 / tally.weight)
        norm = clip_gradients(self.optimiser, config.clip)
        self._finite("gradient norm", norm, step)
        lr = learning_rate(step, config)
        set_learning_rate(self.optimiser, lr)
        self.optimiser.step()
        speed = tally.tokens / max(1e-9, time.perf_counter() - started)
        return tally.means() | {"lr": lr, "grad_norm": norm, "tokens_per_s": speed}

    def _under_autocast(self, model: nn.Module, batch: Batch, state: Any) -> Any:
        low = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=low):
            return self.objective(model, batch, state)

    def _check_length(self, batch: Batch) -> None:
        if self.config.segments > batch.ids.shape[1]:
            time = batch.ids.shape[1]
            raise Refused(f"segments={self.config.segments}: expected at most the {time} tokens of a row.")

    def _finite(self, what: str, value: Tensor | float, step: int) -> None:
        number = value.item() if isinstance(value, Tensor) else value
        if not math.isfinite(number):
            last = self.last_checkpoint
            good = f"the last good checkpoint is {last.folder}" if last else "there is no checkpoint yet"
            advice = f"lower lr={self.config.lr} or raise warmup={self.config.warmup}"
            raise Diverged(f"step {step + 1}: the {what} is {number}; {good}; {advice}.")

    # ------------------------------------------------------------------------------------------- keeping and resuming

    def _due(self, step: int) -> bool:
        every = self.config.checkpoint_every
        return self.out is not None and (step == self.config.steps or (every > 0 and step % every == 0))

    def _save(self, step: int) -> None:
        assert self.out is not None
        run = {"config": dataclasses.asdict(self.config), "objective": str(self.objective), **self._made_of()}
        self.last_checkpoint = save_checkpoint(
            self.out, step, self.model, self.optimiser, run, self.config.keep_last, self.trainable_only
        )

    def _earlier(self, resume: bool) -> bool:
        """Whether there is a run to go on with."""
        found = checkpoints(self.out) if self.out is not None else []
        if resume and self.out is None:
            raise Refused("resume=True: expected the folder of the run to resume (out).")
        if found and not resume:
            where, at = str(self.out), found[-1].step
            raise Refused(f"out={where!r}: already holds a run at step {at}; resume it or choose another folder.")
        self.last_checkpoint = found[-1] if found else None
        return bool(found)

    def _afresh(self) -> int:
        if self.out is not None:  # rows of a run that was killed before its first checkpoint
            (self.out / HISTORY_FILE).unlink(missing_ok=True)
        return 0

    def _made_of(self) -> dict[str, dict[str, Any]]:
        """What the model and the data are made of, where they say so."""
        as_json = getattr(getattr(self.model, "config", None), "as_json", None)
        return {"model": {} if as_json is None else as_json(), "data": contents(self.batches)}

    def _resume(self) -> int:
        assert self.last_checkpoint is not None and self.out is not None
        before, now = self.last_checkpoint.run, json.loads(json.dumps(dataclasses.asdict(self.config)))
        now = now | {"objective": str(self.objective)}
        for name, value in (before["config"] | {"objective": before["objective"]}).items():
            if name not in HARMLESS and now.get(name) != value:
                raise Refused(f"resume: {name}={now.get(name)!r}, but the run began with {value!r}; expected the same.")
        for what, made in json.loads(json.dumps(self._made_of())).items():
            for name, value in (before.get(what) or {}).items():
                if made.get(name, value) != value:
                    raise Refused(f"resume: the {what}'s {name} is {made[name]!r}, but the run began with {value!r}; expected "
                                  "the same.")
        step = load_checkpoint(self.last_checkpoint, self.model, self.optimiser)
        file = self.out / HISTORY_FILE
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # a killed run may leave half a line
        self.history = [row for row in rows if row["step"] <= step]
        file.write_text("".join(json.dumps(row) + "\n" for row in self.history), encoding="utf-8")
        return step

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if step % self.config.log_every and step != self.config.steps:
            return
        row = {"step": step} | metrics
        self.history.append(row)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / HISTORY_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"train/{name}", value, step)
        if self.progress is not None:
            self.progress(step, metrics)


def train(
    model: nn.Module,
    batches: Batches,
    config: TrainConfig,
    objective: Objective | ObjectiveFunction | str = "next-token",
    *,
    resume: bool = False,
    **places: Any,
) -> TrainResult:
    """Train `model` in place; see `Trainer` for `places` (out, progress, tensorboard, trainable_only)."""
    return Trainer(model, batches, config, objective, **places).run(resume)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Batches, count: int, objective: Objective | ObjectiveFunction | str = "next-token"
) -> dict[str, float]:
    """Mean loss and metrics of `objective` over the batches 0 to count - 1, in evaluation mode."""
    function: Any = choose(objective, "objective") if isinstance(objective, str) else objective
    device = next(model.parameters()).device
    tally, was_training = Tally(), model.training
    model.eval()
    try:
        for index in range(count):
            batch = dataclasses.replace(batches(index), index=index).to(device)
            tally.add(function(model, batch, None), batch.tokens)
    finally:
        model.train(was_training)
    return tally.means()


def _tensorboard(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Refused(
            f"tensorboard={str(folder)!r}: TensorBoard isn't installed; expected the extra longspan[train]."
        ) from None
    return SummaryWriter(str(folder))
