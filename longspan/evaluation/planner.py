"""The planner: which recipes fit a memory limit and keep the quality, cheapest first, from measured results.

Bytes are predicted from the model's shape and the recipe's budget; a test holds the prediction against real caches.
Quality is a recipe's accuracy as a share of the dense run's, over the tasks that the dense run can do at all. A sweep's
folder has enough cells to predict it for the length asked for, with an interval (`prediction`); a recipe is recommended if
the interval's lower end keeps the floor. Of a `compare` folder, and of what comes with longspan, it is what was measured at the
nearest length, on the same examples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longspan.cache.amount import parse_amount
from longspan.evaluation.prediction import Forecast
from longspan.evaluation.runner import read_parquet
from longspan.evaluation.shape import Shape, model_shape, shape_of
from longspan.evaluation.statistics import summarise
from longspan.recipe import Recipe
from longspan.registry import Refused

__all__ = ["Choice", "Plan", "Shape", "choose", "judge", "make_plan", "model_shape", "parse_memory", "shape_of"]

MEASURED = Path(__file__).parent / "measured.json"
"""Summary rows on the bundled model; made again by `make measure`."""
SOLVABLE = 0.5
"""Least accuracy of the dense run for a task to say anything about a recipe."""

@dataclass(frozen=True)
class Choice:
    """One recipe, judged."""

    recipe: str
    bytes: int
    fits: bool
    quality: float | None
    """Accuracy as a share of the dense run's; None where nothing was measured that says so."""
    nll_increase: float | None
    """Nats per answer token above the dense run."""
    tokens_per_s: float | None
    ttft_s: float | None
    measured_at: int | None
    """Length of the measured prompts; None for a prediction, which draws on all."""
    examples: int = 0
    reason: str = ""
    """Why it isn't recommended; empty if it is."""
    interval: tuple[float, float] | None = None
    """Where the quality lies with a probability of `prediction.LEVEL`; None where it isn't predicted."""


@dataclass
class Plan:
    """What was asked, and the recipes: recommended ones first, cheapest first."""

    model: str
    context: int
    memory: int
    floor: float
    rows: int
    measured_on: str
    note: str = ""
    choices: list[Choice] = field(default_factory=list)

    @property
    def recommended(self) -> list[Choice]:
        return [c for c in self.choices if not c.reason]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "recommended": [c.recipe for c in self.recommended]}


def make_plan(model: str | None, context: int, memory: str, floor: float = 0.9, *, rows: int = 1,
              results: Path | None = None, dtype: str | None = None) -> Plan:
    """Plan for a model that is not loaded: only its shape is read.

    Raises:
        Refused: a memory limit that isn't in bytes, a context beyond the model's window, results that aren't there.
    """
    limit = parse_memory(memory)
    swept = None if results is None else sweep_rows(results, model)
    name, shape, window = model_shape(swept.model, dtype or swept.rows[0]["dtype"]) if swept else model_shape(model, dtype)
    if context > window:
        raise Refused(f"--context {context}: {name} reads at most {window} tokens; ask for at most {window}.")
    if swept is not None:
        return foresee(Plan(name, context, limit, floor, rows, name), swept.of(name), shape)
    summary, measured_on = measured_summary(results)
    note = "" if measured_on == name else (
        f"quality was measured on {measured_on}, not on {name}; run `longspan compare --out DIR` with it and pass "
        "--results DIR")
    choices = [judge(recipe, lines, shape, context, limit, floor, rows) for recipe, lines in by_recipe(summary).items()]
    choices.sort(key=lambda c: (bool(c.reason), c.bytes))
    return Plan(name, context, limit, floor, rows, measured_on, note, choices)


def choose(loaded: Any, length: int, floor: float = 0.9) -> Recipe:
    """The recipe `auto` stands for: the cheapest one that keeps `floor` of the dense accuracy at this length."""
    if getattr(loaded.model, "denoises_blocks", False):
        raise Refused(f"recipe 'auto' stands for a cache policy, and {loaded.name} denoises blocks; expected full, or a "
                      "denoising part such as flashblock.")
    summary, _ = measured_summary(None)
    shape = shape_of(loaded.model)
    judged = [judge(r, lines, shape, length, 2**62, floor, 1) for r, lines in by_recipe(summary).items()]
    good = sorted((c for c in judged if not c.reason), key=lambda c: c.bytes)
    made = Recipe.parse(good[0].recipe if good else "full")
    made.name = f"auto: {made.name}"
    return made


def judge(recipe: str, lines: list[dict[str, Any]], shape: Shape, context: int, limit: int, floor: float,
          rows: int) -> Choice:
    """Predict the bytes of one recipe and read its quality off the measured lines nearest in length."""
    size = shape.bytes(Recipe.parse(recipe), context, rows)
    lengths = sorted({line["length"] for line in lines}, key=lambda n: (abs(n - context), n))
    near = [line for line in lines if line["length"] == lengths[0]]
    quality, increase, n = quality_of(recipe, near)
    reason = ""
    if size > limit:
        reason = f"takes {size / limit:.1f} times the memory"
    elif quality is None:
        reason = "no measured task that the dense run can do"
    elif quality < floor:
        reason = f"keeps {quality:.0%} of the dense accuracy"
    return Choice(recipe, size, size <= limit, quality, increase, mean(near, "tokens_per_s"), mean(near, "ttft_s"),
                  lengths[0], n, reason)


def quality_of(recipe: str, lines: list[dict[str, Any]]) -> tuple[float | None, float | None, int]:
    """Share of the dense accuracy (at most 1), nats above the dense run, examples behind it."""
    if recipe == "full":
        return 1.0, 0.0, sum(line["n"] for line in lines)
    shares, increases, n = [], [], 0
    for line in lines:
        versus = line.get("vs_full")
        if versus is None:
            continue
        if versus.get("nll_difference") is not None:
            increases.append(versus["nll_difference"])
        if line.get("accuracy") is None or versus.get("accuracy_difference") is None:
            continue
        dense = line["accuracy"] - versus["accuracy_difference"]
        if dense >= SOLVABLE:
            shares.append(min(1.0, line["accuracy"] / dense))
            n += line["n"]
    quality = sum(shares) / len(shares) if shares else None
    return quality, sum(increases) / len(increases) if increases else None, n


# ------------------------------------------------------------------------------------------------------- from a sweep


@dataclass(frozen=True)
class Swept:
    """The rows of a sweep, and the model to plan for."""

    folder: Path
    rows: list[dict[str, Any]]
    model: str | None

    def of(self, name: str) -> list[dict[str, Any]]:
        """The rows of one model. Raises `Refused` if there are none, with the models that were measured."""
        found = [row for row in self.rows if row["model"] == name]
        if not found:
            names = ", ".join(sorted({row["model"] for row in self.rows}))
            raise Refused(f"--results {str(self.folder)!r} holds no rows of {name}; measured there: {names}.")
        return found


def sweep_rows(results: Path, model: str | None) -> Swept | None:
    """What the folder of a sweep holds; None for another folder.

    Raises:
        Refused: no rows, or those of several models and none is named.
    """
    if not (results / "grid.json").is_file():
        return None
    rows = stored_rows(results, "longspan sweep")
    names = sorted({row["model"] for row in rows})
    if model is None and len(names) > 1:
        raise Refused(f"--results {str(results)!r} holds rows of several models; pick one with --model: {', '.join(names)}.")
    asked = json.loads((results / "grid.json").read_text(encoding="utf-8")).get("models") or [None]
    return Swept(results, rows, model if model is not None or len(asked) > 1 else asked[0])


def foresee(plan: Plan, rows: list[dict[str, Any]], shape: Shape) -> Plan:
    """Fill a plan with every recipe of a sweep, its quality predicted for the plan's context."""
    forecast = Forecast.of(rows, shape)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == recipe]
        size = shape.bytes(Recipe.parse(recipe), plan.context, plan.rows)
        kept = forecast.kept(recipe, tasks, plan.context, SOLVABLE)
        reason = kept.reason
        if size > plan.memory:
            reason = f"takes {size / plan.memory:.1f} times the memory"
        elif kept.value is not None and kept.low is not None and kept.high is not None:
            reason = verdict(kept.value, kept.low, kept.high, plan.floor)
        interval = None if kept.low is None or kept.high is None else (kept.low, kept.high)
        increase = forecast.nats_above(recipe, tasks, plan.context)
        plan.choices.append(Choice(recipe, size, size <= plan.memory, kept.value, increase, mean(own, "tokens_per_s"),
                                   mean(own, "ttft_s"), None, len(own), reason, interval))
    plan.choices.sort(key=lambda c: (bool(c.reason), c.bytes))
    lengths = sorted({row["length"] for row in rows})
    if not lengths[0] <= plan.context <= lengths[-1]:
        plan.note = (f"measured at {lengths[0]:,} to {lengths[-1]:,} tokens only; beyond, intervals widen, and more than an "
                     "octave away nothing is predicted")
    return plan


def verdict(quality: float, low: float, high: float, floor: float) -> str:
    """Why a prediction isn't good enough; empty if it is."""
    if low >= floor:
        return ""
    return f"keeps {quality:.0%} of the dense accuracy" if high < floor else f"not sure: between {low:.0%} and {high:.0%} kept"


# ------------------------------------------------------------------------------------------------------------- results


def by_recipe(summary: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in summary:
        found.setdefault(line["recipe"], []).append(line)
    return found


def mean(lines: list[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def parse_memory(memory: str) -> int:
    """Bytes of a limit such as ``2GiB``."""
    try:
        amount = parse_amount(memory)
    except Refused:
        amount = None
    if amount is None or amount.unit != "bytes":
        raise Refused(f'--memory {memory!r}: expected bytes with a unit, such as "2GiB" or "512 MiB".')
    return int(amount.value)


def measured_summary(results: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Summary lines and the model they were measured on."""
    if results is None:
        stored = json.loads(MEASURED.read_text(encoding="utf-8"))
        return stored["rows"], stored["model"]
    rows = stored_rows(results, "longspan compare")
    return summarise(rows), rows[0]["model"]


def stored_rows(results: Path, verb: str) -> list[dict[str, Any]]:
    """The rows in a folder of results."""
    file = results / "rows.parquet"
    if not file.is_file():
        raise Refused(f"--results {str(results)!r}: no rows.parquet there; expected the --out folder of a finished `{verb}`.")
    rows = read_parquet(file)
    if not rows:
        raise Refused(f"--results {str(results)!r} holds no rows.")
    return rows
