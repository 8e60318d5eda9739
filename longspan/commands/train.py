"""``longspan train``: a small decoder from named parts, or a retrofit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.registry import Refused
from longspan.terminal import Json, Load, Model, own_methods, part, progress_bar, quiet_libraries, show


def train(
    mixer: Annotated[str | None, typer.Option(help="What mixes tokens, such as softmax (the default) or l2a.")] = None,
    position: Annotated[str | None, typer.Option(help="Position scheme, such as rope; the mixer's own if left out.")] = None,
    side_path: Annotated[str | None, typer.Option(help="A path beside the mixer, such as short-conv.")] = None,
    stack: Annotated[str | None, typer.Option(help="How layers are stacked; plain if left out.")] = None,
    retrofit: Annotated[str | None, typer.Option(help="Change a pretrained model (--model) instead, such as l2a.")] = None,
    objective: Annotated[str | None, typer.Option(help="What is minimised; next-token, or what the retrofit asks for.")] = None,
    task: Annotated[str | None, typer.Option(help="Instead of text a synthetic task: copy, recall, table-lookup, l-cube")] = None,
    text: Annotated[str | None, typer.Option(help="topics, stdlib or a path.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the residual stream; 64 if left out.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers; 2 if left out.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; 4 if left out.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads; as many as query heads if left out.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a training sequence; 128, or 512 for a retrofit.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps; 300, or 1,000 for l-cube.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step; 16, or 1 for a retrofit.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 0.002, or 0.00005 for a retrofit.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    segments: Annotated[int | None, typer.Option(help="Pieces a sequence is fed in, with the state carried.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints, and for a retrofit's model.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in --out, exactly.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard logs.")] = None,
    model: Model = None, load: Load = None, as_json: Json = False,
) -> None:
    """Train a small decoder from named parts, in minutes, or a retrofit of a pretrained model; report held-out losses.

    Example: `longspan train --retrofit "l2a(window=256)" --steps 100 --out runs/l2a`
    """
    own_methods(load)
    parts = {name: None if given is None else part(given, name) for name, given in (
        ("mixer", mixer), ("position", position), ("side_path", side_path), ("stack", stack), ("objective", objective))}
    small = parts | {"task": task, "dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "segments": segments}
    del small["objective"]
    both = {"objective": parts["objective"], "text": text, "context": context, "steps": steps, "lr": lr,
            "batch": batch,
            "seed": seed, "precision": precision, "out": out, "resume": resume, "checkpoint_every": checkpoint_every,
            "tensorboard": tensorboard}
    run_training: Any
    if retrofit is None:
        if model is not None:
            raise Refused(f"--model {model!r}: a small decoder starts from nothing; expected --retrofit with it.")
        if task is not None and task.split("(")[0].strip() == "l-cube":
            from longspan.evaluation.lcube.command import JudgeOptions as Options
            from longspan.evaluation.lcube.command import judge as run_training
        else:
            from longspan.training.command import TrainOptions as Options  # type: ignore[assignment]
            from longspan.training.command import train as run_training

            both["batch"] = 16 if batch is None else batch
        both |= small
    else:
        if given := next((name for name, value in small.items() if value is not None), None):
            raise Refused(f"--{given.replace('_', '-')} with --retrofit: a pretrained model is trained on text as it is; leave "
                          "one of the two out.")
        from longspan.training.retrofit import RetrofitOptions as Options  # type: ignore[assignment]
        from longspan.training.retrofit import train_retrofit as run_training

        quiet_libraries()
        both |= {"retrofit": retrofit, "model": model}
    given_only: dict[str, Any] = {name: value for name, value in both.items() if value is not None}
    options = Options(**given_only)
    with progress_bar("steps") as tick:
        report = run_training(options, lambda step, metrics: tick(step, options.steps, f"loss {metrics['loss']:.3f}"))
    if as_json:
        show(report)
        return
    for key, value in report.items():
        print(f"{key}: {value}")
