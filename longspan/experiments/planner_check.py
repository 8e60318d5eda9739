"""Does `longspan plan` know what it wasn't shown? A third of a sweep's cells is hidden and predicted from the rest.

The sweep (docs/examples/planner_grid.yaml) has 23 recipes, three tasks, three lengths and
twenty examples a cell on the bundled model. A cell, a recipe on a task at a length, is hidden whole, with both seeds. The dense
run's cells are never hidden: shares are taken of them, and they tell how long the contexts really are. The forecast gives every
hidden accuracy and answer NLL with an interval of 95%, and its shape every hidden cache's bytes. The intervals were designed on
made-up grids and on docs/data/cache_sweep.json; here they are judged, on the split of seed 0, and for reference on more splits.
Beside it stands what the planner decides by, the share of the dense accuracy, with recipes hidden at a length on all tasks. The
interval it decides by isn't one for what a few examples show of a share; one that is was added after that had been seen, here and
on made-up grids, so its coverage is no blind judgement.

Baseline: the nearest measured cell of the same family and task (of any family if it has none) with a Wilson interval. How an
octave of length counts against one of the share kept, and how far the interval reaches, are chosen as the forecast's reach is, by
predicting each measured cell from the others. Bytes are judged on a second small sweep too (docs/examples/planner_bytes.yaml),
with schedules, stores and units that the first one lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longspan.evaluation.planner import SOLVABLE
from longspan.evaluation.prediction import LEVEL, Cell, Forecast, Prediction, cells_of
from longspan.evaluation.runner import read_parquet
from longspan.evaluation.shape import Shape, model_shape
from longspan.evaluation.statistics import DENSE, mean_interval
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.recipe import Recipe
from longspan.registry import Refused

DATA = Path(__file__).parents[2] / "docs" / "data" / "planner_sweep.parquet"
SEED, HIDDEN, SPLITS, FLOOR = 0, 1 / 3, 20, 0.9
LEAST_INSIDE, MOST_BYTES = 0.9, 0.02
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Octaves of the share kept that one of length counts as, for the baseline to choose from."""
NORMAL = 1.96
REACHES, MARGINS = [0.1 * i for i in range(10, 121)], [0.01 * i for i in range(101)]
"""Standard deviations of the baseline's interval, and margins beside it, to choose from."""
BESIDE = 100.0
"""A distance that no cell of the same family has."""
Rows = list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------------------- baseline


@dataclass(frozen=True)
class Nearest:
    """The nearest measured cell's accuracy with Wilson's interval of `reach` standard deviations and a `margin` beside it."""

    cells: Sequence[Cell]
    weight: float = 1.0
    reach: float = NORMAL
    margin: float = 0.0

    @classmethod
    def tuned(cls, cells: Sequence[Cell]) -> Nearest:
        """The weight with the least error; then the reach or the margin, whichever makes the narrower intervals that cover.

        Both by predicting each cell from the others.
        """
        known = [c for c in cells if c.place.recipe != DENSE]
        truth = np.array([c.accuracy for c in known])
        others = {weight: [cls([c for c in cells if c is not own], weight).of(own) for own in known] for weight in WEIGHTS}
        weight = min(WEIGHTS, key=lambda w: float(np.abs(np.array([c.accuracy for c in others[w]]) - truth).mean()))
        ways = []
        for settings in ([(r, 0.0) for r in REACHES], [(NORMAL, m) for m in MARGINS]):
            for reach, margin in settings:
                low, high = np.array([wilson(c, reach, margin) for c in others[weight]]).T
                if ((low <= truth) & (truth <= high)).sum() >= math.ceil((len(known) + 1) * LEVEL):
                    ways.append((float((high - low).mean()), reach, margin))
                    break
        _, reach, margin = min(ways, default=(0.0, REACHES[-1], 0.0))
        return cls(cells, weight, reach, margin)

    def of(self, cell: Cell) -> Cell:
        """The nearest cell."""
        where = cell.place

        def far(c: Cell) -> float:
            length, kept = (abs(math.log2(getattr(c.place, name) / getattr(where, name))) for name in ("length", "kept"))
            return kept + self.weight * length + BESIDE * (c.place.family != where.family)

        return min((c for c in self.cells if c.place.task == where.task), key=far)

    def accuracy(self, cell: Cell) -> Prediction:
        near = self.of(cell)
        return Prediction(near.accuracy, *wilson(near, self.reach, self.margin))


def wilson(cell: Cell, z: float, margin: float = 0.0) -> tuple[float, float]:
    """Wilson's interval (1927) about a cell's accuracy, z standard deviations and a margin to either side."""
    p, n = cell.accuracy or 0.0, cell.n
    centre, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, min(p, centre - half) - margin), min(1.0, max(p, centre + half) + margin)


# ---------------------------------------------------------------------------------------------------------------- judge


def hide(cells: Sequence[Cell], seed: int) -> tuple[list[Cell], list[Cell]]:
    """Cells that are shown, and the hidden third of those that aren't the dense run's."""
    some = [c for c in cells if c.place.recipe != DENSE]
    chosen = np.random.default_rng(seed).choice(len(some), round(HIDDEN * len(some)), replace=False)
    hidden = [some[i] for i in sorted(chosen)]
    gone = {c.place for c in hidden}
    return [c for c in cells if c.place not in gone], hidden


@dataclass(frozen=True)
class Judged:
    """Hidden cells and what was said of each; None where nothing was measured."""

    cells: list[Cell]
    accuracy: list[Prediction]
    nll: list[Prediction]
    nearest: list[Prediction]
    forecast: Forecast
    baseline: Nearest

    def report(self) -> dict[str, dict[str, float]]:
        """Share inside, mean width, mean error and how many were told."""
        return {"accuracy": figures(self.accuracy, [c.accuracy for c in self.cells]),
                "nll": figures(self.nll, [c.nll for c in self.cells]),
                "nearest": figures(self.nearest, [c.accuracy for c in self.cells])}


def figures(told: Iterable[Prediction], true: Iterable[float | None]) -> dict[str, float]:
    """What a set of predictions is worth; a prediction that was declined counts as outside."""
    pairs = [(p, value) for p, value in zip(told, true) if value is not None]
    given = [(p.value, p.low or 0.0, p.high or 0.0, value) for p, value in pairs if p.value is not None]
    return {"cells": len(pairs), "declined": len(pairs) - len(given),
            "inside": sum(low <= value <= high for _, low, high, value in given) / max(1, len(pairs)),
            "width": float(np.mean([high - low for _, low, high, _ in given])),
            "error": float(np.mean([abs(middle - value) for middle, _, _, value in given]))}


def predict(cells: Sequence[Cell], shape: Shape, seed: int) -> Judged:
    """One split: hide, fit, predict."""
    shown, hidden = hide(cells, seed)
    forecast, baseline = Forecast(shown, shape), Nearest.tuned([c for c in shown if c.accuracy is not None])
    return Judged(hidden, [forecast.accuracy(c.place, c.n) for c in hidden], [forecast.nll(c.place, c.n) for c in hidden],
                  [baseline.accuracy(c) for c in hidden], forecast, baseline)


@dataclass(frozen=True)
class Share:
    """A recipe's share of the dense accuracy: what is told of it, of what so many examples show of it, and what they showed."""

    told: Prediction
    shown: Prediction
    measured: float


def shares(cells: Sequence[Cell], shape: Shape, seed: int) -> list[Share]:
    """What the planner decides by, with recipes hidden at a length on all tasks."""
    known = {(c.place.recipe, c.place.task, c.place.length): c.accuracy for c in cells if c.accuracy is not None}
    tasks = list(dict.fromkeys(task for _, task, _ in known))
    pairs = list(dict.fromkeys((recipe, length) for recipe, _, length in known if recipe != DENSE))
    chosen = np.random.default_rng(seed).choice(len(pairs), round(HIDDEN * len(pairs)), replace=False)
    gone = {pairs[i] for i in chosen}
    forecast, found = Forecast([c for c in cells if (c.place.recipe, c.place.length) not in gone], shape), []
    for recipe, length in sorted(gone):
        able = [(known[recipe, t, length], known[DENSE, t, length]) for t in tasks if known[DENSE, t, length] >= SOLVABLE]
        if able:
            measured = float(np.mean([min(1.0, ours / dense) for ours, dense in able]))
            n = round(float(np.mean([c.n for c in cells])))
            told, shown = (forecast.kept(recipe, tasks, length, SOLVABLE, examples) for examples in (None, n))
            found.append(Share(told, shown, measured))
    return found


def share_figures(found: Sequence[Share]) -> dict[str, float]:
    """How often the measured share lay inside, and what recommending by the lower end was worth."""
    whole = figures([s.shown for s in found], [s.measured for s in found])
    taken = [s.measured >= FLOOR for s in found if s.told.low is not None and s.told.low >= FLOOR]
    return {"shares": len(found), "inside": round(whole["inside"], 4), "width": round(whole["width"], 4),
            "inside the share's own interval": round(figures([s.told for s in found], [s.measured for s in found])["inside"], 4),
            "recommended": len(taken), "recommended, measured below the floor": taken.count(False),
            "not recommended, measured above the floor": sum(s.measured >= FLOOR for s in found) - taken.count(True)}


def told_bytes(rows: Rows, shape: Shape, recipe: str, task: str, length: int) -> tuple[float, float]:
    """Predicted and measured mean bytes of a cell; the contexts' real lengths are those the dense run read."""
    own = [r for r in rows if (r["task"], r["length"]) == (task, length)]
    contexts = [r["context_tokens"] for r in own if r["recipe"] == DENSE]
    told = float(np.mean([shape.bytes(Recipe.parse(recipe), n) for n in contexts]))
    return told, float(np.mean([r["cache_bytes"] for r in own if r["recipe"] == recipe]))


# ---------------------------------------------------------------------------------------------------------------- rows


def made_up(seed: int = 0, examples: int = 12) -> Rows:
    """A sweep that nobody ran: accuracies fall with what is dropped, each family and task in its own way."""
    rng = np.random.default_rng(seed)
    families = [lambda b, f=f: f.format(b) for f in ("snapkv(budget={})", "knorm(budget={})", "tova @ adakv(budget={})")]
    rows = []
    for task, dense in (("niah", 0.95), ("passkey", 0.8)):
        strength = rng.lognormal(-0.3, 0.5, len(families))
        for length in (512, 1024, 2048):
            hard = rng.uniform(size=examples)
            level = dense - 0.05 * math.log2(length / 512)
            truth = {DENSE: level} | {family(b): level * (1 - (1 - b) ** (1 / own)) for family, own in zip(families, strength)
                                      for b in (0.2, 0.4, 0.6, 0.8)}
            for recipe, p in truth.items():
                luck = np.where(rng.uniform(size=examples) < 0.7, hard, rng.uniform(size=examples))
                rows += [{"recipe": recipe, "task": task, "length": length, "seed": 0, "index": i, "score": float(u < p),
                          "answer_nll": float(2 * math.exp(-2 * p) * rng.lognormal(0, 0.5))} for i, u in enumerate(luck)]
    return rows


def load_rows() -> tuple[Rows, Rows]:
    """The judged sweep, and the one for bytes alone."""
    if not DATA.is_file():
        raise Refused(f"planner-check at small scale reads docs/data/{DATA.name} of a checkout, which isn't there; make it with "
                      "benchmarks/planner_sweep.py.")
    rows = read_parquet(DATA)
    return [r for r in rows if r["part"] == "quality"], [r for r in rows if r["part"] == "bytes"]


# -------------------------------------------------------------------------------------------------------------- outcome


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Judge one split, and more for reference."""
    if scale == "paper":
        raise Refused("planner-check at paper scale needs sweeps of several larger models; expected smoke or small.")
    smoke = scale == "smoke"
    rows, others = (made_up(), []) if smoke else load_rows()
    shape = Shape(30, 3, 64, 2) if smoke else model_shape(None, rows[0]["dtype"])[1]
    cells = cells_of(rows, shape)
    progress(f"{len(cells)} cells")
    found = predict(cells, shape, SEED)
    splits = []
    for seed in range(1, 2 if smoke else SPLITS + 1):
        progress(f"further split {seed}")
        splits.append(predict(cells, shape, seed).report())
    told = [pair for seed in range(1, 2 if smoke else SPLITS + 1) for pair in shares(cells, shape, seed)]
    hidden = [] if smoke else [(c.place.recipe, c.place.task, c.place.length) for c in found.cells]
    sizes = [(*key, *told_bytes(rows, shape, *key)) for key in hidden]
    further = dict.fromkeys((r["recipe"], r["task"], r["length"]) for r in others)
    made = outcome(found, splits, sizes, [(*key, *told_bytes(others, shape, *key)) for key in further], smoke)
    made.measured["share of the dense accuracy, further splits"] = share_figures(told)
    return made


def outcome(found: Judged, splits: list[dict[str, dict[str, float]]], sizes: list[Any], extra: list[Any], smoke: bool) -> Outcome:
    """The figures, and the statements about them."""
    report = found.report()
    inside = report["accuracy"]["inside"]
    checks = {f"at least {LEAST_INSIDE:.0%} of the hidden accuracies lie inside their intervals": inside >= LEAST_INSIDE,
              "the intervals are narrower than those about the nearest measured cell":
                  report["accuracy"]["width"] < report["nearest"]["width"]}
    errors = {name: [told / measured - 1 for *_, told, measured in part]
              for name, part in (("hidden cells", sizes), ("schedules, stores, units", extra)) if part}
    for name, part in errors.items():
        checks[f"bytes within {MOST_BYTES:.0%} in every cell: {name}"] = max(map(abs, part)) <= MOST_BYTES
    told = {name: {key: round(value, 4) for key, value in part.items()}
            | {"inside, 95% interval": interval(part["inside"], int(part["cells"]))} for name, part in report.items()}
    measured: dict[str, Any] = {
        "hidden cells": len(found.cells), "shown cells": len(found.forecast.right),
        "accuracy": told["accuracy"], "answer NLL": told["nll"], "nearest measured cell": told["nearest"],
        "reach in standard deviations": {"forecast": round(found.forecast.accuracies.widening(LEVEL), 2),
                                         "nearest": round(found.baseline.reach, 2)},
        "margin of the nearest": round(found.baseline.margin, 2),
        "further splits, mean": {name: {key: round(float(np.mean([s[name][key] for s in splits])), 4)
                                        for key in ("inside", "width", "error")} for name in report} | {"splits": len(splits)},
        "largest bytes error": {name: round(max(map(abs, part)), 5) for name, part in errors.items()},
    }
    verdict, reason = by_checks(checks)
    if smoke:
        verdict, reason = "mechanism-only", "a made-up sweep of a few cells says nothing about real ones."
    expected = {"inside": f"at least {LEAST_INSIDE}", "bytes": f"within {MOST_BYTES}", "level of the intervals": LEVEL}
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table_of(found, sizes, extra))


def interval(share: float, n: int) -> list[float]:
    """Wilson's interval of a share of n."""
    hits = round(share * n)
    return [round(v, 3) for v in mean_interval([1.0] * hits + [0.0] * (n - hits))[1:]]


def table_of(found: Judged, sizes: list[Any], extra: list[Any]) -> Rows:
    """Every hidden cell, then the cells of the small sweep for bytes."""
    held = {tuple(key): (told, measured) for *key, told, measured in sizes}
    table: Rows = []
    for cell, accuracy, nll, near in zip(found.cells, found.accuracy, found.nll, found.nearest):
        p = cell.place
        told, measured = held.get((p.recipe, p.task, p.length), (None, None))
        table.append({"part": "hidden", "recipe": p.recipe, "task": p.task, "length": p.length, "n": cell.n,
                      "accuracy": cell.accuracy, "predicted": accuracy.value, "low": accuracy.low, "high": accuracy.high,
                      "nearest low": near.low, "nearest high": near.high, "answer_nll": cell.nll, "nll predicted": nll.value,
                      "nll low": nll.low, "nll high": nll.high, "bytes": measured, "bytes predicted": told})
    names = ("recipe", "task", "length", "bytes predicted", "bytes")
    return table + [{"part": "bytes"} | dict(zip(names, line)) for line in extra]


def lines(table: Rows) -> tuple[list[str], list[list[str]]]:
    """Hidden cells by recipe."""
    head = ["recipe", "hidden cells", "inside", "mean accuracy", "mean predicted", "mean width"]
    told: dict[str, Rows] = {}
    for row in table:
        if row["part"] == "hidden" and row["predicted"] is not None:
            told.setdefault(row["recipe"], []).append(row)
    return head, [_line(recipe, own) for recipe, own in told.items()]


def _line(recipe: str, own: Rows) -> list[str]:
    inside = sum(row["low"] <= row["accuracy"] <= row["high"] for row in own)
    means = (np.mean(values) for values in ([r["accuracy"] for r in own], [r["predicted"] for r in own],
                                            [r["high"] - r["low"] for r in own]))
    return [recipe, str(len(own)), str(inside), *(f"{mean:.2f}" for mean in means)]


EXPERIMENT = Experiment(
    id="planner-check", system="planner", run=measure, lines=lines,
    claim="From two thirds of a sweep, the planner tells at least 90% of the hidden accuracies within its intervals, and every "
          "cache's bytes within 2%.",
)
