"""``longspan reproduce``: a system's claim beside what is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longspan.terminal import Json, Load, own_methods, progress_bar, show


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
