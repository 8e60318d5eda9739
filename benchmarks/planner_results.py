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
SCORES = ("streaming-llm", "snapkv", "tova", "keydiff", "expected-attention")
TASKS = ("niah", "ruler-niah-single-2", "ruler-niah-multikey-1")


def recipes() -> list[str]:
    """The dense run, every score at three budgets, the best storage levers."""
    found = ["full", *(f"{score}(budget={budget})" for score in SCORES for budget in BUDGETS)]
    found += [f"expected-attention @ adakv(budget={budget})" for budget in BUDGETS]
    return [*found, "keydiff(budget=0.5, store=quantised)", "full(store=quantised)",
            "full(store=quantised(bits=4))"]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    ask.add_argument("--examples", type=int, default=8)
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
