"""The results as a table: in the terminal, and as Markdown for a README or an issue.

A line shows accuracy with its 95% interval, how it differs from the dense run on the same examples (in points, marked
when that is beyond chance: ``▼`` worse, ``▲`` better, ``·`` no difference shown at the 5% level after Holm's
correction), the answer's negative log-likelihood, the cache right after compression and the two speeds. Beside accuracy and
likelihood stands how a recipe compares with all other recipes of its block: ``★`` where it is the best, ``≈`` where it can't
be told from the best, nothing where another one is shown to be better.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from longspan.reporting.points import labelled

if TYPE_CHECKING:
    from rich.table import Table

Line = dict[str, Any]

COLUMNS = (
    "recipe", "task", "length", "n", "accuracy", "vs full", "answer NLL", "cache", "of full", "first token", "tokens/s",
)  # fmt: skip
LEFT = ("recipe", "task")
TERMINAL = {
    "recipe": "recipe", "accuracy": "accuracy", "vs full": "vs full", "answer NLL": "NLL", "cache": "cache",
    "of full": "of full", "first token": "ttft", "tokens/s": "tok/s",
}  # fmt: skip
"""Columns in a terminal, with shorter heads; task, length and n stand in a line above their block."""
NONE = "–"
LEVEL = 0.05
STANDING = {"best": "★", "may-be-best": "≈"}
BESIDE = ("Recipes beside each other: ★ the best, ≈ not told from the best, no mark: another one is better (paired on the same "
          "examples, 5% over all pairs; full is the yardstick and takes no part).")
"""What the marks of `standing` mean."""


def human_bytes(n: float | None) -> str:
    """Bytes in binary units with three significant digits: 999 -> ``999 B``, 1536 -> ``1.50 KiB``; None -> ``–``."""
    if n is None:
        return NONE
    sign, size = ("-" if n < 0 else ""), abs(float(n))
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    unit = 0
    while unit + 1 < len(units) and size >= 1023.5:
        size /= 1024
        unit += 1
    if unit == 0:
        return f"{sign}{size:.0f} B"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{sign}{size:.{digits}f} {units[unit]}"


def human_seconds(s: float | None) -> str:
    """Seconds with three significant digits, in ms below one second; None -> ``–``."""
    if s is None:
        return NONE
    if s < 0.9995:
        return f"{s * 1000:.0f} ms" if s >= 0.00995 else f"{s * 1000:.1f} ms"
    return f"{s:.2f} s" if s < 9.995 else f"{s:.1f} s" if s < 99.95 else f"{s:.0f} s"


def percent(x: float | None, digits: int = 0) -> str:
    return NONE if x is None else f"{100 * x:.{digits}f}%"


def mark(line: Line) -> str:
    """``▼`` or ``▲`` for a difference from the dense run that can't be chance, ``·`` for none shown, else empty."""
    versus = line.get("vs_full")
    if not versus or versus["accuracy_difference"] is None:
        return ""
    p = versus.get("p_holm") if versus.get("p_holm") is not None else versus["p_value"]
    if p is None or p >= LEVEL:
        return "·"
    return "▲" if versus["accuracy_difference"] > 0 else "▼"


def standing(line: Line, measure: str) -> str:
    """The mark of how a line's recipe stands beside the others by a measure: ``★``, ``≈`` or empty."""
    return STANDING.get((line.get("standing") or {}).get(measure) or "", "")


def ranked(lines: Iterable[Line]) -> bool:
    """Whether any line knows how its recipe stands: figures without their examples don't, and then no winner is shown."""
    return any(line.get("standing") for line in lines)


def cells(line: Line) -> tuple[str, ...]:
    """The line's texts, one per column of `COLUMNS`."""
    lo, hi = line["ci95"]
    interval = f" [{percent(lo)[:-1]}, {percent(hi)[:-1]}]" if lo is not None and hi is not None else ""
    full = line.get("full_cache_bytes")
    share = line["cache_bytes"] / full if full and line["cache_bytes"] is not None else None
    speed = line["tokens_per_s"]
    return (
        str(line["recipe"]), str(line["task"]), _length(line["length"]), str(line["n"]),
        f"{percent(line['accuracy'])}{interval} {standing(line, 'accuracy')}".rstrip(), _versus(line),
        NONE if line["answer_nll"] is None else f"{line['answer_nll']:.3f} {standing(line, 'answer_nll')}".rstrip(),
        human_bytes(line["cache_bytes"]), percent(share), human_seconds(line["ttft_s"]),
        NONE if speed is None else f"{speed:.1f}",
    )  # fmt: skip


def _versus(line: Line) -> str:
    versus = line.get("vs_full")
    if not versus or versus["accuracy_difference"] is None:
        return NONE
    return f"{signed(100 * versus['accuracy_difference'])} {mark(line)}".rstrip()


def signed(x: float, digits: int = 0) -> str:
    """A number with its sign, and no sign on what rounds to zero."""
    text = f"{abs(x):.{digits}f}"
    return text if float(text) == 0 else f"{'+' if x > 0 else '−'}{text}"


def _length(length: Any) -> str:
    return f"{length:,}" if isinstance(length, int) else NONE if length is None else str(length)


def summary_table(summary: Iterable[Line], title: str | None = None) -> Table:
    """A `rich` table of the summary, one block per task and length; it fits a terminal of 80 columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = labelled(summary)
    blocks: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        blocks.setdefault((line["task"], line["length"]), []).append(line)
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=0, title_justify="left",
                  caption_justify="left")  # fmt: skip
    for name, short in TERMINAL.items():
        if name in LEFT:
            table.add_column(short, overflow="fold", min_width=16)
        else:
            table.add_column(short, justify="right", no_wrap=True)
    for (task, length), block in blocks.items():
        few, many = min(line["n"] for line in block), max(line["n"] for line in block)
        examples = str(few) if few == many else f"{few}–{many}"
        table.add_row(Text(f"{task} · {_length(length)} · n={examples}", style="bold"))
        for line in block:
            style = {"▼": "red", "▲": "green"}.get(mark(line), "")
            texts = dict(zip(COLUMNS, cells(line)))
            table.add_row(*(Text(texts[name], style=style if name == "vs full" else "") for name in TERMINAL))
        table.add_section()
    compress = list(dict.fromkeys(line["compress"] for line in lines if line.get("compress")))
    if lines:
        when = f"Compressed {' or '.join(compress)}. " if compress else ""
        table.caption = when + "Intervals: 95%. vs full: points, paired; ▼ ▲ beyond chance (Holm, 5%), · none shown."
        if ranked(lines):
            table.caption += " " + BESIDE
    return table


def oracle_table(summary: Iterable[Line], title: str | None = None) -> Table | None:
    """A `rich` table of how well each score's ranking agrees with the reference; None where no reference was asked for."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = [line for line in labelled(summary) if "oracle" in line]
    if not lines:
        return None
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    table.add_column("recipe", overflow="fold", min_width=16)
    for name in ("recall", "min", "jump", "spearman", "min", "jump"):
        table.add_column(name, justify="right", no_wrap=True)
    block = None
    for line in lines:
        if (line["task"], line["length"]) != block:
            block = line["task"], line["length"]
            table.add_row(Text(f"{block[0]} · {_length(block[1])}", style="bold"))
        found = line["oracle"] or {}
        both = [found.get(what) or {} for what in ("recall", "spearman")]
        numbers = [_decimal(figures.get(part)) for figures in both for part in ("mean", "min", "jump")]
        table.add_row(Text(str(line["recipe"])), *numbers)
    table.caption = ("Agreement of a score's ranking of prompt tokens with the reference, per layer: mean, worst layer, and mean "
                     f"difference of neighbouring layers. {NONE}: no score, no answer, or too few tokens to compare.")
    return table


def _decimal(x: float | None) -> str:
    return NONE if x is None else f"{x:.3f}"


def markdown_table(summary: Iterable[Line]) -> str:
    """The summary as a GitHub Markdown table; a bar or a star in a name is escaped."""
    lines = labelled(summary)
    rule = [":--" if name in LEFT else "--:" for name in COLUMNS]
    rows = [list(COLUMNS), rule]
    for line in lines:
        texts = list(cells(line))
        rows.append([f"`{texts[0]}`".replace("|", "\\|"), *(_escaped(text) for text in texts[1:])])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _escaped(text: str) -> str:
    for character in "\\|*_<":
        text = text.replace(character, "\\" + character)
    return text
