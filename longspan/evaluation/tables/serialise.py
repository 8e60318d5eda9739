"""A table as text: Markdown, CSV, JSON lines, or "column: value" pairs; a line for each row in every one of them.

All four hold the same cells. Empty cells are empty, null in JSON. What would break a line or a cell is escaped, so that tables
can be read back.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence

from longspan.evaluation.tables.pool import Table, Value
from longspan.registry import Refused, nearest

Lines = tuple[str, list[str]]
"""What stands above the rows, and each row; every line ends in a newline."""


def serialise(table: Table, form: str) -> Lines:
    """A table's heading and rows as text in one of the `FORMS`."""
    if form not in FORMS:
        raise Refused(nearest(form, FORMS, "serialisation"))
    return FORMS[form](table)


def markdown(table: Table) -> Lines:
    names = [column.name for column in table.columns]
    head = f"## {table.name}\n{_bars(names)}{_bars(['---'] * len(names))}"
    return head, [_bars(row) for row in table.rows]


def comma_separated(table: Table) -> Lines:
    head, *rows = _csv_lines([[column.name for column in table.columns], *table.rows])
    return f"{table.name}\n{head}", rows


def json_lines(table: Table) -> Lines:
    names = [column.name for column in table.columns]
    return f"{table.name}\n", [json.dumps(dict(zip(names, row)), ensure_ascii=False) + "\n" for row in table.rows]


def pairs(table: Table) -> Lines:
    names = [_quoted(column.name) for column in table.columns]
    return f"{table.name}\n", ["; ".join(f"{n}: {_quoted(written(v))}" for n, v in zip(names, row)) + "\n" for row in table.rows]


FORMS: dict[str, Callable[[Table], Lines]] = {"markdown": markdown, "csv": comma_separated, "json": json_lines, "pairs": pairs}


def written(value: Value) -> str:
    """A cell outside JSON: numbers as Python writes them, nothing for an empty one."""
    return "" if value is None else str(value)


def _bars(cells: Iterable[Value]) -> str:
    return "| " + " | ".join(_escaped(written(cell)) for cell in cells) + " |\n"


def _escaped(cell: str) -> str:
    if not any(mark in cell for mark in "\\|\n\r"):
        return cell
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "\\n").replace("\r", "\\r")


def _quoted(cell: str) -> str:
    """As JSON where a separator, a quote or a line end is inside."""
    plain = not any(mark in cell for mark in ("; ", ": ", '"', "\n", "\r"))
    return cell if plain else json.dumps(cell, ensure_ascii=False)


def _csv_lines(rows: Sequence[Sequence[Value]]) -> list[str]:
    """A line for each row; line ends inside a cell are written as in Markdown, so that a row stays one line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    found = []
    for row in rows:
        out.seek(0)
        out.truncate()
        writer.writerow([_one_line(written(cell)) for cell in row])
        found.append(out.getvalue())
    return found


def _one_line(cell: str) -> str:
    if not any(mark in cell for mark in "\\\n\r"):
        return cell
    return cell.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
