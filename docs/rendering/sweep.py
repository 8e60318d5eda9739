"""The sweep of the cache room, from docs/data/cache_sweep.json: tables, winners, pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from longspan.reporting import pareto_svg
from rendering.results import stored
from rendering.text import table

NAME = re.compile(r"(?P<score>.+) @ (?P<allocator>[\w-]+)\(budget=(?P<budget>[\d.]+)\)")
SINGLE = ("A single best recipe is shown only where the last column says that none is left; elsewhere it is one of those named. "
          "The tables and pictures below mark none.")
NEAR = 6
"""Recipes named that can't be told from a winner."""


def winners(docs: Path) -> str:
    """Who keeps the answer likeliest, for every task and budget."""
    found = stored(docs, "cache_sweep")["winners"]
    lines = []
    for w in found:
        close = [f"`{plain(r)}`" for r in w["not_told_apart"]]
        more = f" and {len(close) - NEAR} more" if len(close) > NEAR else ""
        lines.append([f"`{w['task']}`", f"{w['budget']:.0%}", str(w["n"]), f"`{plain(w['winner'])}`", f"{w['answer_nll']:.3f}",
                      f"{w['full_nll']:.3f}", (", ".join(close[:NEAR]) + more) or f"none of the {w['recipes'] - 1} others"])
    head = ["task", "budget", "n", "least answer NLL", "its NLL", "full", "not told apart from it (Holm, 5%)"]
    return table(head, lines, "lrrlrrl") + f"\n{SINGLE}\n"


def tables(docs: Path) -> str:
    """Every cell: answer NLL, and the share of answers that greedy decoding would write."""
    found = stored(docs, "cache_sweep")
    out = [f"{found['model']}, compressed before the question. Machine: {found['machine']}."]
    for task in dict.fromkeys(row["task"] for row in found["rows"]):
        for length in sorted({row["length"] for row in found["rows"] if row["task"] == task}):
            rows = [row for row in found["rows"] if (row["task"], row["length"]) == (task, length)]
            out += [f"### `{task}` at {length:,} tokens", one(rows)]
    if found["refused"]:
        reasons = dict.fromkeys((recipe, reason) for recipe, _, reason in found["refused"])
        out += ["### Refused", table(["recipe", "why"], [[f"`{r}`", why] for r, why in reasons], "ll")]
    return "\n\n".join(out) + "\n"


def one(rows: list[dict[str, Any]]) -> str:
    """A row per score and allocator, a column per budget."""
    full = next(row for row in rows if row["recipe"] == "full")
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        match = NAME.fullmatch(row["recipe"])
        if match:
            key = match["score"], match["allocator"]
            cells.setdefault(key, {})[float(match["budget"])] = figure(row)
    budgets = sorted({b for line in cells.values() for b in line})
    lines = [[f"`{score}`", allocator, *(line.get(b, "–") for b in budgets)] for (score, allocator), line in cells.items()]
    head = ["score", "allocator", *(f"{b:.0%}" for b in budgets)]
    return f"Full cache: {figure(full)}; {full['n']} examples.\n\n" + table(head, lines, "ll" + "r" * len(budgets))


def figure(row: dict[str, Any]) -> str:
    accuracy = "" if row["accuracy"] is None else f" ({row['accuracy']:.0%})"
    return f"{row['answer_nll']:.3f}{accuracy}"


def pictures(docs: Path) -> dict[str, str]:
    """One trade-off a task, over all lengths: the winners and a few that everyone knows."""
    found = stored(docs, "cache_sweep")
    made = {}
    for task in dict.fromkeys(row["task"] for row in found["rows"]):
        chosen = {w["winner"] for w in found["winners"] if w["task"] == task}
        chosen |= {f"{score} @ uniform(budget={b})" for score in ("random", "snapkv") for b in (0.1, 0.2)} | {"full"}
        lines = [row for row in found["rows"] if row["task"] == task and row["recipe"] in chosen]
        made[f"sweep-{task.split('(')[0]}.svg"] = pareto_svg(lines, y="answer_nll", title=f"{task}: answer likelihood and memory")
    return made


def picture_links(docs: Path) -> str:
    return "\n\n".join(f"![{name.removesuffix('.svg')}](images/{name})" for name in pictures(docs)) + "\n"


def plain(recipe: str) -> str:
    """A recipe without its budget."""
    match = NAME.fullmatch(recipe)
    return f"{match['score']} @ {match['allocator']}" if match else recipe
