"""What the page says in words and holds as data: pooled points, paired comparisons, examples, and what was run."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from longspan.reporting.needles import needle_maps
from longspan.reporting.palette import DENSE, looks
from longspan.reporting.points import labelled, points
from longspan.reporting.tables import human_bytes, percent, signed

Row = dict[str, Any]

MARGIN = 0.10
"""A recipe counts as holding up when a loss of more accuracy than this is ruled out with 95% confidence."""

LONGEST = 600
"""Characters of a prediction that the page shows."""

PACKAGES = ("longspan", "torch", "transformers", "tokenizers", "numpy", "scipy")


def page_data(rows: list[Row], summary: list[Row], kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything the page's pictures are drawn from; rows and summary carry labelled recipes."""
    names = list(dict.fromkeys([line["recipe"] for line in summary] + [r["name"] for k in kept for r in k["recipes"]]))
    look = looks(names)
    tasks = list(dict.fromkeys(line["task"] for line in summary))
    lengths = sorted({line["length"] for line in summary if line["length"] is not None})
    return rounded({
        "recipes": [{"name": n, "dense": n == DENSE, **look[n]._asdict()} for n in names],
        "axes": ["task", "length"], "tasks": tasks, "lengths": lengths,
        "views": views(rows, summary, tasks, lengths, names),
        "needles": {metric: [m._asdict() for m in needle_maps(rows, metric)] for metric in ("score", "answer_nll")},
        "examples": examples(rows, names), "kept": kept,
    })  # fmt: skip


def views(
    rows: list[Row], summary: list[Row], tasks: list[str], lengths: list[int], names: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """One list of points for every choice of task and length ("task|length", empty for all)."""
    from longspan.evaluation import statistics  # here, because its room loads the models' libraries

    pooled: dict[tuple[str, str], list[Row]] = {}
    for line in summary:
        pooled.setdefault((str(line["task"]), str(line["length"])), []).append(line)
    for by in (("task",), ("length",), ()):
        for line in statistics.summarise(rows, by=("recipe", *by)):
            key = str(line["task"]) if "task" in by else "", str(line["length"]) if "length" in by else ""
            pooled.setdefault(key, []).append(line)
    out: dict[str, list[dict[str, Any]]] = {}
    for task in ["", *tasks]:
        for length in ["", *map(str, lengths)]:
            lines = [
                line for line in summary if task in ("", line["task"]) and length in ("", str(line["length"]))
            ]
            of = {line["recipe"]: line for line in pooled.get((task, length), [])}
            out[f"{task}|{length}"] = [
                p.as_json() | {"recipe": names.index(p.recipe), "vs": of.get(p.recipe, {}).get("vs_full"),
                               "standing": of.get(p.recipe, {}).get("standing")} for p in points(lines)
            ]
    return out


def overall(rows: list[Row]) -> list[Row]:
    """One line per recipe, pooled over tasks and lengths, compared with the dense run pair by pair.

    Of several recipes the reader will take the one that looks best; so vs_full also has all95, intervals that hold for all of
    them together (Bonferroni).
    """
    from longspan.evaluation import statistics

    lines = statistics.summarise(rows, by=("recipe",))
    compared = sum("vs_full" in line for line in lines)
    wide = statistics.summarise(rows, by=("recipe",), level=1 - 0.05 / compared) if compared > 1 else lines
    for line, other in zip(lines, wide):
        if "vs_full" in line:
            line["vs_full"]["all95"] = other["vs_full"]["ci95"]
    return lines


def headline(lines: list[Row], margin: float = MARGIN) -> dict[str, str]:
    """The cheapest recipe that holds up against the dense run, said with its numbers; or why none can be named.

    `lines` come from `overall`.
    """
    if not any(line["recipe"] == DENSE for line in lines):
        return _said("The dense run isn't among these recipes, so what they lose can't be said. Add “full”.")
    known = [
        line for line in lines
        if line.get("vs_full") and line["vs_full"]["all95"][0] is not None and line["cache_bytes"] is not None
    ]  # fmt: skip
    if not known:
        return _said("No example was scored for both a recipe and the dense run; the answer NLL tells them apart.")
    n = max(line["vs_full"]["n"] for line in known)
    good = [line for line in known if line["vs_full"]["all95"][0] > -margin]
    if not good:
        return _said(
            f"With {n} examples each, no recipe is shown to stay within {percent(margin)[:-1]} points of the dense "
            "run. More examples narrow the intervals."
        )
    best = min(good, key=_size)
    alike = [line["recipe"] for line in good if line is not best and _size(line) <= 1.01 * _size(best)]
    versus = best["vs_full"]
    lo, hi = (signed(100 * v) for v in versus["all95"])
    full = best["full_cache_bytes"]
    share = f" ({percent(best['cache_bytes'] / full)} of the dense cache)" if full else ""
    return _said(
        f"is the smallest cache that holds up: {human_bytes(best['cache_bytes'])}{share}, accuracy "
        f"{signed(100 * versus['accuracy_difference'])} points [{lo}, {hi}] against the dense run on the same "
        f"{versus['n']} examples. A loss of more than {percent(margin)[:-1]} points is ruled out at 95% confidence"
        + (f", for all {len(known)} recipes together." if len(known) > 1 else ".")
        + (f" Of the same size: {', '.join(alike)}." if alike else ""),
        best["recipe"],
    )


def _size(line: Row) -> float:
    """Share of the dense cache, where it is known: bytes of recipes that have read different examples don't compare."""
    return line["cache_bytes"] / (line["full_cache_bytes"] or 1)


def _said(text: str, recipe: str = "") -> dict[str, str]:
    return {"recipe": recipe, "text": text}


def examples(rows: Iterable[Row], names: list[str], longest: int = LONGEST) -> list[dict[str, Any]]:
    """Every example once, with what each recipe answered, in at most `longest` characters."""
    at = {name: i for i, name in enumerate(names)}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row.get(k) for k in ("task", "length", "index", "seed", "text_hash"))
        if key not in found:
            found[key] = {k: row.get(k) for k in ("task", "length", "index", "seed", "depth")}
            found[key] |= {"answers": _answers(row.get("answers"), longest), "runs": []}
        run = [row.get(k) for k in ("score", "answer_nll", "cache_bytes", "ttft_s")]
        found[key]["runs"].append([at[row["recipe"]], _cut(row.get("prediction"), longest), *run])
    return list(found.values())


def provenance(rows: list[Row], meta: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What was run, as (name, text) pairs: from the rows, then the caller's `meta`, then versions."""
    def seen(key: str) -> str:
        return ", ".join(str(v) for v in dict.fromkeys(row.get(key) for row in rows) if v is not None)

    texts: dict[str, None] = {}
    for row in rows:
        if row.get("text_source"):
            digest = str(row.get("text_hash") or "no hash")
            texts[f"{row['text_source']} ({digest if len(digest) <= 16 else digest[:12] + '…'})"] = None
    count = len({tuple(row.get(k) for k in ("task", "length", "index", "seed", "text_hash")) for row in rows})
    pairs = {
        "Model": seen("model"), "Number type": seen("dtype"), "Tasks": seen("task"), "Lengths asked": seen("length"),
        "Examples": f"{count:,} examples, {len(rows):,} runs", "Seeds": seen("seed"), "Compressed": seen("compress"),
        "Text (hash)": ", ".join(texts), "Answers cut short": cut_short(rows),
    }  # fmt: skip
    given = dict(meta or {})
    given.pop("title", None)
    versions = given.pop("versions", None) or installed()
    pairs |= {str(k).replace("_", " ").capitalize(): _text(v) for k, v in given.items()}
    pairs["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [(name, text) for name, text in pairs.items() if text]


def cut_short(rows: list[Row]) -> str:
    """How many answers were ended by the cap before they could be as long as the right one; their scores say little."""
    capped = [row for row in rows if None not in (row.get("new_tokens"), row.get("max_new_tokens"), row.get("answer_tokens"))
              and row["new_tokens"] >= row["max_new_tokens"] < row["answer_tokens"]]
    if not capped:
        return ""
    caps = sorted({row["max_new_tokens"] for row in capped})
    return (f"{len(capped):,} of {len(rows):,}: at most {' or '.join(map(str, caps))} tokens were written, and the right answer "
            "has more. Raise max_new_tokens, or read the answer NLL.")


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on, without importing them."""
    out = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def rounded(value: Any) -> Any:
    """The same JSON value with six significant digits, which is more than any picture shows; NaN becomes None."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def prepared(rows: Iterable[Row], summary: Iterable[Row] | None) -> tuple[list[Row], list[Row]]:
    """Rows and summary with recipes named apart; the summary is made from the rows where it isn't given."""
    from longspan.evaluation import statistics  # here, because its room loads the models' libraries

    known = labelled(rows)
    return known, labelled(statistics.summarise(known) if summary is None else summary)


def _answers(value: Any, longest: int) -> list[str]:
    found = json.loads(value) if isinstance(value, str) and value else value or []
    return [_cut(v, longest) for v in (found if isinstance(found, list) else [found])]


def _cut(value: Any, longest: int) -> str:
    text = "" if value is None else _text(value)
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest:,} more characters)"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
