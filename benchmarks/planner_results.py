"""Measure what `longspan plan` starts from: recipes on the bundled model, summed up.

    python benchmarks/planner_results.py --out longspan/evaluation/measured.json

Rows are kept in runs/planner and a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from longspan.evaluation import Request, parse_task, run, summarise
from longspan.experiments.base import machine
from longspan.models import load
from longspan.recipe import Recipe

BUDGETS = (0.2, 0.5, 0.8)
TASKS = ("niah", "ruler-niah-multikey-1")
SWEPT = ("snapkv(budget={})", "keydiff(budget={})", "expected-attention @ adakv(budget={})")
SINGLE = ("full", "full(store=quantised)", "full(store=quantised(bits=4))", "streaming-llm(budget=0.5)",
          "streaming-llm(budget=0.8)", "tova(budget=0.5)", "keydiff(budget=0.5, store=quantised)",
          "keydiff(budget=0.8, store=quantised(bits=4))")


def recipes() -> list[str]:
    """The dense run, storage levers alone, scores at several budgets, and the two levers together."""
    return [*SINGLE, *(text.format(budget) for text in SWEPT for budget in BUDGETS)]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--lengths", type=int, nargs="+", default=[1024])
    ask.add_argument("--examples", type=int, default=4)
    given = ask.parse_args()
    loaded = load()
    request = Request([Recipe.parse(r) for r in recipes()], [parse_task(t) for t in TASKS], given.lengths, given.examples,
                      out=Path("runs/planner"), max_new_tokens=24)
    rows = run(loaded, request, lambda done, total, what: print(f"\r{done}/{total} {what:60}", end="", flush=True))
    lines = summarise(rows)
    for line in lines:
        line.pop("achieved", None)
    stored = {"model": loaded.name, "fingerprint": loaded.fingerprint, "machine": machine(), "rows": lines}
    given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
