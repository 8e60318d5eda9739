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
    batch: Annotated[int, typer.Option(min=1, help="Prompts generated at a time; bytes are then those of the padded batch.")] = 1,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Worked examples in a prompt; the task's own number if left "
                                                "out.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    metadata: Annotated[str, typer.Option(help='What tasks that make their data are told, as JSON: {"length": 2048}.')] = "{}",
    include_path: Annotated[list[Path] | None, typer.Option(help="A folder with task files of your own; repeat.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results as JSON, and each document's prediction and scores as "
                                              "JSON lines.")] = None,
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
    """Scores with what was held for a request, one block per task and metric; it fits a terminal of 80 columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=0, title_justify="left", caption_justify="left")
    made.add_column("recipe", overflow="fold", min_width=16)
    compared = any("vs_full" in line for line in lines)
    for name in ("score", *(["vs full"] if compared else []), "cache", "of full", "kept"):
        made.add_column(name, justify="right", overflow="fold")
    blocks: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: (line["task"], line["metric"], line["filter"])):
        blocks.setdefault((line["task"], line["metric"], line["filter"]), []).append(line)
    for (task, metric, chosen), block in blocks.items():
        made.add_row(Text(f"{task} · {metric}" + ("" if chosen == "none" else f" ({chosen})"), style="bold"))
        for line in block:
            made.add_row(*map(Text, cells(line, compared)))
        made.add_section()
    errors = any(line["stderr"] is not None for line in lines)
    made.caption = "±: standard error. " if errors else ""
    made.caption += "Mean over requests: bytes of the cache, and tokens kept of those read."
    counts = [f"{line['requests']}" for line in lines if "requests" in line]
    if counts:
        made.caption += f" Requests: {' or '.join(sorted(set(counts), key=int))}."
    if cut := {(line["task"], line["recipe"]): line["truncated"] for line in lines if line.get("truncated")}:
        made.caption += " Prompts that lost their left end: " + ", ".join(f"{n} of {t} ({r})" for (t, r), n in cut.items()) + "."
    if compared:
        made.caption += (" vs full: paired by document, with its 95% interval and p (Holm, over the recipes of a block); "
                         "▼ ▲ lower or higher beyond chance (5%).")
    return made


def cells(line: dict[str, Any], compared: bool) -> list[str]:
    """A line's texts, in the order of the table's columns."""
    from longspan.reporting.tables import human_bytes

    held = ["–"] * 3
    if "requests" in line:
        held = [human_bytes(line["cache_bytes"]), f"{line['cache_bytes'] / line['full_bytes']:.0%}",
                f"{line['kept']:.0f} of {line['tokens']:.0f}"]
    versus = [against_full(line.get("vs_full"))] if compared else []
    error = "" if line["stderr"] is None else f"\n±{number(line['stderr'])}"
    return [line["recipe"], number(line["value"]) + error, *versus, *held]


def against_full(versus: dict[str, Any] | None) -> str:
    """Difference and p-value, below them the interval."""
    from longspan.reporting.tables import LEVEL

    if versus is None or versus["difference"] is None:
        return "–"
    p, (lo, hi) = versus["p_holm"], versus["ci95"]
    mark = "" if p is None or p >= LEVEL else " ▲" if versus["difference"] > 0 else " ▼"
    first = signed(versus["difference"]) + ("" if p is None else f" p={p:.3f}" if p >= 0.001 else " p<.001") + mark
    return first if lo is None or hi is None else f"{first}\n[{signed(lo)}, {signed(hi)}]"


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 10_000 else f"{value:.3g}"


def signed(value: float) -> str:
    from longspan.reporting.tables import signed as with_sign

    return with_sign(value, 3 if abs(value) < 10 else 1)
