"""Two ways to an answer: a database that executes SQL, and plain Python that follows the query's structure over lists.

SQL is the authority; it runs in memory and may only read. The second way shares no code with the first. It also says which rows
the answer needs: those that a row after joining and WHERE was made of. A row that is not among them can go, or come, without any
change.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from longspan.evaluation.tables.pool import Database, Table, Value
from longspan.evaluation.tables.queries import Item, Query, Ref, name
from longspan.registry import Refused

# -------------------------------------------------------------------------------------------------------------- database

TYPE_NAMES = {"integer": "INTEGER", "real": "REAL", "text": "TEXT", "date": "TEXT"}
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


def select(database: Database, statement: str) -> list[Value]:
    """What a SELECT gives over the tables, row by row.

    Raises:
        Refused: SQL that writes, that has more than one statement, or that the database doesn't understand.
    """
    forbidden: list[int] = []

    def allow(action: int, *what: Any) -> int:
        if action in READS:
            return sqlite3.SQLITE_OK
        forbidden.append(action)
        return sqlite3.SQLITE_DENY

    connection = sqlite3.connect(":memory:")
    try:
        for table in database.tables:
            _fill(connection, table)
        connection.set_authorizer(allow)
        rows = connection.execute(statement).fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        what = "does more than read" if forbidden else f"isn't understood ({error})"
        known = ", ".join(table.name for table in database.tables)
        raise Refused(f"SQL {statement!r} {what}; expected one SELECT over {known}.") from None
    finally:
        connection.close()
    return [value for row in rows for value in row]


def _fill(connection: sqlite3.Connection, table: Table) -> None:
    columns = ", ".join(f"{name(column.name)} {TYPE_NAMES[column.type]}" for column in table.columns)
    connection.execute(f"CREATE TABLE {name(table.name)} ({columns})")
    marks = ", ".join("?" * len(table.columns))
    connection.executemany(f"INSERT INTO {name(table.name)} VALUES ({marks})", table.rows)


# ---------------------------------------------------------------------------------------------------------- plain Python

COMPARE: dict[str, Callable[[Any, Any], bool]] = {"=": eq, "<>": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
Combination = tuple[int, ...]
"""Row numbers, one for each of the query's tables."""


@dataclass(frozen=True)
class Result:
    """An answer.

    Attributes:
        values: in the query's order, or by first occurrence.
        needed: row numbers by table.
        clear: False where the order isn't: a tie among the values that order the first ones and the next, or an empty one.
    """

    values: list[Value]
    needed: Mapping[str, set[int]]
    clear: bool = True


def run(database: Database, query: Query) -> Result:
    """Follow a query's structure over the rows of its tables."""
    reader = _Reader(database, query.tables)
    combinations = [c for c in _joined(reader, query) if _holds(reader, query, c)]
    needed = {table: {c[i] for c in combinations} for i, table in enumerate(query.tables)}
    if query.group is not None:
        groups = list(_grouped(reader, query, combinations).values())
    elif query.item.aggregate or query.item.ref is None:
        groups = [combinations]
    else:
        groups = [[c] for c in combinations]
    if query.having is not None:
        bound, compare = query.having.value, COMPARE[query.having.op]
        of_groups = [(group, _value(reader, query.having.item, group)) for group in groups]
        groups = [group for group, value in of_groups if value is not None and compare(value, bound)]
    clear = True
    if query.order is not None:
        groups, clear = _first(reader, query, query.order, groups)
    values = [_value(reader, query.item, group) for group in groups]
    return Result(list(dict.fromkeys(values)) if query.different else values, needed, clear)


class _Reader:
    """Cells of the query's tables by row numbers."""

    def __init__(self, database: Database, tables: Sequence[str]) -> None:
        self.tables = [database.table(table) for table in tables]
        self.place = {table: i for i, table in enumerate(tables)}

    def column(self, ref: Ref) -> tuple[int, int]:
        """Which of the tables, and which of its columns."""
        i = self.place[ref.table]
        return i, self.tables[i].at(ref.column)

    def cells(self, ref: Ref, combinations: Sequence[Combination]) -> list[Value]:
        i, at = self.column(ref)
        rows = self.tables[i].rows
        return [rows[c[i]][at] for c in combinations]


def _joined(reader: _Reader, query: Query) -> list[Combination]:
    found: list[Combination] = [(i,) for i in range(len(reader.tables[0].rows))]
    for join in query.joins:
        i, at = reader.column(join.new)
        partners: dict[Value, list[int]] = {}
        for number, row in enumerate(reader.tables[i].rows):
            if row[at] is not None:
                partners.setdefault(row[at], []).append(number)
        keys = reader.cells(join.known, found)
        found = [(*c, number) for c, value in zip(found, keys) for number in partners.get(value, ())]
    return found


def _holds(reader: _Reader, query: Query, combination: Combination) -> bool:
    for condition in query.where:
        cell, = reader.cells(condition.ref, [combination])
        if cell is None or not COMPARE[condition.op](cell, condition.value):
            return False
    return True


def _grouped(reader: _Reader, query: Query, combinations: list[Combination]) -> dict[Value, list[Combination]]:
    assert query.group is not None
    groups: dict[Value, list[Combination]] = {}
    for value, combination in zip(reader.cells(query.group, combinations), combinations):
        groups.setdefault(value, []).append(combination)
    return groups


def _value(reader: _Reader, item: Item, group: Sequence[Combination]) -> Any:
    """An item over rows; of a plain column that of the first one."""
    if item.ref is None:
        return len(group)
    if not item.aggregate:
        return reader.cells(item.ref, group[:1])[0]
    cells: list[Any] = [cell for cell in reader.cells(item.ref, group) if cell is not None]
    if item.aggregate == "count":
        return len(set(cells)) if item.different else len(cells)
    if not cells:
        return None
    if item.aggregate in ("min", "max"):
        return min(cells) if item.aggregate == "min" else max(cells)
    total = sum(cells) if all(isinstance(cell, int) for cell in cells) else math.fsum(cells)
    return total if item.aggregate == "sum" else total / len(cells)


def _first(reader: _Reader, query: Query, order: Item, groups: list[list[Combination]]) -> tuple[list[list[Combination]], bool]:
    """The groups in the query's order, as many as it wants, and whether there is no doubt about them."""
    by = [(_value(reader, order, group), group) for group in groups]
    # As in SQL, empty values are the smallest.
    by.sort(key=lambda pair: (pair[0] is not None, pair[0] if pair[0] is not None else 0), reverse=query.descending)
    limit = len(by) if query.limit is None else query.limit
    watched = [value for value, _ in by[: limit + 1]]
    clear = None not in watched[:limit] and not any(close(a, b) for a, b in pairwise(watched))
    return [group for _, group in by[:limit]], clear


# ------------------------------------------------------------------------------------------------------------ comparison

TOLERANCE = 1e-9


def close(a: Value, b: Value) -> bool:
    """Equal values; numbers up to what the order of a sum does to them."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return a == b


def same(a: Sequence[Value], b: Sequence[Value], ordered: bool) -> bool:
    """Equal answers: in order where it counts, else as multisets."""
    if len(a) != len(b):
        return False
    if not ordered:
        a, b = sorted(a, key=_rank), sorted(b, key=_rank)
    return all(map(close, a, b))


def _rank(value: Value) -> tuple[int, Any]:
    return (0, 0) if value is None else (1, value) if isinstance(value, (int, float)) else (2, value)
