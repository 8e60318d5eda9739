"""Checkpoints: everything a run needs to go on exactly where it stopped, as safetensors and JSON.

``step-00000300/`` holds ``model.safetensors`` (and the model's own ``config.json`` if it has one, so that the folder
loads as a model), ``optimiser.safetensors``, ``dice.safetensors`` (the states of the random number generators) and
``run.json``. A checkpoint is written under another name and renamed when it is complete, so a killed run leaves whole
checkpoints only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from longspan.registry import Refused
from longspan.training.optimiser import load_optimiser_tensors, named_trainable, optimiser_tensors

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
MODEL, OPTIMISER, DICE, RUN = "model.safetensors", "optimiser.safetensors", "dice.safetensors", "run.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    folder: Path

    @property
    def run(self) -> dict[str, Any]:
        """What ``run.json`` says: step, settings, objective."""
        return json.loads((self.folder / RUN).read_text(encoding="utf-8"))


def checkpoints(out: str | Path) -> list[Checkpoint]:
    """The complete checkpoints in `out`, oldest first."""
    found = []
    for folder in Path(out).glob("step-*"):
        match = _NAME.fullmatch(folder.name)
        if match and (folder / RUN).is_file():
            found.append(Checkpoint(int(match[1]), folder))
    return sorted(found, key=lambda c: c.step)


def save_checkpoint(
    out: str | Path,
    step: int,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    run: dict[str, Any],
    keep_last: int,
    trainable_only: bool = False,
) -> Checkpoint:
    """Write the checkpoint of `step` completed steps, then remove all but the newest `keep_last`.

    With `trainable_only` the model's frozen weights are left out; whoever resumes brings them along.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".step-*"):  # what a killed run was writing
        shutil.rmtree(leftover)
    unfinished = out / f".step-{step:08d}"
    unfinished.mkdir()
    named = named_trainable(model)
    if trainable_only:
        save_file({name: p.detach().contiguous() for name, p in named.items()}, str(unfinished / MODEL))
    elif callable(getattr(model, "save", None)):
        model.save(unfinished)  # type: ignore[operator]
    else:
        save_model(model, str(unfinished / MODEL))
    moments = {key: t.contiguous() for key, t in optimiser_tensors(optimiser, named).items()}
    save_file(moments, str(unfinished / OPTIMISER))
    save_file(_dice(), str(unfinished / DICE))
    facts = {"format": FORMAT, "step": step, "trainable_only": trainable_only} | run
    (unfinished / RUN).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    _flush(unfinished)
    folder = out / f"step-{step:08d}"
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(unfinished, folder)
    for old in checkpoints(out)[:-keep_last]:
        shutil.rmtree(old.folder)
    return Checkpoint(step, folder)


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Put weights, optimiser state and random number generators back; returns the completed steps.

    Raises `Refused` when the checkpoint belongs to another model.
    """
    run = checkpoint.run
    if run.get("format") != FORMAT:
        raise Refused(f"{checkpoint.folder}: checkpoint format {run.get('format')!r}; expected {FORMAT}.")
    named = named_trainable(model)
    file = str(checkpoint.folder / MODEL)
    try:
        if run["trainable_only"]:
            _load_trainable(named, load_file(file))
        else:
            load_model(model, file)
        load_optimiser_tensors(optimiser, named, load_file(str(checkpoint.folder / OPTIMISER)))
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise Refused(f"{checkpoint.folder}: the checkpoint is of another model ({first}).") from error
    _roll(load_file(str(checkpoint.folder / DICE)))
    return run["step"]


def _load_trainable(named: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
    if set(named) != set(tensors):
        raise ValueError(f"parameters differ: {sorted(set(named) ^ set(tensors))[0]!r} is in one of the two only")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])


def _dice() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _roll(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda{i}"], i)


def _flush(folder: Path) -> None:
    """Make sure that what the rename will reveal is on the disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
