"""A whole sweep in one HTML file: several models, recipes, tasks, lengths and seeds, each to be chosen in the browser.

The page is that of `compare` with more to choose from. Recipes are only compared within one model, so every board, picture
and headline belongs to one. All statistics are made here, for every choice of model, task, length and seed, by what
`compare` uses; the browser only looks them up. What isn't there (cells refused, failed or missing) stands in a section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.registry import Refused
from longspan.reporting import findings
from longspan.reporting.needles import needle_maps
from longspan.reporting.page import count, joined, plots, script_json, template
from longspan.reporting.palette import DENSE, looks
from longspan.reporting.points import labelled
from longspan.reporting.tables import cells as texts

if TYPE_CHECKING:
    from longspan.evaluation.sweeps import Cell

Row = dict[str, Any]

FINISHED, REFUSED, FAILED, MISSING = "finished", "refused", "failed", "missing"
LONGEST = 240
"""Characters of a prediction that the page of a sweep shows."""


@dataclass(frozen=True)
class CellState:
    """A cell of a sweep as the page shows it."""

    state: str
    """finished, refused (as declared, with a reason), failed (with a reason) or missing."""
    model: str
    recipe: str
    task: str
    length: int
    seed: int
    runs: int = 0
    reason: str = ""


def write_sweep(path: str | Path, rows: Iterable[Row], cells: Iterable[CellState] | None = None,
                meta: dict[str, Any] | None = None) -> Path:
    """Write the page and return its path.

    Args:
        path: of the file; folders are made.
        rows: result rows of all models, one per example, models named apart (`named_apart`).
        cells: every cell of the grid (`cells_of`); found from the rows where not given.
        meta: what else was run, shown as given.

    Raises:
        Refused: no rows.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(sweep_html(rows, cells, meta), encoding="utf-8")
    return file


def sweep_html(rows: Iterable[Row], cells: Iterable[CellState] | None = None, meta: dict[str, Any] | None = None) -> str:
    """The page as text; arguments as in `write_sweep`."""
    known = labelled(rows)
    if not known:
        raise Refused("write_sweep: expected at least one result row, got none.")
    grid = finished(known) if cells is None else list(cells)
    data = sweep_data(known, grid)
    shown = [i for i in range(len(data["models"])) if f"{i}|||" in data["views"]]
    models = [{"at": i, "name": data["models"][i], "plots": plots(data["views"][f"{i}|||"], data["lengths"]),
               "headline": findings.headline(findings.overall(_of(known, data["models"][i])))} for i in shown]
    given = {"title": _title(data["models"]), **(meta or {})}
    return template("sweep.html").render(
        title=given["title"], facts=_facts(known, data), run=findings.provenance(known, given), models=models,
        several=len(data["models"]) > 1, recipes=data["recipes"], options=_options(data), lines=_lines(known, data["models"]),
        has_kept=False, has_needles=any(maps["score"] for maps in data["needles"].values()), has_examples=bool(data["examples"]),
        data=script_json(data),
    )  # fmt: skip


def sweep_data(rows: list[Row], grid: list[CellState]) -> dict[str, Any]:
    """Everything the page is drawn from; models and recipes are named by their place in a list."""
    from longspan.evaluation import statistics  # here, because its room loads the models' libraries

    models = list(dict.fromkeys([*(cell.model for cell in grid), *(row["model"] for row in rows)]))
    names = list(dict.fromkeys([*(cell.recipe for cell in grid), *(row["recipe"] for row in rows)]))
    tasks = list(dict.fromkeys([*(cell.task for cell in grid), *(row["task"] for row in rows)]))
    lengths, seeds = (sorted({getattr(cell, axis) for cell in grid} | {row[axis] for row in rows}) for axis in ("length", "seed"))
    views: dict[str, Any] = {}
    needles: dict[str, Any] = {}
    examples: list[dict[str, Any]] = []
    for m, model in enumerate(models):
        own = _of(rows, model)
        if not own:
            continue
        for seed in ["", *(seeds if len(seeds) > 1 else [])]:
            some = [row for row in own if seed in ("", row["seed"])]
            found = findings.views(some, statistics.summarise(some), tasks, lengths, names)
            views |= {f"{m}|{at}|{seed}": points for at, points in found.items() if points}
            needles[f"{m}|{seed}"] = {metric: [one._asdict() for one in needle_maps(some, metric)]
                                      for metric in ("score", "answer_nll")}
        examples += [example | {"model": m} for example in findings.examples(own, names, LONGEST)]
    at = {name: i for i, name in enumerate(models)}, {name: i for i, name in enumerate(names)}
    look = looks(names)
    return findings.rounded({
        "sweep": True, "axes": ["model", "task", "length", "seed"], "models": models,
        "recipes": [{"name": n, "dense": n == DENSE, **look[n]._asdict()} for n in names],
        "tasks": tasks, "lengths": lengths, "seeds": seeds, "views": views, "needles": needles, "examples": examples,
        "cells": [[c.state, at[0][c.model], at[1][c.recipe], *astuple(c)[3:]] for c in grid],
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------------ models and cells


def named_apart(rows: Iterable[Row]) -> list[Row]:
    """The rows with models named apart where two have the same short name, such as folders of one name in two places."""
    rows = list(rows)
    kinds: dict[str, dict[str, None]] = {}
    for row in rows:
        kinds.setdefault(row["model"], {})[str(row.get("fingerprint") or "")] = None
    several = {model for model, found in kinds.items() if len(found) > 1}
    return [row | {"model": f"{row['model']} ({row['fingerprint'][:8]})"} if row["model"] in several else row for row in rows]


def cells_of(path: Path) -> tuple[list[Row], list[CellState]]:
    """All rows of the sweep in the folder `path`, models named apart, and the state of each of its cells."""
    from longspan.evaluation.sweeps import Folder

    folder, grid = Folder.open(path)
    cells = list(grid.cells())
    own = [folder.rows(cell) if folder.has(cell) else [] for cell in cells]
    rows = named_apart(row for found in own for row in found)
    left, models = iter(rows), dict[str | None, str]()
    for cell, found in zip(cells, own):
        mine = [next(left) for _ in found]
        if mine:
            models.setdefault(cell.model, mine[0]["model"])
    states = []
    for cell, found in zip(cells, own):
        refused = folder.refusal(cell) if folder.has(cell) else None
        failed = None if folder.has(cell) else folder.failure(cell)
        state = REFUSED if refused else FINISHED if folder.has(cell) else FAILED if failed else MISSING
        recipe, task = _named(cell)
        states.append(CellState(state, models.get(cell.model) or _short(cell.model), recipe, task, cell.length, cell.seed,
                                len(found), refused or failed or ""))
    return rows, states


def finished(rows: Iterable[Row]) -> list[CellState]:
    """The cells that rows are of."""
    runs = Counter((row["model"], row["recipe"], row["task"], row["length"], row["seed"]) for row in rows)
    return [CellState(FINISHED, *key, runs=n) for key, n in runs.items()]


def _named(cell: Cell) -> tuple[str, str]:
    """Recipe and task as rows name them."""
    from longspan.evaluation import parse_task
    from longspan.recipe import Recipe

    recipe = Recipe.parse(cell.recipe)
    return recipe.name or str(recipe), str(parse_task(cell.task))


def _short(model: str | None) -> str:
    return "bundled model" if model is None else Path(model).name or model


def _of(rows: list[Row], model: str) -> list[Row]:
    return [row for row in rows if row["model"] == model]


# ----------------------------------------------------------------------------------------------------------------- texts


def _title(models: list[str]) -> str:
    return f"Long context on {models[0]}, swept" if len(models) == 1 else f"Long context on {joined(models)}, swept"


def _options(data: dict[str, Any]) -> dict[str, list[tuple[Any, str]]]:
    """What can be chosen on each axis: (value, text)."""
    return {
        "model": list(enumerate(data["models"])), "recipe": [(i, recipe["name"]) for i, recipe in enumerate(data["recipes"])],
        "task": [(task, task) for task in data["tasks"]], "length": [(n, f"{n:,}") for n in data["lengths"]],
        "seed": [(seed, str(seed)) for seed in data["seeds"]],
    }


def _facts(rows: list[Row], data: dict[str, Any]) -> list[str]:
    when = list(dict.fromkeys(row["compress"].replace("-", " the ") for row in rows if row.get("compress")))
    lengths = [f"{n:,}" for n in data["lengths"]]
    gone = sum(cell[0] != FINISHED for cell in data["cells"])
    return [count(len(data["models"]), "model"), count(len(data["recipes"]), "recipe"), count(len(data["tasks"]), "task"),
            f"{joined(lengths)} tokens", count(len(data["seeds"]), "seed"), count(len(rows), "run"),
            *([f"compressed {joined(when)}"] if when else []), *([f"{count(gone, 'cell')} not there"] if gone else [])]


def _lines(rows: list[Row], models: list[str]) -> list[list[str]]:
    """The table of a reader without JavaScript: all seeds together."""
    from longspan.evaluation import statistics

    return [[model, *texts(line)] for model in models if (own := _of(rows, model)) for line in statistics.summarise(own)]
