"""The generated RULER tasks on the bundled model: do the prompts, scores and cuts behave as they must?

Five things are shown. A small model finds a single needle in noise, and is far worse where everything around the
needle looks like it. Tracing and counting are harder than finding. A cache cut to the first four tokens and the
last quarter before the question is read loses the needles it cut and keeps the others, which an evaluation that
forgets to compress, or compresses after the question, would not show. Prompts are the same bytes each time and leave
room for what is generated. And the perplexity of a text falls when windows overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from longspan.evaluation import Example, Request, parse_task, run
from longspan.evaluation.base import prompt_parts
from longspan.evaluation.effective_length import SHORT_LENGTHS, base_score, effective_length, nolima_effective_length
from longspan.evaluation.metrics import windowed_perplexity
from longspan.evaluation.statistics import mean_interval
from longspan.evaluation.texts import load_text
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import Loaded, load
from longspan.recipe import Recipe

TASKS = ("ruler-niah-single-1", "ruler-niah-single-2", "ruler-niah-single-3", "ruler-niah-multikey-1",
         "ruler-niah-multikey-2", "ruler-niah-multikey-3", "ruler-niah-multivalue", "ruler-niah-multiquery", "ruler-vt",
         "ruler-cwe", "ruler-fwe")
KEPT = 0.25
CUT = f"streaming-llm(n_sink=4, budget={KEPT})"
SEED = 42
SIZES: dict[str, dict[str, Any]] = {
    # `cap`: most tokens generated, where the task allows more; the longest right answer takes fewer than 64.
    "smoke": {"tasks": TASKS[:1], "lengths": [512], "examples": 1, "cap": 12, "again": 1, "nolima": [], "words": 120,
              "window": 64},
    "small": {"tasks": TASKS, "lengths": [1024, 2048], "examples": 10, "cap": 64, "again": 2, "nolima": [*SHORT_LENGTHS, 2000],
              "words": 6000, "window": 1024},
    "paper": {"tasks": TASKS, "lengths": [4096, 8192, 16384, 32768], "examples": 500, "cap": None, "again": 50,
              "nolima": [*SHORT_LENGTHS, 2000, 4000, 8000, 16000, 32000], "words": 60000, "window": 4096},
}


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Run the suite, the cut, both perplexities, and part of the suite once more."""
    size, loaded = SIZES[scale], load()
    shortest = size["lengths"][0]

    def rows_of(recipe: str, tasks: list[str], lengths: list[int], examples: int) -> list[dict[str, Any]]:
        asked = Request([Recipe.parse(recipe)], [parse_task(t) for t in tasks], lengths, examples, seed=SEED,
                        max_new_tokens=size["cap"])
        return run(loaded, asked, lambda done, total, what: progress(f"{done}/{total} {what}"))

    rows = rows_of("full", list(size["tasks"]), size["lengths"], size["examples"])
    table = [score_line(rows, task, length) for task in size["tasks"] for length in size["lengths"]]
    first = {line["task"]: line["score"] for line in table if line["length"] == shortest}
    lost, held = by_place(rows_of(CUT, ["ruler-niah-single-1"], [shortest], 2 * size["examples"]))
    again = rows_of("full", list(size["tasks"]), [shortest], size["again"])
    prompts, fit = all_prompts(loaded, size)
    nolima = rows_of("full", ["nolima"], size["nolima"], size["examples"]) if size["nolima"] else []
    nolima_lines = [score_line(nolima, "nolima", length) for length in size["nolima"]]
    word = word_perplexities(loaded, size["words"], size["window"])
    checks = {
        "single needles in noise are found": first["ruler-niah-single-1"] >= 0.8,
        "overlapping windows lower word perplexity": word["overlapping"] < word["disjoint"],
        "the same prompts twice": prompts == all_prompts(loaded, size)[0],
        "the same predictions twice": same_predictions(rows, again),
        "prompts leave room for what is generated": fit,
    }
    if len(lost) and len(held):
        checks["needles cut from the cache are lost"] = bool(lost.mean() <= 0.1)
        checks["needles still in the cache are found"] = bool(held.mean() >= 0.8)
    if "ruler-niah-multikey-3" in first:
        checks["look-alike needles are much harder"] = first["ruler-niah-single-1"] - first["ruler-niah-multikey-3"] >= 0.4
        checks["tracing and counting are harder"] = max(first["ruler-vt"], first["ruler-cwe"]) < first["ruler-niah-single-1"]
    measured = {"score at the shortest length": {k.removeprefix("ruler-"): round(v, 2) for k, v in first.items()},
                "needles cut away": found(lost), "needles kept": found(held),
                "predictions made again": len(again), "longest right answer, tokens": max(r["answer_tokens"] for r in rows),
                "word perplexity": {k: round(v, 1) for k, v in word.items()},
                "windows": {"length": size["window"], "strides": [size["window"] // 2, size["window"]],
                            "words": size["words"], "begins where the text begins": True},
                "RULER: mean and effective length": over_lengths(table, size["lengths"])}
    if nolima:
        measured["NoLiMa, own pairs"] = nolima_summary(nolima_lines)
    expected = {"single-1": "at least 0.8", "single-1 minus multikey-3": "at least 0.4", "needles cut away": "at most 0.1",
                "needles kept": "at least 0.8"}
    verdict, reason = by_checks(checks)
    if scale == "smoke":
        verdict, reason = "mechanism-only", "one short example says nothing about means."
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table + nolima_lines)


# -------------------------------------------------------------------------------------------------------------- scores


def score_line(rows: list[dict[str, Any]], task: str, length: int) -> dict[str, Any]:
    scores = [r["score"] for r in rows if (r["task"], r["length"]) == (task, length)]
    mean, low, high = mean_interval(scores, bounded=True)
    return {"task": task, "length": length, "n": len(scores), "score": mean, "ci95": [low, high]}


def by_place(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Scores of needles before the kept part, and of needles safely inside it."""
    margin = 0.05
    lost = [r["score"] for r in rows if r["depth"] is not None and r["depth"] < 1 - KEPT - margin]
    held = [r["score"] for r in rows if r["depth"] is not None and r["depth"] > 1 - KEPT + margin]
    return np.array(lost, dtype=float), np.array(held, dtype=float)


def found(scores: np.ndarray) -> str:
    return f"{int(scores.sum())} of {len(scores)} found"


def over_lengths(table: list[dict[str, Any]], lengths: list[int]) -> dict[str, Any]:
    """Mean over the tasks at each length, and the longest length at RULER's threshold."""
    means = {length: float(np.mean([line["score"] for line in table if line["length"] == length])) for length in lengths}
    return {"mean": {length: round(mean, 3) for length, mean in means.items()}, "effective length": effective_length(means)}


def nolima_summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Base score and effective length. Pairs are drawn anew at each length, so all are taken as one."""
    scores = {line["length"]: line["score"] for line in lines}
    base = base_score({"all": scores})
    return {"scores": scores, "base score": round(base, 3), "effective length": nolima_effective_length(scores, base)}


# ------------------------------------------------------------------------------------------------- prompts, twice


def all_prompts(loaded: Loaded, size: dict[str, Any]) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether each leaves the length its task's whole generation allowance."""
    prompts, fit = [], True
    for length, example in drawn(size, loaded):
        ids = prompt_parts(example, loaded.tokenizer).ids
        prompts.append(ids)
        fit = fit and len(ids) <= length - example.max_new_tokens
    return prompts, fit


def drawn(size: dict[str, Any], loaded: Loaded) -> list[tuple[int, Example]]:
    """Length and example of all of the suite, made anew, with the task's own allowance."""
    tasks = [parse_task(name) for name in size["tasks"]]
    return [(length, example) for task in tasks for length in size["lengths"]
            for example in task.examples(length, size["examples"], SEED, loaded.tokenizer)]


def same_predictions(rows: list[dict[str, Any]], again: list[dict[str, Any]]) -> bool:
    before = {(r["task"], r["length"], r["index"]): r["prediction"] for r in rows}
    return all(before[r["task"], r["length"], r["index"]] == r["prediction"] for r in again)


# ---------------------------------------------------------------------------------------------------------- perplexity


def word_perplexities(loaded: Loaded, words: int, window: int) -> dict[str, float]:
    """Word perplexity of the first words of one text, from windows that move by half their length and by all of it."""
    text = "".join(load_text("pydoc").words[:words])
    ids = torch.tensor(loaded.tokenizer.encode(text, add_special_tokens=False), device=loaded.model.device)

    def nlls(start: int, first: int, end: int) -> list[float]:
        with torch.inference_mode():
            logits = loaded.model(input_ids=ids[None, start:end]).logits[0, first - start - 1:end - start - 1]
            return torch.nn.functional.cross_entropy(logits.float(), ids[first:end], reduction="none").tolist()

    return {name: windowed_perplexity(nlls, len(ids), window, stride, words)
            for name, stride in (("overlapping", window // 2), ("disjoint", window))}


EXPERIMENT = Experiment(
    id="standard-suites", system="standard-suites", run=measure,
    claim="Generated RULER tasks separate easy from hard at small scale, and cutting the cache loses what was cut and only that.",
)
