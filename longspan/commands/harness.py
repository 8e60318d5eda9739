"""``longspan harness``: tasks of lm-evaluation-harness under recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.registry import Refused
from longspan.terminal import Dtype, Json, Load, Model, load_model, own_methods, parse_recipes, progress_bar, show


def harness(
    task: Annotated[list[str], typer.Option("--task", "-t", help="A task or group of the harness, or one of ours, such as "
                                            "longspan_niah; repeat.")],
    recipe: Annotated[list[str] | None, typer.Option("--recipe", "-r", help="A recipe; repeat for several. `full` if left "
                                                     "out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task; all if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts generated at a time.")] = 1,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Worked examples in a prompt; the task's own number if left "
                                                "out.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    metadata: Annotated[str, typer.Option(help='What tasks that make their data are told, as JSON: {"length": 2048}.')] = "{}",
    include_path: Annotated[list[Path] | None, typer.Option(help="A folder with task files of your own; repeat.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results as JSON.")] = None,
    model: Model = None, dtype: Dtype = None, load: Load = None, as_json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness under recipes: their scores, and what each recipe held in its cache.

    Example: `longspan harness -t arc_easy -t longspan_ruler_vt -r full -r "snapkv(budget=0.2)" --limit 20`
    """
    own_methods(load)
    told = parse_metadata(metadata)
    from longspan.evaluation.harness.require import harness as required

    required()
    from longspan.evaluation.harness.run import run_harness

    recipes = parse_recipes(recipe or ["full"])
    loaded = load_model(model, dtype)
    with progress_bar("recipes") as tick:
        lines = run_harness(loaded, recipes, task, include=include_path or [], out=out, metadata=told, batch_size=batch,
                            progress=tick, limit=limit, num_fewshot=fewshot, apply_chat_template=chat)
    if as_json:
        show({"model": loaded.name, "rows": lines})
        return
    from rich.console import Console

    Console().print(table(lines, loaded.name))


def parse_metadata(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused(f"--metadata {text!r} isn't JSON ({error}); expected an object, such as "
                      '{"length": 2048}.') from error
    if not isinstance(found, dict):
        raise Refused(f'--metadata {text!r}: expected an object, such as {{"length": 2048}}.')
    return found


def table(lines: list[dict[str, Any]], title: str) -> Any:
    """Scores with what was held for a request, mean over requests."""
    from rich.table import Table

    from longspan.reporting.tables import human_bytes

    made = Table("task", "metric", "recipe", title=title)
    for name in ("value", "± stderr", "cache", "of full", "tokens kept", "n", "cut"):
        made.add_column(name, justify="right")
    for line in sorted(lines, key=lambda line: (line["task"], line["metric"], line["filter"])):
        cells = ["–"] * 5
        if "requests" in line:
            cells = [human_bytes(line["cache_bytes"]), f"{line['cache_bytes'] / line['full_bytes']:.0%}",
                     f"{line['kept']:.0f} of {line['tokens']:.0f}", str(line["requests"]), str(line["truncated"])]
        error = "–" if line["stderr"] is None else f"{line['stderr']:.4f}"
        metric = line["metric"] if line["filter"] == "none" else f"{line['metric']} ({line['filter']})"
        made.add_row(line["task"], metric, line["recipe"], f"{line['value']:.4f}", error, *cells)
    return made
