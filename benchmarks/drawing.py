"""Which share of a run is spent on drawing its examples, and which when they were drawn before?

    python benchmarks/drawing.py [--quick] [--out FILE]

Every generated task at 1,024 tokens (2,048 or 4,096 where it needs more): ten examples are drawn with the bundled model's
tokenizer, once from nothing (what the first use of a task costs, such as its floor, included) and once from disk; then one of
them is run under the dense recipe alone, which is the shortest run there is. Seconds are per example.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from longspan import registry
from longspan.evaluation import measure, parse_task
from longspan.evaluation.drawn import draw
from longspan.models import Loaded, load
from longspan.recipe import Recipe
from longspan.registry import Refused
from longspan.reporting import human_seconds

EXAMPLES = 10
LIMIT = 0.1
"""Drawing should take less than this share of the run."""


def tasks() -> list[str]:
    """Tasks that need no file of the user's."""
    return [card.name for card in registry.cards(kind="task")]


def measure_task(loaded: Loaded, name: str, length: int) -> dict[str, Any] | None:
    """Seconds per example of one task, None where it isn't built at this length or needs a file."""
    full = Recipe.parse("full")
    try:
        task = parse_task(name)
        began = time.perf_counter()
        drawn = draw(task, length, EXAMPLES, 0, loaded.tokenizer)
    except Refused:
        return None
    cold = time.perf_counter() - began
    began = time.perf_counter()
    draw(parse_task(name), length, EXAMPLES, 0, loaded.tokenizer)
    warm = time.perf_counter() - began
    began = time.perf_counter()
    measure(loaded, full, task, drawn[0])
    run = time.perf_counter() - began
    cold, warm = cold / len(drawn), warm / len(drawn)
    return {"task": name, "length": length, "drawn_s": cold, "from_disk_s": warm, "run_s": run,
            "share": cold / (cold + run), "share_from_disk": warm / (warm + run)}


def shortest(loaded: Loaded, name: str, lengths: tuple[int, ...]) -> dict[str, Any] | None:
    """A task at the first of these lengths that it can be built for; drawing weighs most in short runs."""
    return next((row for length in lengths if (row := measure_task(loaded, name, length)) is not None), None)


def render(found: dict[str, Any]) -> str:
    """Shares as a table, largest first."""
    lines = [f"{found['threads']} threads, torch {found['torch']}; {EXAMPLES} examples.", "",
             "| task | tokens | drawn | from disk | one run | share | share from disk |", "| :-- |" + " --: |" * 6]
    for row in sorted(found["rows"], key=lambda row: -row["share"]):
        times = " | ".join(human_seconds(row[name]) for name in ("drawn_s", "from_disk_s", "run_s"))
        lines.append(f"| {row['task']} | {row['length']:,} | {times} | {row['share']:.1%} | {row['share_from_disk']:.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tasks at 512 tokens only")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    loaded = load()
    names, lengths = (["niah", "passkey"], (512,)) if args.quick else (tasks(), (1024, 2048, 4096))
    os.environ["LONGSPAN_EXAMPLES"] = "1"
    folder = os.environ.get("LONGSPAN_CACHE")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["LONGSPAN_CACHE"] = empty  # the model is loaded; only examples are kept here
        rows = [row for name in names if (row := shortest(loaded, name, lengths)) is not None]
    if folder is None:
        del os.environ["LONGSPAN_CACHE"]
    found = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows,
             "over": [[row["task"], row["length"]] for row in rows if row["share"] > LIMIT],
             "over_from_disk": [[row["task"], row["length"]] for row in rows if row["share_from_disk"] > LIMIT]}
    print(render(found))
    print(f"\nOver {LIMIT:.0%}, drawn anew: {found['over']}; from disk: {found['over_from_disk']}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
