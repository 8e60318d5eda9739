"""Everything about a comparison in one HTML file that opens without a network.

The file holds its data as JSON and its own style and scripts; a content policy inside it forbids loading anything
else. Texts of models and prompts enter the document as data only, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.registry import Refused
from longspan.reporting import findings
from longspan.reporting.tables import cells, mark

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent


def write_page(
    path: str | Path,
    rows: Iterable[dict[str, Any]],
    summary: Iterable[dict[str, Any]] | None = None,
    kept: dict[str, Any] | list[dict[str, Any]] | None = None,
    meta: dict[str, Any] | None = None,
) -> Path:
    """Write the page and return its path.

    Args:
        path: of the file; folders are made.
        rows: result rows, one per example.
        summary: lines of `summarise`; made from the rows when not given.
        kept: payloads of `kept_payload`, one per text shown; the section is left out without any.
        meta: what else was run ("title", "command", "hardware", "versions", …), shown as given.

    Raises:
        Refused: no rows, or rows of several models.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page_html(rows, summary, kept, meta), encoding="utf-8")
    return file


def page_html(
    rows: Iterable[dict[str, Any]],
    summary: Iterable[dict[str, Any]] | None = None,
    kept: dict[str, Any] | list[dict[str, Any]] | None = None,
    meta: dict[str, Any] | None = None,
) -> str:
    """The page as text; arguments as in `write_page`."""
    known, lines = findings.prepared(rows, summary)
    if not known:
        raise Refused("write_page: expected at least one result row, got none.")
    shown = [kept] if isinstance(kept, dict) else list(kept or [])
    data = findings.page_data(known, lines, shown)
    given = dict(meta or {})
    models = list(dict.fromkeys(str(row["model"]) for row in known if row.get("model")))
    return template("page.html").render(
        title=given.get("title") or (f"Long context on {models[0]}" if models else "Long context, compared"),
        headline=findings.headline(findings.overall(known)), facts=_facts(known, data),
        run=findings.provenance(known, meta),
        lines=[_table_row(line, data) for line in lines], recipes=data["recipes"], tasks=data["tasks"],
        lengths=data["lengths"], has_kept=bool(shown), has_needles=bool(data["needles"]["score"]),
        has_examples=bool(data["examples"]), plots=plots(data["views"]["|"], data["lengths"]), data=script_json(data),
    )  # fmt: skip


def script_json(value: Any) -> str:
    """JSON that can stand inside a <script> element whatever texts it holds, such as ``</script>`` or ``<!--``."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half a surrogate pair, which byte-level tokens can decode to, can't be written as UTF-8; JSON can escape it.
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)


def plots(points: list[dict[str, Any]], lengths: list[int]) -> list[dict[str, str]]:
    """The pictures there are numbers for; where nothing was scored, the answer NLL takes the place of accuracy."""
    have = {key: any(p[key] is not None for p in points) for key in ("accuracy", "answer_nll", "ttft_s")}
    main = "accuracy" if have["accuracy"] else "answer_nll"
    found = [(main, "cache_bytes", "against cache size"), (main, "ttft_s", "against time to first token")]
    if main == "accuracy":
        found.append(("answer_nll", "cache_bytes", "against cache size"))
    if len(lengths) > 1:
        found.append((main, "length", "by context length"))
    what = {"accuracy": ("Accuracy", ""), "answer_nll": ("Answer NLL", "bars: paired difference from full")}
    return [
        {"x": x, "y": y, "what": what[y][0], "against": against, "note": what[y][1]}
        for y, x, against in found
        if have[y] and have.get(x, True)
    ]


def _facts(rows: list[dict[str, Any]], data: dict[str, Any]) -> list[str]:
    lengths = [f"{n:,}" for n in data["lengths"]]
    when = list(dict.fromkeys(row["compress"].replace("-", " the ") for row in rows if row.get("compress")))
    found = [
        count(len(data["recipes"]), "recipe"), count(len(data["tasks"]), "task"),
        f"{joined(lengths)} tokens" if lengths else "", f"{count(len(data['examples']), 'example')} for each recipe",
        f"compressed {joined(when)}" if when else "",
    ]  # fmt: skip
    return [fact for fact in found if fact]


def count(n: int, thing: str) -> str:
    """``1 task``, ``1,200 tasks``."""
    return f"{n:,} {thing}" + ("" if n == 1 else "s")


def joined(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _table_row(line: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """A line of the results table: what it shows and what it is sorted by."""
    versus = line.get("vs_full") or {}
    names = [recipe["name"] for recipe in data["recipes"]]
    full = line["full_cache_bytes"]
    share = line["cache_bytes"] / full if full and line["cache_bytes"] is not None else None
    keys = (
        line["recipe"], line["task"], line["length"], line["n"], line["accuracy"], versus.get("accuracy_difference"),
        line["answer_nll"], line["cache_bytes"], share, line["ttft_s"], line["tokens_per_s"],
    )  # fmt: skip
    return {
        "recipe": names.index(line["recipe"]), "task": line["task"], "length": line["length"], "mark": mark(line),
        "cells": list(zip(cells(line), ["" if key is None else key for key in keys])), "why": _why(versus),
    }  # fmt: skip


def _why(versus: dict[str, Any]) -> str:
    if not versus or versus["accuracy_difference"] is None:
        return ""
    lo, hi = versus["ci95"]
    interval = "" if lo is None else f" [{findings.signed(100 * lo)}, {findings.signed(100 * hi)}]"
    return (
        f"{findings.signed(100 * versus['accuracy_difference'])} points{interval}, {versus['wins']} better and "
        f"{versus['losses']} worse of {versus['n']}; p = {versus['p_value']:.3g}, Holm {versus['p_holm']:.3g}"
    )


@cache
def template(name: str) -> Template:
    """A page of this folder, before it is filled."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return found.get_template(name)
