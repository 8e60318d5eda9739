"""Every score x {uniform, adakv, lu-kv} x four budgets on needles, variable tracking and perplexity, at three lengths.

    python benchmarks/cache_sweep.py --out docs/data/cache_sweep.json

Each example is read once for all recipes (`longspan.evaluation.once`). Rows are kept in runs/cache_sweep; a stopped sweep
goes on where it was. Profiles that lu-kv needs are made first, for all scores together. `--summarise` only sums up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan.evaluation import Request, parse_task, summarise
from longspan.evaluation.once import measure_once
from longspan.evaluation.profiling import make_profiles
from longspan.evaluation.ranking import standing
from longspan.evaluation.runner import Journal, describe, row_key
from longspan.experiments.base import machine
from longspan.models import Loaded, load
from longspan.recipe import Recipe
from longspan.registry import Refused, cards

BUDGETS = (0.05, 0.1, 0.2, 0.5)
ALLOCATORS = ("uniform", "adakv", "lu-kv")
TASKS = ("ruler-niah-multikey-1", "ruler-vt", "perplexity(stride=128)")
EXAMPLES = {1024: 8, 2048: 6, 4096: 2}


def scores() -> list[str]:
    """All scores that choose by what they are shown, and two settings of one that are methods of their own."""
    return [c.name for c in cards(kind="score") if c.name != "full"] + ["obcache(variant=VK)"]


def recipes() -> list[Recipe]:
    made = [Recipe.parse(f"{s} @ {a}(budget={b})") for s in scores() for a in ALLOCATORS for b in BUDGETS]
    return [Recipe.parse("full"), *made]


def sweep(loaded: Loaded, run: Path, lengths: list[int], tasks: list[str]) -> None:
    journal = Journal(run)
    chosen = recipes()
    for length in lengths:
        for text in tasks:
            task = parse_task(text)
            request = Request(chosen, [task], [length], EXAMPLES[length], read_once=True)
            for example in task.examples(length, EXAMPLES[length], 0, loaded.tokenizer):
                base = {str(r): describe(loaded, r, task, length, request, example) for r in chosen}
                missing = [r for r in chosen if row_key(base[str(r)]) not in journal.rows]
                start = time.perf_counter()
                if missing:
                    for recipe, row in measure_once(loaded, missing, example):
                        own = base[str(recipe)]
                        found = {"refused": str(row)} if isinstance(row, Refused) else row
                        journal.add(row_key(own), own | found)
                print(f"{length} {text} {example.meta['index']}: {len(missing)} recipes, {time.perf_counter() - start:.0f} s",
                      flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the docs show: a line per task, length and recipe; the winners; what was refused, with its reason."""
    measured = [r for r in rows if "refused" not in r]
    names = ("recipe", "task", "length", "n", "accuracy", "ci95", "answer_nll", "cache_bytes", "full_cache_bytes", "vs_full")
    refused = sorted({(r["recipe"], r["length"], r["refused"]) for r in rows if "refused" in r})
    lines = [{n: line[n] for n in names if n in line} for line in summarise(measured)]
    return {"rows": lines, "winners": winners(measured), "refused": refused}


def winners(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per task and budget, over all lengths: the recipe with the least mean answer NLL, and those that can't be told from it.

    All pairs of recipes are compared on the same examples, with one correction over all pairs (`longspan.evaluation.ranking`).
    Only examples that every recipe has a row for count.
    """
    found = []
    for task in dict.fromkeys(r["task"] for r in rows):
        own = [r for r in rows if r["task"] == task]
        for budget in BUDGETS:
            table = by_recipe([r for r in own if r["recipe"].endswith(f"(budget={budget})")])
            mean = {recipe: float(np.mean(values)) for recipe, values in table.items()}
            first = min(mean, key=lambda recipe: mean[recipe])
            stands = dict(zip(table, standing(-np.array(list(table.values())).T)))
            close = sorted((r for r in table if r != first and stands[r] != "worse"), key=lambda r: mean[r])
            full = by_recipe([r for r in own if r["recipe"] == "full"])["full"]
            found.append({"task": task, "budget": budget, "n": len(table[first]), "winner": first, "answer_nll": mean[first],
                          "full_nll": float(np.mean(full)), "recipes": len(table), "not_told_apart": close})
    return found


def by_recipe(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Answer NLLs by recipe, aligned by example."""
    values = {(r["recipe"], r["length"], r["index"]): r["answer_nll"] for r in rows}
    recipes = list(dict.fromkeys(r["recipe"] for r in rows))
    examples = sorted({(r["length"], r["index"]) for r in rows})
    shared = [e for e in examples if all((recipe, *e) in values for recipe in recipes)]
    return {recipe: [values[recipe, *e] for e in shared] for recipe in recipes}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--run", type=Path, default=Path("runs/cache_sweep"), help="folder for the rows")
    ask.add_argument("--lengths", type=int, nargs="+", default=list(EXAMPLES))
    ask.add_argument("--tasks", nargs="+", default=list(TASKS))
    ask.add_argument("--summarise", action="store_true", help="measure nothing")
    given = ask.parse_args()
    loaded = load()
    if not given.summarise:
        made = make_profiles(loaded, [f"{s} @ lu-kv" for s in scores()],
                             lambda done, total, what: print(done, total, what, flush=True))
        print(f"profiles: {sum(not m.reused for m in made)} made in {made[0].seconds:.0f} s", flush=True)
        with torch.inference_mode():
            sweep(loaded, given.run, given.lengths, given.tasks)
    rows = list(Journal(given.run).rows.values())
    stored = {"model": loaded.name, "fingerprint": loaded.fingerprint, "machine": machine(), **summary(rows)}
    given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
