"""Decoding a batch from a compressed cache, against the byte bound: our own dense store of everything in the same run.

    python benchmarks/decode_batch.py --out docs/data/decode_batch.json

A decode step must read the weights once and every row's cache once. If that were all, keeping a fifth of the cache would
speed it up by (weights + full cache) / (weights + kept cache): the byte bound. What else a step takes is measured beside it:
"floor" is the same step on a cache of one token, so (dense - floor) is what reading the full cache takes, and the ratio
could at most be dense / (floor + kept share of that). Rows hold copies of one document, each in memory of its own. The
stores take turns, a few steps each, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from longspan.cache import RecipeCache, fork, gatherer
from longspan.decoding import read
from longspan.evaluation.texts import load_text
from longspan.experiments.base import machine
from longspan.models import Prompt, load
from longspan.recipe import Recipe

RECIPES = {"dense": "full", "uniform": "snapkv(budget={})", "ragged": "snapkv @ adakv(budget={})"}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path)
    ask.add_argument("--length", type=int, default=8000)
    ask.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    ask.add_argument("--budget", type=float, default=0.2)
    ask.add_argument("--rounds", type=int, default=6)
    ask.add_argument("--steps", type=int, default=8)
    given = ask.parse_args()
    model, tokenizer = load()
    ids = tokenizer(load_text().text)["input_ids"][: given.length]
    recipes = {name: Recipe.parse(text.format(given.budget)) for name, text in RECIPES.items()}
    found = {"length": given.length, "budget": given.budget, "dtype": str(model.dtype).removeprefix("torch."),
             "weights_mb": weight_bytes(model) / 1e6, "machine": machine(), "batches": []}
    with Recipe(cache=gatherer([r.cache for r in recipes.values() if r.cache])).on(model) as run:
        for rows in given.rows:
            caches = batched(model, run, recipes, ids, rows)
            found["batches"].append({"rows": rows, "stores": compared(model, caches, rows, given.rounds, given.steps)})
            del caches
    for batch in found["batches"]:
        for row in batch["stores"]:
            print(f"{batch['rows']} x {row['store']:8} {row['cache_mb']:8.1f} MB {row['ms_per_step']:7.1f} ms/step  byte bound "
                  f"{row['bound']:.2f}x  reachable {row['reachable']:.2f}x  measured {row['speedup']:.2f}x "
                  f"({row['share_of_bound']:.0%} of the bound)")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """The result as Markdown, for the documentation."""
    head = (f"A step of the bundled model ({found['weights_mb']:.0f} MB of weights, {found['dtype']}) after {found['length']:,} "
            f"tokens, {found['budget']:.0%} kept. Machine: {found['machine']}.\n\n"
            "| rows | store | cache | ms a step | byte bound | reachable | measured | of the bound |\n"
            "| --: | :-- | --: | --: | --: | --: | --: | --: |\n")
    lines = [f"| {b['rows']} | {r['store']} | {r['cache_mb']:,.0f} MB | {r['ms_per_step']:.1f} | {r['bound']:.2f}× | "
             f"{r['reachable']:.2f}× | {r['speedup']:.2f}× | {r['share_of_bound']:.0%} |"
             for b in found["batches"] for r in b["stores"] if r["store"] != "floor"]
    floors = ", ".join(f"{r['ms_per_step']:.1f} ms with {b['rows']}" for b in found["batches"] for r in b["stores"]
                       if r["store"] == "floor")
    return head + "\n".join(lines) + f"\n\nOn an empty cache a step takes {floors} rows."


def weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def compared(model: Any, caches: dict[str, RecipeCache], rows: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A line for every store of one batch."""
    weights, held = weight_bytes(model), {name: cache.nbytes() for name, cache in caches.items()}
    ms = {name: 1e3 * statistics.median(seconds) for name, seconds in measure(model, caches, rows, rounds, steps).items()}
    lines = []
    for name, own in ms.items():
        bound = (weights + held["dense"]) / (weights + held[name])
        reachable = ms["dense"] / (ms["floor"] + (ms["dense"] - ms["floor"]) * held[name] / held["dense"])
        lines.append({"store": name, "cache_mb": held[name] / 1e6, "ms_per_step": own, "bound": bound, "reachable": reachable,
                      "speedup": ms["dense"] / own, "share_of_bound": ms["dense"] / own / bound})
    return lines


@torch.inference_mode()
def batched(model: Any, run: Any, recipes: dict[str, Recipe], ids: list[int], rows: int) -> dict[str, RecipeCache]:
    """A cache of `rows` copies of one document for each recipe, read once."""
    tensor = torch.tensor([ids])
    base = run.new_cache(Prompt(tensor, len(ids)))
    read(model, tensor, base)
    for layer in base.policy_layers:
        layer.batch_repeat_interleave(rows)
    made = {name: fork(base, recipe.cache) for name, recipe in recipes.items()}
    first = torch.full((rows, 1), ids[0])
    made["floor"] = run.new_cache(Prompt(first, 1))
    read(model, first, made["floor"])
    return made


def measure(model: Any, caches: dict[str, RecipeCache], rows: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of one decode step, by store, several rounds of each."""
    token, times = torch.full((rows, 1), 100), {name: [] for name in caches}
    for _ in range(rounds):
        for name, cache in caches.items():
            point = cache.snapshot()
            read(model, token, cache)
            start = time.perf_counter()
            for _ in range(steps):
                read(model, token, cache)
            times[name].append((time.perf_counter() - start) / steps)
            cache.restore(point)
    return times


if __name__ == "__main__":
    main()
