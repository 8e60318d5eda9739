"""Questions of three families, drawn over tables.

    retrieval     filter and project
    computation   COUNT, SUM, AVG, MIN, MAX, ORDER BY LIMIT, GROUP BY HAVING, DISTINCT
    association   the same over two or three joined tables

Conditions are taken from a row that is there, so that something fulfils them together. A draw may still be unfit (too many
values, a tie): whoever asks draws again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from longspan.evaluation.tables.executors import run
from longspan.evaluation.tables.pool import Database, Link, Value, is_key
from longspan.evaluation.tables.queries import Condition, Having, Item, Join, Query, Ref
from longspan.registry import Refused

DECIMALS = 2
MOST_CONDITIONS = 3
MOST_ORDERED = 5
LEAST_GROUP = 2


def draw(database: Database, family: str, tables: Sequence[str], rng: Random) -> Query | None:
    """A question of a family over some of the tables, joined from the first one on; None where these columns give none.

    Raises:
        Refused: no table; tables to join that have no link.
    """
    if not tables:
        raise Refused("a question without a table; expected at least one.")
    site = _Site(database, family, tuple(tables), rng)
    filters = family == "retrieval" or (family == "association" and rng.random() < 0.4)
    query = site.retrieval() if filters else site.computation()
    return query if query is not None and needs_joins(query) else None


def needs_joins(query: Query) -> bool:
    """Whether no table could be left out: each one that joins a single other one gives a column beside its key."""
    ends = [ref for join in query.joins for ref in (join.known, join.new)]
    used = {ref.table for ref in replace(query, joins=()).refs}
    return all(table in used for table in query.tables if sum(ref.table == table for ref in ends) == 1)


@dataclass(frozen=True)
class _Site:
    """Where a question is drawn: its tables, joined."""

    database: Database
    family: str
    tables: tuple[str, ...]
    rng: Random

    def joins(self) -> tuple[Join, ...]:
        return tuple(join_of(self.database.links, self.tables[:i], self.tables[i]) for i in range(1, len(self.tables)))

    # -- columns

    def columns(self, *types: str) -> list[Ref]:
        """Columns of these types (all if none is given); the columns that join are left out where there are joins."""
        joining = {ref for join in self.joins() for ref in (join.known, join.new)}
        return [Ref(name, c.name) for name in self.tables for c in self.database.table(name).columns
                if (not types or c.type in types) and Ref(name, c.name) not in joining]

    def values(self, ref: Ref) -> list[Value]:
        return self.database.table(ref.table).values(ref.column)

    def categories(self) -> list[Ref]:
        """Columns whose values come again."""
        return [ref for ref in self.columns("text", "integer", "date") if self._repeats(ref)]

    def _repeats(self, ref: Ref) -> bool:
        values = self.values(ref)
        return 2 <= len(set(values)) <= len(values) / LEAST_GROUP

    def keys(self) -> list[Ref]:
        return [ref for ref in self.columns("text", "integer") if is_key(self.values(ref))]

    # -- conditions

    def conditions(self, least: int, most: int, but: Sequence[Ref] = ()) -> tuple[Condition, ...] | None:
        """Conditions that one row fulfils; None where the tables give no such row."""
        row = self._row()
        if row is None:
            return None
        known = [(ref, value) for ref in self.columns() if ref not in but and (value := row[ref]) is not None]
        known = [(ref, value) for ref, value in known if not isinstance(value, str) or len(value) <= 60]
        if len(known) < least:
            return None
        taken = self.rng.sample(known, min(len(known), self.rng.randint(least, most)))
        return tuple(Condition(ref, self._comparison(ref), value) for ref, value in taken)

    def _row(self) -> dict[Ref, Value] | None:
        """One row after joining, by column."""
        key = Query(self.family, self.tables[0], Item(None), self.joins())
        first = self.database.table(self.tables[0])
        start = self.rng.randrange(len(first.rows))
        one = Database(tuple(t.of(t.rows[start : start + 1]) if t.name == first.name else t for t in self.database.tables))
        needed = run(one, key).needed if self.joins() else {first.name: {0}}
        found: dict[Ref, Value] = {}
        for name in self.tables:
            if not needed[name]:
                return None
            table, number = one.table(name), min(needed[name])
            found |= {Ref(name, c.name): cell for c, cell in zip(table.columns, table.rows[number])}
        return found

    def _comparison(self, ref: Ref) -> str:
        table = self.database.table(ref.table)
        kind = table.columns[table.at(ref.column)].type
        if kind == "text":
            return "="
        return self.rng.choice((">=", "<=", "=") if kind == "integer" and self._repeats(ref) else (">=", "<="))

    # -- families

    def retrieval(self) -> Query | None:
        """Which values do the rows have that fulfil some conditions?"""
        target = self.rng.choice(self.columns() or [None])
        if target is None:
            return None
        if self.rng.random() < 0.3 and (keys := [key for key in self.keys() if key != target]):
            key = self.rng.choice(keys)
            where = self.conditions(1, 1, but=[ref for ref in self.columns() if ref != key])
        else:
            where = self.conditions(1, MOST_CONDITIONS, but=[target, *self.keys()])
        return None if where is None else Query(self.family, self.tables[0], Item(target), self.joins(), where)

    def computation(self) -> Query | None:
        """A figure over rows, the first ones in an order, or groups."""
        forms = (self._count, self._figure, self._figure, self._order, self._having, self._group_order, self._different,
                 self._count_different)
        where = () if self.rng.random() < 0.4 else self._filters()
        query = None if where is None else self.rng.choice(forms)(where)
        if query is None:
            return None
        fixed = query.group or (query.item.ref if query.different or query.item.different else None)
        return None if any(condition.ref == fixed for condition in query.where) else query

    def _filters(self) -> tuple[Condition, ...] | None:
        """Conditions that may hold of several rows."""
        return self.conditions(1, 2, but=self.keys())

    def _query(self, item: Item, where: tuple[Condition, ...], **more: object) -> Query:
        return Query(self.family, self.tables[0], item, self.joins(), where, **more)  # type: ignore[arg-type]

    def _count(self, where: tuple[Condition, ...]) -> Query | None:
        where = where or self._filters() or ()
        return self._query(Item(None), where) if where else None

    def _figure(self, where: tuple[Condition, ...]) -> Query | None:
        item = self._number(self.rng.choice(("sum", "avg", "min", "max")))
        return None if item is None else self._query(item, where, decimals=self._decimals(item))

    def _order(self, where: tuple[Condition, ...]) -> Query | None:
        by, what = self.columns("real", "integer", "date"), self.keys() or self.columns("text")
        if not by or not what:
            return None
        return self._query(Item(self.rng.choice(what)), where, order=Item(self.rng.choice(by)),
                           limit=self.rng.randint(1, MOST_ORDERED), descending=self.rng.random() < 0.5)

    def _having(self, where: tuple[Condition, ...]) -> Query | None:
        group = self.rng.choice(self.categories() or [None])
        if group is None:
            return None
        item = Item(None) if self.rng.random() < 0.6 else self._number(self.rng.choice(("sum", "min", "max"))) or Item(None)
        figures = [v for v in run(self.database, self._query(item, where, group=group)).values if isinstance(v, (int, float))]
        op = self.rng.choice((">=", "<="))
        figures = [v for v in figures if v != (min(figures) if op == ">=" else max(figures))]  # some groups must go
        if not figures:
            return None
        bound = self.rng.choice(figures)
        bound = int(bound) if item.aggregate == "sum" else bound  # a sum of reals depends on its order in the last digits
        return self._query(Item(group), where, group=group, having=Having(item, op, bound))

    def _group_order(self, where: tuple[Condition, ...]) -> Query | None:
        group = self.rng.choice(self.categories() or [None])
        item = Item(None) if self.rng.random() < 0.5 else self._number(self.rng.choice(("sum", "avg", "max", "min")))
        if group is None or item is None:
            return None
        return self._query(Item(group), where, group=group, order=item, limit=self.rng.randint(1, 2),
                           descending=self.rng.random() < 0.5)

    def _different(self, where: tuple[Condition, ...]) -> Query | None:
        target = self.rng.choice(self.categories() or [None])
        return None if target is None else self._query(Item(target), where, different=True)

    def _count_different(self, where: tuple[Condition, ...]) -> Query | None:
        target = self.rng.choice(self.categories() or [None])
        return None if target is None else self._query(Item(target, "count", different=True), where)

    def _number(self, aggregate: str) -> Item | None:
        """An aggregate of a numeric column."""
        found = self.columns("real", "integer")
        return Item(self.rng.choice(found), aggregate) if found else None

    def _decimals(self, item: Item) -> int | None:
        assert item.ref is not None
        table = self.database.table(item.ref.table)
        is_real = table.columns[table.at(item.ref.column)].type == "real"
        return DECIMALS if item.aggregate == "avg" or (item.aggregate == "sum" and is_real) else None


def join_of(links: Sequence[Link], known: Sequence[str], new: str) -> Join:
    """How a table joins the ones before it.

    Raises:
        Refused: no link.
    """
    for link in links:
        if link.child in known and link.parent == new:
            return Join(Ref(link.child, link.column), Ref(new, link.key))
        if link.parent in known and link.child == new:
            return Join(Ref(link.parent, link.key), Ref(new, link.column))
    raise Refused(f"no key links {new!r} with {', '.join(known)}; expected tables that share one.")
