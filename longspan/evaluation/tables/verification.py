"""Which questions are kept, and what is checked of each.

*Kept* are answers that aren't empty, hold at most ten values (as many as are asked for) and no empty one, have no tie where they
are ordered or cut off, and don't lie between two roundings. *Verified* is that SQL and plain Python agree, that neither the order
of rows nor that of tables matters, that tables the question doesn't name can be deleted, and that some cell it needs can change
the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random

from longspan.evaluation.tables.executors import Result, run, same, select
from longspan.evaluation.tables.pool import Database, Table, Value
from longspan.evaluation.tables.queries import Query, sql

MOST_VALUES = 10
EDGE = 1e-6
"""How near to the middle of two roundings an answer may not lie, in units of the last digit."""
TRIES = 24
"""Cells that are changed before a question counts as one that no cell changes."""


def unfit(query: Query, result: Result) -> str:
    """Why an answer isn't kept; empty if it is."""
    values = result.values
    if not values:
        return "the answer is empty"
    if len(values) > MOST_VALUES:
        return f"the answer has {len(values)} values, more than {MOST_VALUES}"
    if query.limit is not None and len(values) < query.limit:
        return f"there are {len(values)} of the {query.limit} values asked for"
    if None in values:
        return "the answer has an empty value"
    if not result.clear:
        return "values tie where the answer is ordered"
    if any(on_edge(value, query.decimals) for value in values):
        return "a value lies between two roundings"
    return ""


def on_edge(value: Value, decimals: int | None) -> bool:
    """Whether rounding could go either way."""
    if decimals is None or not isinstance(value, float):
        return False
    scaled = abs(value) * 10**decimals
    return abs(scaled - math.floor(scaled) - 0.5) < EDGE


def rounded(values: list[Value], decimals: int | None) -> list[Value]:
    """The answer as it is asked for."""
    return [round(v, decimals) if decimals is not None and isinstance(v, float) else v for v in values]


def doubted(database: Database, query: Query, rng: Random) -> str:
    """Why a question over these tables fails verification; empty if it doesn't."""
    statement = sql(query)
    gold, second = select(database, statement), run(database, query)
    if not same(gold, second.values, query.ordered):
        return f"SQL gives {gold}, the second executor {second.values}"
    if reason := unfit(query, second):
        return reason
    if not same(gold, select(shuffled(database, rng), statement), query.ordered):
        return "the answer depends on the order of rows"
    alone = Database(tuple(table for table in database.tables if table.name in query.tables))
    if not same(gold, select(alone, statement), query.ordered):
        return "the answer depends on a table that the question doesn't name"
    tried = changes(alone, query, second.needed, rng)
    if all(same(gold, run(changed, query).values, query.ordered) for changed in tried):
        return "no cell that the question needs changes the answer"
    return ""


def shuffled(database: Database, rng: Random) -> Database:
    """The same tables in another order, with their rows in another order."""
    tables = [table.of(rng.sample(table.rows, len(table.rows))) for table in database.tables]
    return Database(tuple(rng.sample(tables, len(tables))), database.links)


def changes(database: Database, query: Query, needed: Mapping[str, set[int]], rng: Random) -> Iterator[Database]:
    """The tables with one needed cell changed, for some such cells."""
    cells = [(name, row, column) for name, columns in query.columns.items() for column in sorted(columns)
             for row in sorted(needed.get(name, ()))]
    for name, row, column in rng.sample(cells, min(TRIES, len(cells))):
        table = database.table(name)
        at = table.at(column)
        yield replaced(database, table, row, at, another(table, row, at, rng))


def replaced(database: Database, table: Table, row: int, at: int, value: Value) -> Database:
    """The tables with another value in one cell."""
    rows = list(table.rows)
    rows[row] = (*rows[row][:at], value, *rows[row][at + 1 :])
    return Database(tuple(table.of(rows) if t.name == table.name else t for t in database.tables), database.links)


def another(table: Table, row: int, at: int, rng: Random) -> Value:
    """Another value for a cell: one that the column holds elsewhere, or one beyond all of them."""
    old = table.rows[row][at]
    others = sorted({cells[at] for cells in table.rows if cells[at] is not None} - {old}, key=str)
    if isinstance(old, (int, float)):
        numbers = [cells[at] for cells in table.rows if isinstance(cells[at], (int, float))]
        others += [max(numbers) + 1, min(numbers) - 1]  # type: ignore[type-var, operator]
    elif not others:
        others = [f"{old}-" if old is not None else "-"]
    return rng.choice(others)
