"""A question as a structure: what is selected, from which rows, and how it is put together. SQL is written from it here.

The structure has two readers that know nothing of each other: this file's SQL, which a database executes, and `run` of
`executors`, which follows it over lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longspan.evaluation.tables.pool import Database, Value

FAMILIES = ("retrieval", "computation", "association")


@dataclass(frozen=True)
class Ref:
    """A column of a table."""

    table: str
    column: str


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with a value; an empty cell fulfils none."""

    ref: Ref
    op: str
    value: Value


@dataclass(frozen=True)
class Item:
    """What is selected or ordered by: a column, an aggregate of one, or (no column) the number of rows."""

    ref: Ref | None
    aggregate: str = ""
    different: bool = False
    """Count each value once."""


@dataclass(frozen=True)
class Join:
    """A table that comes in: rows of the ones before with the same value."""

    known: Ref
    new: Ref


@dataclass(frozen=True)
class Having:
    """Groups that stay."""

    item: Item
    op: str
    value: int | float


@dataclass(frozen=True)
class Query:
    """One column or aggregate over rows.

    Attributes:
        joins: tables that come in, in this order.
        where: conditions that all hold.
        different: each value once (SELECT DISTINCT).
        order, descending, limit: the first so many, by this.
        decimals: digits behind the point that the answer is rounded to; None leaves values as they are.
    """

    family: str
    table: str
    item: Item
    joins: tuple[Join, ...] = ()
    where: tuple[Condition, ...] = ()
    different: bool = False
    group: Ref | None = None
    having: Having | None = None
    order: Item | None = None
    descending: bool = False
    limit: int | None = None
    decimals: int | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables it reads."""
        return (self.table, *(join.new.table for join in self.joins))

    @property
    def ordered(self) -> bool:
        """Whether the order of the answers counts."""
        return self.order is not None

    @property
    def columns(self) -> Mapping[str, set[str]]:
        """Columns that WHERE, SELECT, GROUP, ORDER and JOIN use, by table; a table that only gives rows has none."""
        found: dict[str, set[str]] = {name: set() for name in self.tables}
        for ref in self.refs:
            found[ref.table].add(ref.column)
        return found

    @property
    def refs(self) -> Iterator[Ref]:
        """Every column it uses, as often as it does."""
        yield from (condition.ref for condition in self.where)
        for join in self.joins:
            yield from (join.known, join.new)
        items = (self.item, self.order, self.having.item if self.having else None)
        yield from (item.ref for item in items if item is not None and item.ref is not None)
        if self.group is not None:
            yield self.group


def cells_needed(query: Query, database: Database) -> int:
    """Rows scanned times columns used, summed over the tables; a table that only gives rows counts one column."""
    return sum(len(database.table(name).rows) * max(1, len(columns)) for name, columns in query.columns.items())


# ------------------------------------------------------------------------------------------------------------------- SQL


def sql(query: Query) -> str:
    """The query as one SELECT."""
    qualified = bool(query.joins)
    parts = [f"SELECT {'DISTINCT ' if query.different else ''}{_item(query.item, qualified)}", f"FROM {name(query.table)}"]
    parts += [f"JOIN {name(j.new.table)} ON {_ref(j.known, True)} = {_ref(j.new, True)}" for j in query.joins]
    if query.where:
        parts.append("WHERE " + " AND ".join(f"{_ref(c.ref, qualified)} {c.op} {literal(c.value)}" for c in query.where))
    if query.group is not None:
        parts.append(f"GROUP BY {_ref(query.group, qualified)}")
    if query.having is not None:
        parts.append(f"HAVING {_item(query.having.item, qualified)} {query.having.op} {literal(query.having.value)}")
    if query.order is not None:
        parts.append(f"ORDER BY {_item(query.order, qualified)} {'DESC' if query.descending else 'ASC'}")
    if query.limit is not None:
        parts.append(f"LIMIT {query.limit}")
    return " ".join(parts)


def name(identifier: str) -> str:
    """A name as SQL quotes it."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(value: Value) -> str:
    """A value as SQL writes it."""
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def _ref(ref: Ref, qualified: bool) -> str:
    return f"{name(ref.table)}.{name(ref.column)}" if qualified else name(ref.column)


def _item(item: Item, qualified: bool) -> str:
    if item.ref is None:
        return "COUNT(*)"
    column = _ref(item.ref, qualified)
    return f"{item.aggregate.upper()}({'DISTINCT ' if item.different else ''}{column})" if item.aggregate else column
