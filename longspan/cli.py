"""The command line. Heavy imports happen inside the commands, so that `longspan --help` answers at once.

Standard output carries the result (one JSON document with ``--json``), standard error progress and errors.
Exit codes: 0 done, 1 a run failed, 2 the request can't be served as written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan import registry
from longspan.registry import Refused
from longspan.terminal import Dtype, Json, Load, Model, load_model, own_methods, part, progress_bar, quoted, read_text, show

app = typer.Typer(
    name="longspan", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""More context for less memory and time, and what that costs in quality, measured.

A *recipe* composes methods: `snapkv(budget=0.2)` keeps a fifth of the key-value cache,
`xattention + snapkv @ adakv(budget=0.2)` also reads the prompt sparsely, `full` changes nothing.
See `longspan methods` for all parts and their knobs.""",
)

DEFAULT_RECIPES = ["full", "streaming-llm(budget=0.5)", "snapkv(budget=0.5)"]
DEFAULT_TASKS = ["niah"]


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except Refused as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted; with --out the rows measured so far are kept.", 1)
    except Exception as error:
        if os.environ.get("LONGSPAN_DEBUG"):
            raise
        fail(f"{type(error).__name__}: {error} (set LONGSPAN_DEBUG=1 for the traceback)", 1)


def fail(sentence: str, code: int) -> None:
    print(f"longspan: {sentence}", file=sys.stderr)
    raise SystemExit(code)


# ------------------------------------------------------------------------------------------------------------- compare


@app.command()
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

    recipes, tasks, lengths = recipe or DEFAULT_RECIPES, task or DEFAULT_TASKS, length or [1024]
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


def parse_recipes(texts: list[str]) -> list[Any]:
    from longspan.recipe import Recipe

    return [Recipe.parse(text) for text in texts]


def choose_recipe(loaded: Any, length: int) -> Any:
    """What `auto` stands for: the cheapest recipe that measured results allow at this length."""
    from longspan.evaluation.planner import choose

    return choose(loaded, length)


def write_report(request: Any, rows: list[Any], summary: list[Any], tasks: list[Any]) -> Path:
    from longspan.reporting import kept_payload, write_page

    folder = request.out
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    views = [kept_payload(v["tokens"], v["recipes"], v["spans"], v["title"]) for v in request.kept.values()]
    command = " ".join(["longspan", *map(quoted, sys.argv[1:])])
    return write_page(folder / "report.html", rows, summary, views, {"command": command})


# ----------------------------------------------------------------------------------------------------------------- ask


@app.command()
def ask(
    file: Annotated[Path, typer.Argument(help="A text file (UTF-8).")],
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="How to read the file and what to keep.")] = "full",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    model: Model = None, dtype: Dtype = None, load: Load = None, as_json: Json = False,
) -> None:
    """Read a file under a recipe, compress it, and answer a question about it."""
    own_methods(load)
    text = read_text(file)
    if not question.strip():
        raise Refused("the question is empty; expected some text.")
    from longspan.recipe import Recipe

    made = Recipe.parse(recipe) if recipe.strip() != "auto" else None
    loaded = load_model(model, dtype)
    from longspan.context import open_context
    from longspan.context.document import check_window

    if made is None:
        made = choose_recipe(loaded, len(loaded.tokenizer(text)["input_ids"]))
    asked = loaded.tokenizer(question)["input_ids"]
    check_window(loaded, len(loaded.tokenizer(text)["input_ids"]) + len(asked) + max_new_tokens,
                 "document, question and answer together", made)
    context = open_context(loaded, text, made)
    answer = context.ask(question, max_new_tokens)
    if as_json:
        show({"model": loaded.name, "recipe": str(made), "question": question, "answer": answer.text,
              "read_s": context.read_s, "ttft_s": answer.ttft_s, "tokens_per_s": answer.tokens_per_s,
              "achieved": context.achieved.as_json()})
        return
    print(answer.text)
    if not answer.text:
        what = f"{len(answer.ids)} tokens, all white space" if answer.ids else "nothing"
        print(f"longspan: the model wrote {what}.", file=sys.stderr)
    from longspan.reporting import human_bytes

    held = context.achieved
    print(f"{loaded.name} · {made} · {held.seen:,} tokens read in {context.read_s:.1f} s · "
          f"{human_bytes(held.cache_bytes)} of {human_bytes(held.full_bytes)} held", file=sys.stderr)


# ------------------------------------------------------------------------------------------------- methods and tasks


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its knobs.")] = None,
    room: Annotated[str | None, typer.Option(help="Only methods of this room, such as cache.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only methods of this kind, such as score.")] = None,
    load: Load = None, as_json: Json = False,
) -> None:
    """List the methods, or explain one."""
    own_methods(load)
    found = registry.cards()
    for option, value in (("room", room), ("kind", kind)):
        known = {getattr(c, option) for c in found}
        if value is not None and value not in known:
            raise Refused(registry.nearest(value, known, option))
    chosen = [registry.card(name)] if name else [c for c in found if room in (None, c.room) and kind in (None, c.kind)]
    list_cards(chosen, as_json, one=name is not None)


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="One task, with its knobs.")] = None,
    load: Load = None, as_json: Json = False,
) -> None:
    """List the tasks, or explain one."""
    own_methods(load)
    found = registry.cards(kind="task")
    if name is not None and name not in {c.name for c in found}:
        raise Refused(registry.nearest(name, [c.name for c in found], "task"))
    list_cards([c for c in found if name in (None, c.name)], as_json, one=name is not None)


def list_cards(cards: list[registry.Card], as_json: bool, *, one: bool) -> None:
    if as_json:
        show([c.as_json() for c in cards])
        return
    from rich.console import Console

    from longspan.reporting.methods import card_page, card_table

    Console().print(card_page(cards[0]) if one else card_table(cards))


# ------------------------------------------------------------------------------------------------ reproduce and plan


@app.command()
def reproduce(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Experiments; all if left out.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), small (minutes on two cores) or paper.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Folder for one JSON file per experiment.")] = None,
    load: Load = None, as_json: Json = False,
) -> None:
    """Run a system's experiment: its claim beside what is measured here."""
    own_methods(load)
    from longspan.experiments import find, perform

    chosen = find(ids or [])
    with progress_bar("experiments") as tick:
        done = [perform(experiment, scale, out, lambda what, n=n: tick(n, len(chosen), what))
                for n, experiment in enumerate(chosen)]
        tick(len(chosen), len(chosen), "")
    if as_json:
        show([d.as_json() for d in done])
    else:
        from rich.console import Console

        from longspan.reporting.experiments import outcome_table, rows_table

        Console().print(outcome_table(done), *(rows_table(*e.lines(d.outcome.table)) for e, d in zip(chosen, done) if e.lines))
    if any(d.verdict == "failed" for d in done):
        raise SystemExit(1)


@app.command()
def sweep(
    words: Annotated[list[str], typer.Argument(metavar="FILE | status DIR", help="A grid as YAML, or the folder to ask about.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; runs/<name of the file> if left out.")] = None,
    engine: Annotated[str, typer.Option(help="Who runs the cells: local, processes of this machine.")] = "local",
    workers: Annotated[int, typer.Option(help="Processes; one thread each if several.")] = 1,
    as_json: Json = False,
) -> None:
    """Run a grid of models, recipes, tasks, lengths and seeds; stop it at any time, run it again to go on.

    Example: `longspan sweep grid.yaml --workers 2 --out runs/grid`, then `longspan sweep status runs/grid`
    """
    from longspan.evaluation.sweeps import read_grid, read_status
    from longspan.evaluation.sweeps import sweep as run_sweep
    from longspan.terminal import quiet_libraries

    quiet_libraries()
    if len(words) == 2 and words[0] == "status":
        state, folder = read_status(Path(words[1])), Path(words[1])
    elif len(words) == 1:
        file = Path(words[0])
        grid, folder = read_grid(file), out or Path("runs") / file.stem
        with progress_bar("cells") as tick:
            state = run_sweep(grid, folder, engine, workers, tick)
        if state.rows:
            write_sweep_pages(folder, state.rows)
    else:
        raise Refused(f"sweep {' '.join(words)}: expected a YAML file, or status and a folder.")
    if as_json:
        show({"folder": str(folder)} | state.as_json())
    else:
        print(f"{folder}: {state.finished} of {state.total} cells finished, {len(state.failed)} failed, {state.missing} missing.")
        for name, cells in (("refused", state.refused), ("failed", state.failed)):
            for cell, reason in cells:
                print(f"{name}: {cell}: {reason}")
    if state.failed:
        raise SystemExit(1)


def write_sweep_pages(folder: Path, rows: list[Any]) -> None:
    """``summary.json`` and a report page for each model."""
    from longspan.evaluation import summarise
    from longspan.evaluation.sweeps import by_model
    from longspan.reporting import write_page

    found = by_model(rows)
    summaries = {model: summarise(own) for model, own in found.items()}
    (folder / "summary.json").write_text(json.dumps(summaries, indent=1, default=str) + "\n", encoding="utf-8")
    for model, own in found.items():
        plain = "".join(c if c.isalnum() or c in "-." else "-" for c in model)
        name = "report.html" if len(found) == 1 else f"report-{plain}.html"
        write_page(folder / name, own, summaries[model], [], {"command": "longspan sweep"})


@app.command()
def plan(
    context: Annotated[int, typer.Option("--context", "-c", min=1, help="Tokens the model must hold.")],
    memory: Annotated[str, typer.Option(help='Memory for the key-value cache, such as "2GiB".')],
    floor: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of the dense run's accuracy.")] = 0.9,
    rows: Annotated[int, typer.Option(min=1, help="Sequences held at once.")] = 1,
    results: Annotated[Path | None, typer.Option(help="Folder of a `compare --out` run to plan from; the measured "
                                                 "results that come with longspan if left out.")] = None,
    model: Model = None, dtype: Dtype = None, as_json: Json = False,
) -> None:
    """Which recipes fit a memory limit and keep the quality, cheapest first, from measured results."""
    from longspan.evaluation.planner import make_plan

    found = make_plan(model, context, memory, floor, rows=rows, results=results, dtype=dtype)
    if as_json:
        show(found.as_json())
        return
    from rich.console import Console

    from longspan.reporting.plans import plan_table

    Console().print(plan_table(found))


# ------------------------------------------------------------------------------------------------------------- profile


@app.command()
def profile(
    recipe: Annotated[list[str], typer.Argument(help="A recipe with a method that needs a profile, such as 'snapkv @ lu-kv'; "
                                                "several share the work.")],
    contexts: Annotated[int, typer.Option(min=1, help="Calibration texts.")] = 8,
    questions: Annotated[int, typer.Option(min=1, help="Questions about each text.")] = 2,
    length: Annotated[int | None, typer.Option("--length", "-l", min=1, help="Tokens of a text; 1024, or half of a shorter "
                                               "window, if left out.")] = None,
    answers: Annotated[str, typer.Option(help="Answers sampled from the model, or known ones.")] = "sampled",
    text: Annotated[str, typer.Option(help="What texts are cut from, such as pydoc or docstrings.")] = "pydoc",
    seed: Annotated[int, typer.Option(help="Seed of texts and answers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File to write; where recipes look for it if left out.")] = None,
    again: Annotated[bool, typer.Option(help="Make it even if it is there.")] = False,
    model: Model = None, dtype: Dtype = None, load: Load = None, as_json: Json = False,
) -> None:
    """Make the offline statistics that a recipe needs on a model. Recipes find them by themselves from then on.

    Example: `longspan profile "snapkv @ lu-kv(budget=0.2)"`
    """
    own_methods(load)
    from longspan.evaluation.profiling import make_profiles, needing

    parsed = parse_recipes(recipe)
    for one in parsed:
        needing(one)  # refuses before a model is loaded
    loaded = load_model(model, dtype)
    with progress_bar("texts") as tick:
        profiles = make_profiles(loaded, parsed, tick, contexts=contexts, questions=questions, length=length, answers=answers,
                                 text=text, seed=seed, out=out, again=again)
    if as_json:
        show(profiles[0].as_json() if len(profiles) == 1 else [made.as_json() for made in profiles])
        return
    for made in profiles:
        how = "was there already" if made.reused else f"made in {made.seconds:.0f} s"
        print(f"{made.profile.key.method} profile of {made.profile.key.score} on {loaded.name}: {how}\n{made.path}")


# --------------------------------------------------------------------------------------------------------------- train


@app.command()
def train(
    mixer: Annotated[str | None, typer.Option(help="What mixes tokens, such as softmax (the default) or l2a.")] = None,
    position: Annotated[str | None, typer.Option(help="Position scheme, such as rope; the mixer's own if left out.")] = None,
    side_path: Annotated[str | None, typer.Option(help="A path beside the mixer, such as short-conv.")] = None,
    stack: Annotated[str | None, typer.Option(help="How layers are stacked; plain if left out.")] = None,
    retrofit: Annotated[str | None, typer.Option(help="Change a pretrained model (--model) instead, such as l2a.")] = None,
    objective: Annotated[str | None, typer.Option(help="What is minimised; next-token, or what the retrofit asks for.")] = None,
    task: Annotated[str | None, typer.Option(help="A synthetic task (copy, recall, l-cube) instead of text.")] = None,
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
        from longspan.terminal import quiet_libraries
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


if __name__ == "__main__":
    main()
