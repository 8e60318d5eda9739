"""The generated RULER tasks on the bundled model: do the prompts, scores and cuts behave as they must?

Four things are shown. A small model finds a single needle in noise, and is far worse where everything around the
needle looks like it. Tracing and counting are harder than finding. A cache cut to the first four tokens and the
last quarter before the question is read loses the needles it cut and keeps the others, which an evaluation that
forgets to compress, or compresses after the question, would not show. And perplexity falls when windows overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from longspan.evaluation import Request, parse_task, run
from longspan.evaluation.statistics import mean_interval
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import load
from longspan.recipe import Recipe

TASKS = ("ruler-niah-single-1", "ruler-niah-single-2", "ruler-niah-single-3", "ruler-niah-multikey-1",
         "ruler-niah-multikey-2", "ruler-niah-multikey-3", "ruler-niah-multivalue", "ruler-niah-multiquery", "ruler-vt",
         "ruler-cwe", "ruler-fwe")
KEPT = 0.25
CUT = f"streaming-llm(n_sink=4, budget={KEPT})"
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"tasks": TASKS[:1], "lengths": [512], "examples": 1, "cap": 12, "perplexity": 128},
    "small": {"tasks": TASKS, "lengths": [1024, 2048], "examples": 10, "cap": 40, "perplexity": 1024},
    "paper": {"tasks": TASKS, "lengths": [4096, 8192, 16384, 32768], "examples": 500, "cap": None, "perplexity": 4096},
}


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Run the suite, the cut, and the two perplexities."""
    size, loaded = SIZES[scale], load()

    def rows_of(recipes: list[str], tasks: list[str], lengths: list[int], examples: int) -> list[dict[str, Any]]:
        asked = Request([Recipe.parse(r) for r in recipes], [parse_task(t) for t in tasks], lengths, examples,
                        seed=42, max_new_tokens=size["cap"])
        return run(loaded, asked, lambda done, total, what: progress(f"{done}/{total} {what}"))

    rows = rows_of(["full"], list(size["tasks"]), size["lengths"], size["examples"])
    table = [score_line(rows, task, length) for task in dict.fromkeys(r["task"] for r in rows) for length in size["lengths"]]
    first = {line["task"]: line["score"] for line in table if line["length"] == size["lengths"][0]}
    cut = rows_of([CUT], ["ruler-niah-single-1"], size["lengths"][:1], 2 * size["examples"])
    lost, held = by_place(cut)
    word = {name: word_perplexity(rows_of(["full"], [f"perplexity(stride={stride})"], [size["perplexity"]], size["examples"]))
            for name, stride in (("overlapping", size["perplexity"] // 2), ("disjoint", size["perplexity"] - 32))}
    again = rows_of(["full"], ["ruler-niah-single-1"], size["lengths"][:1], 1)
    checks = {
        "single needles in noise are found": first["ruler-niah-single-1"] >= 0.8,
        "needles cut from the cache are lost": bool(not len(lost) or lost.mean() <= 0.1),
        "needles still in the cache are found": bool(not len(held) or held.mean() >= 0.8),
        "overlapping windows lower word perplexity": word["overlapping"] < word["disjoint"],
        "the same prompts and predictions twice": again[0]["prediction"] == rows[0]["prediction"],
    }
    if "ruler-niah-multikey-3" in first:
        checks["look-alike needles are much harder"] = first["ruler-niah-single-1"] - first["ruler-niah-multikey-3"] >= 0.4
        checks["tracing and counting are harder"] = max(first["ruler-vt"], first["ruler-cwe"]) < first["ruler-niah-single-1"]
    measured = {"score at the shortest length": {k.removeprefix("ruler-"): round(v, 2) for k, v in first.items()},
                "needles cut away": found(lost), "needles kept": found(held),
                "word perplexity": {k: round(v, 1) for k, v in word.items()}}
    expected = {"single-1": "at least 0.8", "single-1 minus multikey-3": "at least 0.4", "needles cut away": "at most 0.1",
                "needles kept": "at least 0.8"}
    verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [42], table)


def score_line(rows: list[dict[str, Any]], task: str, length: int) -> dict[str, Any]:
    scores = [r["score"] for r in rows if (r["task"], r["length"]) == (task, length)]
    mean, low, high = mean_interval(scores)
    return {"task": task, "length": length, "n": len(scores), "score": mean, "ci95": [low, high]}


def by_place(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Scores of needles before the kept part, and of needles safely inside it."""
    margin = 0.05
    lost = [r["score"] for r in rows if r["depth"] is not None and r["depth"] < 1 - KEPT - margin]
    held = [r["score"] for r in rows if r["depth"] is not None and r["depth"] > 1 - KEPT + margin]
    return np.array(lost, dtype=float), np.array(held, dtype=float)


def found(scores: np.ndarray) -> str:
    return f"{int(scores.sum())} of {len(scores)} found"


def word_perplexity(rows: list[dict[str, Any]]) -> float:
    """exp of nats per word over all targets; independent of the tokenizer."""
    nats = sum(r["answer_nll"] * r["answer_tokens"] for r in rows)
    return float(np.exp(nats / sum(json.loads(r["meta"])["words"] for r in rows)))


EXPERIMENT = Experiment(
    id="standard-suites", system="standard-suites", run=measure,
    claim="Generated RULER tasks separate easy from hard at small scale, and cutting the cache loses what was cut and only that.",
)
