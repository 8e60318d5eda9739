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

import torch

from longspan.evaluation import Request, parse_task, summarise
from longspan.evaluation.once import measure_once
from longspan.evaluation.profiling import make_profiles
from longspan.evaluation.runner import Journal, describe, row_key
from longspan.experiments.base import machine
from longspan.models import Loaded, load
from longspan.recipe import Recipe
from longspan.registry import Refused, cards

RUN = Path("runs/cache_sweep")
BUDGETS = (0.05, 0.1, 0.2, 0.5)
ALLOCATORS = ("uniform", "adakv", "lu-kv")
TASKS = ("ruler-niah-multikey-1", "ruler-vt", "perplexity(stride=128)")
EXAMPLES = {1024: 8, 2048: 6, 4096: 4}


def scores() -> list[str]:
    """All scores that choose by what they are shown, and two settings of one that are methods of their own."""
    return [c.name for c in cards(kind="score") if c.name != "full"] + ["obcache(variant=VK)"]


def recipes() -> list[Recipe]:
    made = [Recipe.parse(f"{s} @ {a}(budget={b})") for s in scores() for a in ALLOCATORS for b in BUDGETS]
    return [Recipe.parse("full"), *made]


def sweep(loaded: Loaded, lengths: list[int], tasks: list[str]) -> None:
    journal = Journal(RUN)
    chosen = recipes()
    for length in lengths:
        for text in tasks:
            task = parse_task(text)
            request = Request(chosen, [task], [length], EXAMPLES[length])
            for example in task.examples(length, EXAMPLES[length], 0, loaded.tokenizer):
                base = {str(r): describe(loaded, r, task, length, request, example) | {"score_name": "verbatim"} for r in chosen}
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
    """What the docs show: a line per task, length and recipe, and what was refused with its reason."""
    lines = summarise([r for r in rows if "refused" not in r])
    names = ("recipe", "task", "length", "n", "accuracy", "ci95", "answer_nll", "answer_nll_ci95", "cache_bytes",
             "full_cache_bytes", "nll_difference", "vs_full", "nll_vs_full")
    refused = sorted({(r["recipe"], r["length"], r["refused"]) for r in rows if "refused" in r})
    return {"rows": [{n: line[n] for n in names if n in line} for line in lines], "refused": refused}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--lengths", type=int, nargs="+", default=list(EXAMPLES))
    ask.add_argument("--tasks", nargs="+", default=list(TASKS))
    ask.add_argument("--summarise", action="store_true", help="measure nothing")
    given = ask.parse_args()
    loaded = load()
    if not given.summarise:
        made = make_profiles(loaded, [f"{s} @ lu-kv" for s in scores()], lambda done, total, what: print(done, total, what, flush=True))
        print(f"profiles: {sum(not m.reused for m in made)} made in {made[0].seconds:.0f} s", flush=True)
        with torch.inference_mode():
            sweep(loaded, given.lengths, given.tasks)
    rows = list(Journal(RUN).rows.values())
    stored = {"model": loaded.name, "fingerprint": loaded.fingerprint, "machine": machine(), **summary(rows)}
    given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
