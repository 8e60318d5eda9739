"""Does sharing places by profiled marginal loss lose less of what answers need than equal or AdaKV's shares?

Texts with hidden magic numbers are read and compressed before the question; the answers' digits, teacher forced, say
which tokens of each head were needed (the oracle). LU-KV's table is made on some texts and judged on others, for two
scores, at equal totals. All three budgets keep the first four and the newest tokens, so that only the sharing differs;
the library's own uniform and AdaKV budgets, without that, stand in the table too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.cache import Budget, CachePolicy, LayerContext, Score, newest, oldest, protect
from longspan.context import Context
from longspan.evaluation.calibration import Reading, calibration
from longspan.evaluation.measure import kept_tokens
from longspan.evaluation.profiling import gather
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import Loaded, load, profiles
from longspan.models.profiles import Evidence, Profile
from longspan.recipe import Recipe
from longspan.registry import Card

SCORES = {"snapkv": 'snapkv(window=32, kernel=7, pool="max")', "keydiff": "keydiff"}
ALLOCATORS = ("uniform", "adakv", "lu-kv")
SINKS, NEWEST = 4, 1
LEAST = {"snapkv": 0.92, "keydiff": 0.8}
"""LU-KV's loss at 80 % evicted, as a share of uniform's, must be at most this."""
PUBLISHED = {"snapkv 80 %": {"loss": [0.670, 0.668, 0.583], "nll": [2.39, 2.34, 1.78]},
             "snapkv 50 %": {"loss": [0.403, 0.394, 0.264], "nll": [2.00, 2.00, 1.69]},
             "keydiff 80 %": {"loss": [0.522, 0.472, 0.362], "nll": [1.06, 0.41, 0.28]},
             "keydiff 50 %": {"loss": [0.262, 0.258, 0.143]}}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"scores": ["keydiff"], "contexts": 1, "questions": 1, "length": 160, "evicted": [0.8], "seed": 0},
    "small": {"scores": ["snapkv", "keydiff"], "contexts": 4, "questions": 2, "length": 480, "evicted": [0.5, 0.8], "seed": 0},
    "paper": {"scores": ["snapkv", "keydiff"], "contexts": 100, "questions": 3, "length": 7000, "evicted": [0.5, 0.8], "seed": 0},
}


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Profile on the first half of the texts, judge on the second."""
    size, loaded = SIZES[scale], load()
    readings = calibration(loaded.tokenizer, contexts=2 * size["contexts"], questions=size["questions"], length=size["length"],
                           known=True, seed=size["seed"])
    learn, judge_on = readings[: size["contexts"]], readings[size["contexts"] :]
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in size["scores"]:
            progress(f"profiling {name}")
            place = Path(folder) / f"{name}.safetensors"
            profile = make(loaded, SCORES[name], place, learn, size["seed"])
            oracle = list(gather(loaded, Recipe.parse(f"{SCORES[name]} @ uniform"), judge_on))
            for evicted in size["evicted"]:
                for recipe in recipes(SCORES[name], round(1 - evicted, 6), place):
                    progress(f"{name}, {evicted:.0%} evicted, {recipe.name}")
                    loss, nll, kept = judge(loaded, recipe, judge_on, oracle)
                    table.append({"score": name, "evicted": evicted, "budget": recipe.name, "loss": loss, "answer_nll": nll,
                                  "kept": kept})
            ratios = profile.tensors["ratios"][79]
            table.append({"score": name, "evicted": 0.8, "budget": "lu-kv heads", "least_evicted": float(ratios.min()),
                          "most_evicted": float(ratios.max())})
    return outcome(table, size)


def outcome(table: list[dict[str, Any]], size: dict[str, Any]) -> Outcome:
    """Checks on the table, and the verdict they give."""
    checks: dict[str, bool] = {}
    for name in size["scores"]:
        loss, nll = ([figure(table, name, 0.8, budget, what) for budget in ALLOCATORS] for what in ("loss", "answer_nll"))
        checks[f"{name}: loss at most {LEAST[name]} of uniform's"] = loss[2] <= LEAST[name] * loss[0]
        checks[f"{name}: loss below AdaKV's"] = loss[2] < loss[1]
        checks[f"{name}: answers likelier than under uniform"] = nll[2] < nll[0]
    measured = {f"{name} {evicted:.0%}".replace("%", " %"): {
        "loss": [round(figure(table, name, evicted, budget, "loss"), 3) for budget in ALLOCATORS],
        "nll": [round(figure(table, name, evicted, budget, "answer_nll"), 2) for budget in ALLOCATORS],
    } for name in size["scores"] for evicted in size["evicted"]}
    expected = {"order": list(ALLOCATORS), **{name: PUBLISHED[name] for name in measured}}
    verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [size["seed"]], table)


def figure(table: list[dict[str, Any]], score: str, evicted: float, budget: str, what: str) -> float:
    return next(row[what] for row in table if (row["score"], row["evicted"], row["budget"]) == (score, evicted, budget))


# ------------------------------------------------------------------------------------------------------- the parts


def make(loaded: Loaded, score: str, place: Path, readings: Sequence[Reading], seed: int) -> Profile:
    """LU-KV's profile of a score, in a file of its own."""
    recipe = Recipe.parse(f"{score} @ lu-kv(n_sink={SINKS}, window={NEWEST})")
    assert recipe.cache is not None
    budget: Any = recipe.scored.budget
    key = profiles.key_of(loaded.model, budget, str(recipe.scored.score))
    profile = Profile(key, budget.fit(gather(loaded, recipe, readings, seed=seed)))
    profiles.save(profile, place)
    return profile


def recipes(score: str, kept: float, place: Path) -> list[Recipe]:
    """The three budgets with the same tokens sure of staying, and the library's own two."""
    found = [Recipe.parse(f"{score} @ {name}(budget={kept})") for name in ("uniform", "adakv")]
    plain = [replaced(recipe, f"{name}, nothing guarded") for recipe, name in zip(found, ALLOCATORS)]
    guarded = [replaced(recipe, name, Guarded(recipe.scored.score)) for recipe, name in zip(found, ALLOCATORS) if recipe.cache]
    shared = Recipe.parse(f'{score} @ lu-kv(n_sink={SINKS}, window={NEWEST}, budget={kept}, profile="{place}")')
    return [*guarded, replaced(shared, "lu-kv"), *plain]


def replaced(recipe: Recipe, name: str, score: Score | None = None) -> Recipe:
    """The same recipe under another name, or with another score."""
    assert recipe.cache is not None
    budget: Budget = recipe.scored.budget
    return Recipe(cache=CachePolicy(score or recipe.scored.score, budget), name=name)


@dataclass(frozen=True)
class Guarded(Score):
    """A score with the first tokens and the newest ones lifted, as LU-KV does."""

    base: Score
    card = Card("guarded", "score", "lu-kv", "experiments", "", "Another score; first and newest stay.", __name__, "Guarded")

    def __str__(self) -> str:
        return f"guarded(base={self.base})"

    def window_rows(self) -> int:
        return self.base.window_rows()

    def protected(self, x: LayerContext) -> int:
        return SINKS + max(NEWEST, self.base.protected(x))

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return protect(self.base.score(x), oldest(x, SINKS) | newest(x, max(NEWEST, self.base.protected(x))))


def judge(loaded: Loaded, recipe: Recipe, readings: Sequence[Reading], oracle: Sequence[Evidence]) -> tuple[float, float, float]:
    """Share of the oracle's utility that is evicted, nats a token of the answers, share kept; means over the questions."""
    shown, losses, nlls, kept = iter(oracle), [], [], []
    for reading in readings:
        context = Context.from_ids(loaded, reading.ids, recipe)
        stays = kept_tokens(context)
        kept.append(stays.mean())
        for question in reading.questions:
            losses.append(lost(next(shown), stays))
            nlls.append(np.mean(context.nlls(question.ids, question.answer)))
    return float(np.mean(losses)), float(np.mean(nlls)), float(np.mean(kept))


def lost(shown: Evidence, stays: Bool[np.ndarray, "L H N"]) -> float:
    """Share of all utility that lies in evicted entries."""
    utility = shown.utility.double().numpy()
    return float((utility * ~stays).sum() / utility.sum())


EXPERIMENT = Experiment(
    id="lu-kv", system="lu-kv", run=measure,
    claim="Head budgets by profiled marginal loss keep more of what answers need than uniform or AdaKV budgets of the same size.",
)
