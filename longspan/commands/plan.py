"""``longspan plan``: which recipes fit a memory limit and keep the quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longspan.terminal import Dtype, Json, Model, show


def plan(
    context: Annotated[int, typer.Option("--context", "-c", min=1, help="Tokens the model must hold.")],
    memory: Annotated[str, typer.Option(help='Memory for the key-value cache, such as "2GiB".')],
    floor: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of the dense run's accuracy.")] = 0.9,
    rows: Annotated[int, typer.Option(min=1, help="Sequences held at once.")] = 1,
    results: Annotated[Path | None, typer.Option(help="Folder of a sweep, whose results are interpolated, or of a "
                                                 "`compare --out` run; what was measured for longspan if left out.")] = None,
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
