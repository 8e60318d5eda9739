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
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--late-only", action="store_true", help="leave out scores that watch all rows")
    given = ask.parse_args()
    model, tokenizer = load()
    ids = torch.tensor([tokenizer(load_text().text)["input_ids"][: given.length]])
    names = [c.name for c in cards(kind="score") if c.name != "full"]
    recipes = {s: Recipe.parse(f"{s} @ uniform(budget=0.2)") for s in (*names, *EXTRA)}
    late = {s: r for s, r in recipes.items() if not r.scored.can("all-queries")}
    reading(model, Recipe.parse("full"), ids[:, :512])
    dense = statistics.median(reading(model, Recipe.parse("full"), ids) for _ in range(min(2, given.rounds)))
    rows = [{"score": s, "watches": LATE, "added_s": seconds, "share": seconds / dense}
            for s, seconds in at_the_end(model, late, ids, given.rounds).items()]
    for s, recipe in ({} if given.late_only else recipes).items():
        if s not in late:
            added = reading(model, recipe, ids) - dense
            rows.append({"score": s, "watches": "all rows", "added_s": added, "share": added / dense})
    if not given.late_only:
        rows += knowing_more(load(), ids[0].tolist(), dense)
    for row in rows:
        mark = "" if row["watches"] != LATE else ("within 10 %" if row["share"] <= LIMIT else "ABOVE 10 %")
        print(f"{row['score']:28} {row['watches']:20} {row['added_s']:7.2f} s {row['share']:7.1%} of {dense:.1f} s  {mark}")
    if given.out:
        found = {"length": given.length, "dense_s": dense, "machine": machine(), "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """The result as Markdown, for the documentation."""
    head = (f"{found['length']:,} tokens, 20 % kept; reading them densely takes {found['dense_s']:.1f} s. Machine: "
            f"{found['machine']}.\n\n| score | watches | adds | of dense reading |\n| :-- | :-- | --: | --: |\n")
    lines = (f"| `{r['score']}` | {r['watches']} | {r['added_s']:.2f} s | {r['share']:.1%} |" for r in found["rows"])
    return head + "\n".join(lines)


def knowing_more(loaded: Any, ids: list[int], dense: float) -> list[dict[str, Any]]:
    """What needs more than the prompt: an answer's attention (as references and KVzip-like oracles do), and the choice and
    repair of a question over joined documents, which takes the place of reading them."""
    with dense_reading(loaded.model, ids) as reading_:
        answer = timed(lambda: reading_.peaks(ids[100:132]))
    context = open_context(loaded, ids, "prophetkv(r=0.2)")
    context.nlls(ids[200:216], ids[300:304])
    joined = context.achieved.choosing_s + context.achieved.repair_s
    return [{"score": "gt-ref", "watches": "an answer of 32 tokens", "added_s": answer, "share": answer / dense},
            {"score": "prophetkv(r=0.2)", "watches": "the question (instead of reading)", "added_s": joined,
             "share": joined / dense}]


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
