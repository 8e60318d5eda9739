"""The arena of operators, from docs/reproduction/arena.json: one table, and a picture for each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longspan.experiments.arena import lines
from longspan.reporting.lengths import lengths_svg
from rendering.results import Missing
from rendering.text import table

BEHIND = "softmax, rope"
TITLES = {
    "text": ("nats per byte", "held-out bytes of Python's source, read in windows; lower is better"),
    "recall": ("associative recall", "share of questions answered right; higher is better"),
    "slots": ("recall in slots", "share of rows answered right; higher is better"),
}
TRAINED = {"text": 64, "recall": 32, "slots": 48}
UNMARKED = "No arm is marked as the best: seeds are too few for an interval."
HIGHEST = 3.0
"""Nats per byte at which the picture's scale ends."""


def stored(docs: Path) -> dict[str, Any]:
    file = docs / "reproduction" / "arena.json"
    if not file.is_file():
        raise Missing("docs/reproduction/arena.json is missing; run `longspan reproduce arena --out docs/reproduction`.")
    return json.loads(file.read_text(encoding="utf-8"))


def one_table(docs: Path) -> str:
    """Every arm, every task, every length, and what a training step costs."""
    found = stored(docs)
    head, cells = lines(found["table"])
    seeds = ", ".join(map(str, found["seeds"]))
    said = f"Text: means over seeds {seeds}; recall and slots: seed 0. In brackets relative to `{BEHIND}`. {UNMARKED}"
    return f"{said} Machine: {found['machine']}.\n\n" + table(
        head, cells, "l" + "r" * (len(head) - 1)
    )


def spread(docs: Path) -> str:
    """How far seeds lie apart, so that nobody reads a winner out of noise."""
    rows = [row for row in stored(docs)["table"] if "text by seed" in row]
    gaps = {n: [max(v[n]) - min(v[n]) for v in (row["text by seed"] for row in rows)] for n in ("1", "16")}
    told = {n: sorted(g)[len(g) // 2] for n, g in gaps.items()}
    return (f"Two seeds of the same arm differ by {told['1']:.3f} nats per byte at the trained length and by {told['16']:.3f} "
            "at 16 times that (median over arms): smaller differences between arms tell nothing.\n")


def pictures(docs: Path) -> dict[str, str]:
    """A picture for each task."""
    found, made = stored(docs), {}
    for task, (title, subtitle) in TITLES.items():
        rows = [row for row in found["table"] if task in row]
        curves = {row["arm"]: {TRAINED[task] * int(n): v for n, v in row[task].items()} for row in rows}
        low, high = (min(v for c in curves.values() for v in c.values()), HIGHEST) if task == "text" else (0.0, 1.0)
        made[f"arena-{task}.svg"] = lengths_svg(curves, BEHIND, f"Arena: {title}", f"{subtitle}; grey: {BEHIND}",
                                                low=low, high=high, digits=2 if task == "text" else 1)
    return made


def picture_links(docs: Path) -> str:
    return "\n\n".join(f"![{name.removesuffix('.svg')}](images/{name})" for name in pictures(docs)) + "\n"
