"""Reads serialised tables back: what a careful reader of the text would see."""

from __future__ import annotations

import csv
import json
import re

from longspan.evaluation.tables.pool import Column, Database, Table, _typed, type_of
from longspan.evaluation.tables.serialise import serialise


def read_back(text: str, form: str) -> Database:
    """Tables, separated by empty lines, as a database; types are found anew."""
    return Database(tuple(READERS[form](block.splitlines()) for block in re.split(r"\n\n", text.strip("\n")) if block))


def as_text(database: Database, form: str) -> str:
    return "\n".join(head + "".join(rows) for head, rows in (serialise(table, form) for table in database.tables))


def table(name: str, names: list[str], rows: list[list[str]]) -> Table:
    columns = list(zip(*rows))
    types = [type_of(column) for column in columns]
    cells = zip(*([_typed(cell, kind) for cell in column] for column, kind in zip(columns, types)))
    return Table(name, tuple(map(Column, names, types)), tuple(cells))


def markdown(lines: list[str]) -> Table:
    name, head, _, *body = lines
    split = [[unescaped(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (head, *body)]
    return table(name.removeprefix("## "), split[0], split[1:])


def comma_separated(lines: list[str]) -> Table:
    head, *body = ([unescaped(cell) for cell in line] for line in csv.reader(lines[1:]))
    return table(lines[0], head, body)


def json_lines(lines: list[str]) -> Table:
    rows = [json.loads(line) for line in lines[1:]]
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    return table(lines[0], list(rows[0]), cells)


PAIR = r'("(?:[^"\\]|\\.)*"|[^;:]*?): ("(?:[^"\\]|\\.)*"|.*?)(?:; |$)'


def pairs(lines: list[str]) -> Table:
    rows = [[(plain(name), plain(value)) for name, value in re.findall(PAIR, line)] for line in lines[1:]]
    return table(lines[0], [name for name, _ in rows[0]], [[value for _, value in row] for row in rows])


def plain(cell: str) -> str:
    return json.loads(cell) if cell.startswith('"') else cell


def unescaped(cell: str) -> str:
    marks = {"\\": "\\", "|": "|", "n": "\n", "r": "\r"}
    return re.sub(r"\\(.)", lambda found: marks[found[1]], cell)


READERS = {"markdown": markdown, "csv": comma_separated, "json": json_lines, "pairs": pairs}
