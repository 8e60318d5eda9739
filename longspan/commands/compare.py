"""``longspan compare``: recipes on tasks, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.terminal import (
    Dtype,
    Json,
    Load,
    Model,
    choose_recipe,
    load_model,
    own_methods,
    parse_recipes,
    progress_bar,
    quoted,
    show,
)

RECIPES = ["full", "streaming-llm(budget=0.5)", "snapkv(budget=0.5)"]
TASKS = ["niah"]
"""What is compared where nothing is said."""


def compare(
    recipe: Annotated[list[str] | None, typer.Option("--recipe", "-r", help="A recipe; repeat for several. The dense "
                                                     "run `full` is what the others are compared with.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="A task of `longspan tasks`; repeat.")] = None,
    length: Annotated[list[int] | None, typer.Option("--length", "-l", help="Tokens of the whole prompt; repeat.")] = None,
    examples: Annotated[int, typer.Option("--examples", "-n", help="Examples per task and length.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    compress: Annotated[str, typer.Option(help="Compress before-question or after-question is read.")] = "before-question",
    oracle: Annotated[str | None, typer.Option(help="Also compare what scores rank high with what an answer attends to: the "
                                               "model's own (model-ref) or the right one (gt-ref).")] = None,
    read_once: Annotated[bool, typer.Option("--read-once", help="Read each example once for all recipes: much faster, with "
                                            "quality and bytes but no times; answers aren't generated but judged by their "
                                            "likelihood.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Cap on generated tokens, below what the tasks ask for.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rows (resumed if there), summary and report.html.")] = None,
    model: Model = None, dtype: Dtype = None, load: Load = None, as_json: Json = False,
) -> None:
    """Compare recipes on tasks: accuracy, answer likelihood, bytes and time, side by side.

    Example: `longspan compare -r full -r "snapkv(budget=0.2)" -t niah -t ruler-vt -l 1024 -n 20 --out runs/first`
    """
    own_methods(load)
    from longspan.evaluation import Request, parse_oracle, parse_task, run, summarise

    recipes, tasks, lengths = recipe or RECIPES, task or TASKS, length or [1024]
    made = [parse_task(t) for t in tasks]
    reference = None if oracle is None else parse_oracle(oracle)
    parsed = parse_recipes([r for r in recipes if r.strip() != "auto"])
    loaded = load_model(model, dtype)
    for at, text in enumerate(recipes):
        if text.strip() == "auto":
            parsed.insert(at, choose_recipe(loaded, max(lengths)))
    request = Request(parsed, made, lengths, examples, seed, compress, out, max_new_tokens,
                      keep_view=out is not None and not read_once, oracle=reference, read_once=read_once)
    with progress_bar("examples") as tick:
        rows = run(loaded, request, tick)
    summary = summarise(rows)
    report = write_report(request, rows, summary, made) if out is not None else None
    if as_json:
        show({"model": loaded.name, "rows": summary})
        return
    from rich.console import Console

    from longspan.reporting import oracle_table, summary_table

    console = Console()
    console.print(summary_table(summary, title=f"{loaded.name} · {rows[0]['dtype']}"))
    if reference is not None:
        console.print(oracle_table(summary, title=str(reference)))
    if report is not None:
        console.print(f"Report: {report}", soft_wrap=True)


def write_report(request: Any, rows: list[Any], summary: list[Any], tasks: list[Any]) -> Path:
    from longspan.reporting import kept_payload, write_page

    folder = request.out
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    views = [kept_payload(v["tokens"], v["recipes"], v["spans"], v["title"]) for v in request.kept.values()]
    command = " ".join(["longspan", *map(quoted, sys.argv[1:])])
    return write_page(folder / "report.html", rows, summary, views, {"command": command})
