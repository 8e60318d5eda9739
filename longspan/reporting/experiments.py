"""Experiments as tables: claim beside measurement, for the terminal and for the docs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STYLE = {"reproduced": "green", "mechanism-only": "yellow", "failed": "red"}


def outcome_table(done: Iterable[Any]) -> Any:
    """A `rich` table of experiments just run."""
    from rich.table import Table

    table = Table(show_lines=True)
    for column in ("experiment", "claim", "measured", "verdict"):
        table.add_column(column, overflow="fold")
    for d in done:
        style = STYLE[d.verdict]
        table.add_row(d.id, d.claim, figures(d.outcome.measured), f"[{style}]{d.verdict}[/] {d.outcome.reason}")
    return table


def rows_table(head: list[str], lines: list[list[str]]) -> Any:
    """A `rich` table of an experiment's own rows."""
    from rich.table import Table

    table = Table()
    for column in head:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def figures(measured: dict[str, Any]) -> str:
    """Measured values, one a line."""
    return "\n".join(f"{name}: {short(value)}" for name, value in measured.items())


def short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {short(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(short, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reproduction_table(folder: Path) -> str:
    """The Markdown table of all stored outcomes in `folder`."""
    lines = ["| experiment | claim | measured here | verdict | scale |", "|---|---|---|---|---|"]
    for file in sorted(folder.glob("*.json")):
        d = json.loads(file.read_text(encoding="utf-8"))
        verdict = f"**{d['verdict']}**" + (f" {d['reason']}" if d["reason"] else "")
        measured = figures(d["measured"]).replace("\n", "<br>").replace("|", "\\|")
        lines.append(f"| [{d['id']}](reproduction/{file.name}) | {d['claim']} | {measured} | {verdict} | {d['scale']} |")
    return "\n".join(lines) + "\n"
