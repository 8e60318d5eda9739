"""Memory held and decoding speed of the bundled model after a long prompt, dense against ragged, in one run.

    python benchmarks/decode_memory.py --out docs/data/decode_memory.json

Every recipe reads the same prompt; then the recipes take turns, a few tokens each, so that a machine that slows down
slows all of them. "stock" is transformers' own cache and attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from longspan.context import Context
from longspan.decoding import read
from longspan.evaluation.texts import load_text
from longspan.experiments.base import machine
from longspan.models import load
from longspan.recipe import Recipe

RECIPES = ("full", "snapkv(budget=0.2)", "snapkv @ adakv(budget=0.2)", "snapkv(budget=0.2, store=ragged)")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path)
    ask.add_argument("--length", type=int, default=4096)
    ask.add_argument("--rounds", type=int, default=6)
    ask.add_argument("--tokens", type=int, default=16)
    given = ask.parse_args()
    loaded = load()
    ids = loaded.tokenizer(load_text().text)["input_ids"][: given.length]
    contexts = {text: Context.from_ids(loaded, ids, text) for text in RECIPES}
    times: dict[str, list[float]] = {text: [] for text in (*RECIPES, "stock")}
    stock = stock_cache(loaded.model, ids)
    for _ in range(given.rounds):
        for text, context in contexts.items():
            times[text].append(ours(loaded.model, Recipe.parse(text), context, given.tokens))
        times["stock"].append(steps(loaded.model, stock, given.tokens))
        stock.crop(-given.tokens)
    rows = [{"recipe": text, "cache_mb": held(contexts.get(text), stock) / 1e6,
             "share_of_full": held(contexts.get(text), stock) / contexts["full"].achieved.full_bytes,
             "tokens_per_s": given.tokens / statistics.median(seconds)} for text, seconds in times.items()]
    speed = {row["recipe"]: row["tokens_per_s"] for row in rows}
    found = {"length": given.length, "machine": machine(), "rows": rows,
             "ragged_over_dense": speed["snapkv @ adakv(budget=0.2)"] / speed["snapkv(budget=0.2)"]}
    for row in rows:
        print(f"{row['recipe']:36} {row['cache_mb']:7.1f} MB {row['share_of_full']:7.1%} {row['tokens_per_s']:7.1f} tokens/s")
    print(f"ragged over dense of the same size: {found['ragged_over_dense']:.2f} (bar: at least 0.85)")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def ours(model: Any, recipe: Recipe, context: Context, tokens: int) -> float:
    """Seconds for some decode steps; the context is afterwards as it was."""
    with context._on():
        point = context.cache.snapshot()
        seconds = steps(model, context.cache, tokens)
        context.cache.restore(point)
    return seconds


def steps(model: Any, cache: Any, tokens: int) -> float:
    token = torch.tensor([[100]])
    start = time.perf_counter()
    for _ in range(tokens):
        read(model, token, cache)
    return time.perf_counter() - start


def stock_cache(model: Any, ids: list[int]) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def held(context: Context | None, stock: Any) -> int:
    """Bytes right after the prompt."""
    if context is not None:
        return context.achieved.cache_bytes
    return sum(t.untyped_storage().nbytes() for layer in stock.layers for t in (layer.keys, layer.values))


if __name__ == "__main__":
    main()
