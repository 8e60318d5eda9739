"""``longspan sweep`` and ``longspan sweep status``: grids of cells."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.registry import Refused
from longspan.terminal import Json, progress_bar, quiet_libraries, quoted, show


def sweep(
    words: Annotated[list[str], typer.Argument(metavar="FILE | status DIR", help="A grid as YAML, or the folder to ask about.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; runs/<name of the file> if left out.")] = None,
    engine: Annotated[str, typer.Option(help="Who runs the cells: local (processes of this machine) or ray.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Cells at once, one thread each if several; 1 if left out, and on a cluster "
                                                "one for each processor.")] = None,
    address: Annotated[str | None, typer.Option(help="A Ray cluster's address, auto for this machine's; one is made for the run "
                                                "if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Run a grid of models, recipes, tasks, lengths and seeds; stop it at any time, run it again to go on.

    Example: `longspan sweep grid.yaml --workers 2 --out runs/grid`, then `longspan sweep status runs/grid`
    """
    from longspan.evaluation.sweeps import read_grid, read_status
    from longspan.evaluation.sweeps import sweep as run_sweep

    quiet_libraries()
    if len(words) == 2 and words[0] == "status":
        state, folder = read_status(Path(words[1])), Path(words[1])
    elif len(words) == 1:
        file = Path(words[0])
        grid, folder = read_grid(file), out or Path("runs") / file.stem
        with progress_bar("cells") as tick:
            state = run_sweep(grid, folder, engine, workers, tick, address)
        if state.rows:
            write_sweep_pages(folder)
    else:
        raise Refused(f"sweep {' '.join(words)}: expected a YAML file, or status and a folder.")
    if as_json:
        show({"folder": str(folder)} | state.as_json())
    else:
        print(f"{folder}: {state.finished} of {state.total} cells finished, {len(state.failed)} failed, {state.missing} missing.")
        if state.busy:
            print(at_work(state.run))
        if (page := folder / "report.html").is_file():
            print(f"Report: {page}")
        for name, cells in (("refused", state.refused), ("failed", state.failed)):
            for reason, where in by_reason(cells).items():
                more = "" if len(where) == 1 else f" (and {len(where) - 1} more cells)"
                print(f"{name}: {where[0]}{more}: {reason}")
    if state.failed:
        raise SystemExit(1)


def by_reason(cells: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Cells that share a reason, so that one fact is told once."""
    found: dict[str, list[str]] = {}
    for cell, reason in cells:
        found.setdefault(reason, []).append(cell)
    return found


def at_work(run: Any) -> str:
    """A run under way, in one line."""
    from longspan.evaluation.sweeps import duration

    if run is None:
        return "A run is at work; it is only starting."
    if not run.done:
        began = duration(time.time() - run.started)
        return f"Process {run.process} on {run.host} is at work ({run.engine}) since {began}; no cell of it is done yet."
    ago = duration(time.time() - run.at)
    return (f"Process {run.process} on {run.host} is at work ({run.engine}): {run.done} of {run.cells} cells of this run done, "
            f"{duration(run.left)} left, the latest {ago} ago.")


def write_sweep_pages(folder: Path) -> None:
    """``summary.json``, with the lines of each model, and ``report.html``, one page for the whole sweep."""
    from longspan.evaluation import summarise
    from longspan.evaluation.sweeps import by_model
    from longspan.reporting import cells_of, write_sweep

    rows, cells = cells_of(folder)
    summaries = {model: summarise(own) for model, own in by_model(rows).items()}
    (folder / "summary.json").write_text(json.dumps(summaries, indent=1, default=str) + "\n", encoding="utf-8")
    command = " ".join(["longspan", *map(quoted, sys.argv[1:])])
    write_sweep(folder / "report.html", rows, cells, {"command": command})
