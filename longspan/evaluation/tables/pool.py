"""The table pool: tables with typed columns and the keys that link them, from CSV files or drawn from schemas.

A *source* gives a table of as many rows as are asked for. Types are integer, real, text and date (YYYY-MM-DD); None is an empty
cell. A column links its table to another one where it holds that table's key.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Protocol

from longspan.registry import Refused, nearest

Value = int | float | str | None
TYPES = ("integer", "real", "text", "date")
FEWEST_ROWS = 2
LARGEST = 2**63 - 1
"""Of an integer that a database holds."""


@dataclass(frozen=True)
class Column:
    """A column's name and type."""

    name: str
    type: str

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise Refused(f"column {self.name!r}: {nearest(self.type, TYPES, 'type')}")


@dataclass(frozen=True)
class Table:
    """A table. Names are compared without regard to case, as SQL does.

    Raises:
        Refused: no column, a name given twice, a row of another length.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise Refused(f"table {self.name!r} has no columns; expected at least one.")
        seen: set[str] = set()
        for column in self.columns:
            if column.name.lower() in seen:
                raise Refused(f"table {self.name!r} has two columns {column.name!r}; expected each name once.")
            seen.add(column.name.lower())
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise Refused(f"table {self.name!r}: row {number} has {len(row)} cells; expected {len(self.columns)}, one for "
                              "each column.")

    def at(self, column: str) -> int:
        """Index of a column."""
        for i, found in enumerate(self.columns):
            if found.name == column:
                return i
        raise Refused(f"table {self.name!r}: {nearest(column, [c.name for c in self.columns], 'column')}")

    def values(self, column: str) -> list[Value]:
        """A column's cells, row by row."""
        at = self.at(column)
        return [row[at] for row in self.rows]

    def of(self, rows: Iterable[tuple[Value, ...]]) -> Table:
        """The same columns with other rows."""
        return Table(self.name, self.columns, tuple(rows))


@dataclass(frozen=True)
class Link:
    """A foreign key: `child.column` holds `parent.key`."""

    child: str
    column: str
    parent: str
    key: str


@dataclass(frozen=True)
class Database:
    """Tables and the links among them.

    Raises:
        Refused: no table, or a name given twice.
    """

    tables: tuple[Table, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.tables:
            raise Refused("a question without a table; expected at least one.")
        names = [table.name.lower() for table in self.tables]
        if twice := [name for name in names if names.count(name) > 1]:
            raise Refused(f"two tables {twice[0]!r}; expected each name once.")

    def table(self, name: str) -> Table:
        for found in self.tables:
            if found.name == name:
                return found
        raise Refused(nearest(name, [t.name for t in self.tables], "table"))


def reached(links: Sequence[Link], seed: str) -> list[str]:
    """The tables that a table's foreign keys reach, the nearest first; not itself."""
    found = [seed]
    for name in found:
        found += [k.parent for k in links if k.child == name and k.parent not in found]
    return found[1:]


class Source(Protocol):
    """Where a table comes from."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def identity(self) -> str:
        """What no other source has."""

    @property
    def links(self) -> tuple[Link, ...]:
        """The table's foreign keys."""

    @property
    def most(self) -> int | None:
        """How many rows there are; None without an end."""

    def take(self, rows: int, rng: Random, parents: Mapping[str, Table]) -> Table:
        """A table of so many rows, drawn (of all, where there are fewer), whose keys are those of the parents given."""


# ------------------------------------------------------------------------------------------------------------ CSV files


@dataclass(frozen=True)
class Own:
    """A table of the user's."""

    table: Table
    links: tuple[Link, ...] = ()

    @property
    def name(self) -> str:
        return self.table.name

    @cached_property
    def identity(self) -> str:
        return hashlib.sha256(repr(self.table).encode()).hexdigest()

    @property
    def most(self) -> int:
        return len(self.table.rows)

    def take(self, rows: int, rng: Random, parents: Mapping[str, Table]) -> Table:
        """Rows drawn without regard to order, those first whose keys the parents hold; they stay in the file's order."""
        held = [(self.table.at(k.column), set(parents[k.parent].values(k.key))) for k in self.links if k.parent in parents]
        order = rng.sample(range(self.most), self.most)
        order.sort(key=lambda i: sum(self.table.rows[i][at] not in keys for at, keys in held))
        return self.table.of(self.table.rows[i] for i in sorted(order[:rows]))


def own_sources(files: Sequence[str | Path]) -> list[Own]:
    """CSV files as sources, with the links that their columns show.

    Raises:
        Refused: as `read_csv`; two files of one name.
    """
    tables = [read_csv(file) for file in files]
    if not tables:
        return []
    links = find_links(Database(tuple(tables)).tables)
    return [Own(table, tuple(k for k in links if k.child == table.name)) for table in tables]


def find_links(tables: Sequence[Table]) -> list[Link]:
    """Foreign keys by name and content: the column's name is that of another table's column without repeats or empty cells,
    which holds all of its values. Where both are keys, the later table is the child."""
    keys = {(t.name, c.name): set(t.values(c.name)) for t in tables for c in t.columns if is_key(t.values(c.name))}
    found: list[Link] = []
    for i, child in enumerate(tables):
        for column in child.columns:
            held = {value for value in child.values(column.name) if value is not None}
            for j, parent in enumerate(tables):
                key = keys.get((parent.name, column.name))
                both = (child.name, column.name) in keys
                if i != j and key is not None and held and held <= key and (not both or i > j):
                    found.append(Link(child.name, column.name, parent.name, column.name))
    return found


def is_key(values: Sequence[Value]) -> bool:
    """Whether no cell is empty and none comes twice."""
    return None not in values and len(set(values)) == len(values)


def read_csv(file: str | Path) -> Table:
    """A CSV file (UTF-8, comma separated, a line of names first) as a table named like the file.

    A column is integer, real or date where all of its cells that aren't empty are, else text.

    Raises:
        Refused: no such file, not UTF-8, fewer than two rows, rows of unequal length, a column without a name or with
            another's.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise Refused(f"{str(file)!r}: no such file; expected a CSV file.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as opened:
            lines = [line for line in csv.reader(opened) if line]
    except UnicodeDecodeError:
        raise Refused(f"{str(file)!r}: not UTF-8; expected a CSV file in UTF-8.") from None
    except csv.Error as error:
        raise Refused(f"{str(file)!r}: {error}; expected a CSV file.") from None
    if len(lines) < 1 + FEWEST_ROWS:
        raise Refused(f"{str(file)!r}: {max(0, len(lines) - 1)} rows below the names; expected at least {FEWEST_ROWS}.")
    names, body = [name.strip() for name in lines[0]], lines[1:]
    for number, line in enumerate(body, 1):
        if len(line) != len(names):
            raise Refused(f"{str(file)!r}: row {number} has {len(line)} cells; expected {len(names)}, one for each column.")
    if "" in names:
        raise Refused(f"{str(file)!r}: column {names.index('') + 1} has no name; expected a name for each.")
    cells = [[cell.strip() for cell in column] for column in zip(*body)]
    types = [type_of(column) for column in cells]
    typed = [[_typed(cell, kind) for cell in column] for column, kind in zip(cells, types)]
    return Table(path.stem, tuple(map(Column, names, types)), tuple(zip(*typed)))


_WHOLE, _REAL, _DATE = r"[+-]?(0|[1-9]\d*)", r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?", r"\d{4}-\d\d-\d\d"


def type_of(cells: Sequence[str]) -> str:
    """The narrowest type that all cells have, empty ones aside; numbers with zeros in front are text."""
    filled = [cell for cell in cells if cell]
    if filled and all(re.fullmatch(_WHOLE, cell) and abs(int(cell)) <= LARGEST for cell in filled):
        return "integer"
    if filled and all(re.fullmatch(_REAL, cell) and not re.match(r"[+-]?0\d", cell) for cell in filled):
        return "real"
    return "date" if filled and all(re.fullmatch(_DATE, cell) for cell in filled) else "text"


def _typed(cell: str, kind: str) -> Value:
    if not cell:
        return None
    return int(cell) if kind == "integer" else float(cell) if kind == "real" else cell
