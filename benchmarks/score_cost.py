"""What scoring and compressing add to reading a prompt, for every score, as a share of the dense reading in the same run.

    python benchmarks/score_cost.py --out docs/data/score_cost.json

A score that looks at the newest queries or at the keys alone works when the prompt ends: that is timed on one common
reading. One that watches all rows works while the prompt is read, so its whole reading is timed and the dense one taken off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longspan.cache import fork, gatherer
from longspan.context import open_context
from longspan.decoding import read
from longspan.evaluation.oracles import dense_reading
from longspan.evaluation.texts import load_text
from longspan.experiments.base import machine
from longspan.models import Prompt, load
from longspan.recipe import Recipe
from longspan.registry import cards

EXTRA = ("obcache(fullhist=True)",)
LIMIT = 0.1
LATE = "newest rows or keys"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path)
    ask.add_argument("--length", type=int, default=8000)
    ask.add_argument("--watch-length", type=int, default=2000, help="tokens for what watches all rows or more than the prompt")
    ask.add_argument("--rounds", type=int, default=2)
    ask.add_argument("--late-only", action="store_true", help="leave out scores that watch all rows")
    given = ask.parse_args()
    model, tokenizer = load()
    text = torch.tensor([tokenizer(load_text().text)["input_ids"]])
    ids, fewer = text[:, : given.length], text[:, : given.watch_length]
    names = [c.name for c in cards(kind="score") if c.name != "full"]
    recipes = {s: Recipe.parse(f"{s} @ uniform(budget=0.2)") for s in (*names, *EXTRA)}
    late = {s: r for s, r in recipes.items() if not r.scored.can("all-queries")}
    reading(model, Recipe.parse("full"), ids[:, :512])
    dense = reading(model, Recipe.parse("full"), ids)
    rows = [line(s, LATE, seconds, dense, given.length)
            for s, seconds in at_the_end(model, late, ids, given.rounds).items()]
    dense = statistics.median(reading(model, Recipe.parse("full"), fewer) for _ in range(given.rounds))
    for s, recipe in ({} if given.late_only else recipes).items():
        if s not in late:
            rows.append(line(s, "all rows", reading(model, recipe, fewer) - dense, dense, given.watch_length))
    if not given.late_only:
        rows += knowing_more(load(), fewer[0].tolist(), dense)
    if given.out:
        found = {"machine": machine(), "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """The result as Markdown, for the documentation."""
    head = (f"20 % kept. Machine: {found['machine']}.\n\n| score | watches | tokens | dense reading | adds | of it |\n"
            "| :-- | :-- | --: | --: | --: | --: |\n")
    lines = (f"| `{r['score']}` | {r['watches']} | {r['tokens']:,} | {r['dense_s']:.1f} s | {r['added_s']:.2f} s | "
             f"{r['share']:.1%} |" for r in found["rows"])
    return head + "\n".join(lines)


def line(score: str, watches: str, added: float, dense: float, tokens: int) -> dict[str, Any]:
    """A line of the result, printed as it is known."""
    mark = "" if watches != LATE else ("within 10 %" if added <= LIMIT * dense else "ABOVE 10 %")
    print(f"{score:28} {watches:34} {tokens:6} {added:7.2f} s {added / dense:7.1%} of {dense:.1f} s  {mark}", flush=True)
    return {"score": score, "watches": watches, "tokens": tokens, "added_s": added, "dense_s": dense, "share": added / dense}


def knowing_more(loaded: Any, ids: list[int], dense: float) -> list[dict[str, Any]]:
    """What needs more than the prompt: an answer's attention (as references and KVzip-like oracles do), and the choice and
    repair of a question over joined documents, which takes the place of reading them."""
    with dense_reading(loaded.model, ids) as reading_:
        answer = timed(lambda: reading_.peaks(ids[100:132]))
    context = open_context(loaded, ids, "prophetkv(r=0.2)")
    context.nlls(ids[200:216], ids[300:304])
    joined = context.achieved.choosing_s + context.achieved.repair_s
    return [line("gt-ref", "an answer of 32 tokens", answer, dense, len(ids)),
            line("prophetkv(r=0.2)", "the question (instead of reading)", joined, dense, len(ids))]


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def reading(model: Any, recipe: Recipe, ids: torch.Tensor) -> float:
    """Seconds to read and compress the prompt."""
    with recipe.on(model) as run:
        return timed(lambda: read(model, ids, run.new_cache(Prompt(ids, ids.shape[1]))))


def at_the_end(model: Any, recipes: dict[str, Recipe], ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Seconds that scoring and compressing take, the scores taking turns."""
    seconds: dict[str, list[float]] = {s: [] for s in recipes}
    with Recipe(cache=gatherer([r.cache for r in recipes.values() if r.cache])).on(model) as run:
        base = run.new_cache(Prompt(ids, ids.shape[1]))
        read(model, ids, base)
        for _ in range(rounds):
            for s, recipe in recipes.items():
                seconds[s].append(timed(lambda r=recipe: fork(base, r.cache)))
    return {s: statistics.median(found) for s, found in seconds.items()}


if __name__ == "__main__":
    main()
