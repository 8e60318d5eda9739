"""The exact checks of generated answers: two executors, order of rows and tables, serialisation, rows that aren't needed."""

import random
from dataclasses import replace

import pytest
from tables_read_back import as_text, read_back

from longspan.evaluation.tables.executors import run, same, select
from longspan.evaluation.tables.pool import Column, Database, Table
from longspan.evaluation.tables.queries import FAMILIES, Condition, Having, Item, Join, Query, Ref, sql
from longspan.evaluation.tables.questions import draw
from longspan.evaluation.tables.schemas import SCHEMAS, synthetic_sources
from longspan.evaluation.tables.serialise import FORMS
from longspan.evaluation.tables.verification import shuffled, unfit
from longspan.registry import Refused

ROWS = (16, 9, 5)


def tables(number: int, language: str = "en") -> tuple[Database, tuple[str, ...]]:
    """The three linked tables of a field, children first, and another one; and the names that a join follows."""
    rng, sources = random.Random(number), synthetic_sources(language)
    first = 3 * rng.randrange(len(SCHEMAS) // 3)
    drawn: dict[str, Table] = {}
    for rows, source in zip(reversed(ROWS), sources[first : first + 3]):
        drawn[source.name] = source.take(rows, rng, drawn)
    other = sources[(first + 3) % len(sources)]
    links = tuple(link for source in sources[first : first + 3] for link in source.links)
    chain = tuple(reversed(drawn))
    return Database((*drawn.values(), other.take(4, rng, {})), links), chain


def questions(family: str, n: int, language: str = "en", fit: bool = False):
    """`n` questions of a family over several databases: (database, query, result)."""
    found, number = [], 0
    while len(found) < n:
        database, chain = tables(number, language)
        rng = random.Random(f"{family}/{number}")
        for _ in range(20):
            asked = chain[: rng.choice((2, 2, 3))] if family == "association" else (rng.choice(chain),)
            query = draw(database, family, asked, rng)
            if query is not None:
                result = run(database, query)
                if not fit or not unfit(query, result):
                    found.append((database, query, result))
        number += 1
    return found[:n]


@pytest.mark.parametrize("family", FAMILIES)
def test_sql_and_python_agree_on_a_thousand_questions(family):
    for database, query, result in questions(family, 1000):
        # A tie may be cut in two ways; all else must agree, also what isn't kept.
        assert not result.clear or same(select(database, sql(query)), result.values, query.ordered), sql(query)


@pytest.mark.parametrize("family", FAMILIES)
def test_order_of_rows_and_tables_changes_no_answer(family):
    for number, (database, query, result) in enumerate(questions(family, 100, fit=True)):
        other = shuffled(database, random.Random(number))
        assert same(select(other, sql(query)), result.values, query.ordered)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_serialisation_changes_no_answer(form, language):
    for family in FAMILIES:
        for database, query, result in questions(family, 15, language, fit=True):
            back = read_back(as_text(database, form), form)
            assert same(select(back, sql(query)), result.values, query.ordered)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_not_needed_can_go(family):
    dropped = 0
    for number, (database, query, result) in enumerate(questions(family, 100, fit=True)):
        rng, kept = random.Random(number), []
        for table in database.tables:
            needed = result.needed.get(table.name, set())
            rows = [row for i, row in enumerate(table.rows) if i in needed or rng.random() < 0.5]
            dropped += len(table.rows) - len(rows)
            kept.append(table.of(rows))
        assert same(select(Database(tuple(kept)), sql(query)), result.values, query.ordered)
    assert dropped > 500


# ------------------------------------------------------------------------------------------------------- by hand

LAMPS = Table("lamps", (Column("lamp", "text"), Column("room", "text"), Column("watts", "integer"), Column("price", "real")), (
    ("A", "r1", 7, 1.5), ("B", "r2", None, 2.5), ("C", "r1", 9, 4.0), ("D", None, 9, None)))
ROOMS = Table("rooms", (Column("room", "text"), Column("size", "integer")), (("r1", 5), ("r2", 6)))
HOUSE = Database((LAMPS, ROOMS))
LAMP, ROOM, WATTS, PRICE = (Ref("lamps", name) for name in ("lamp", "room", "watts", "price"))
JOIN = (Join(ROOM, Ref("rooms", "room")),)


def query(item, **more):
    return Query("computation", "lamps", item, **more)


@pytest.mark.parametrize("asked,values", [
    (query(Item(LAMP), where=(Condition(WATTS, "<>", 7),)), ["C", "D"]),  # an empty cell fulfils no comparison
    (query(Item(None)), [4]), (query(Item(WATTS, "count")), [3]), (query(Item(WATTS, "count", different=True)), [2]),
    (query(Item(WATTS, "sum")), [25]), (query(Item(PRICE, "avg")), [8 / 3]), (query(Item(PRICE, "max")), [4.0]),
    (query(Item(PRICE, "sum"), where=(Condition(LAMP, "=", "D"),)), [None]),
    (query(Item(None), where=(Condition(LAMP, "=", "Z"),)), [0]),
    (query(Item(ROOM), different=True), ["r1", "r2", None]),
    (query(Item(LAMP), order=Item(PRICE), descending=True, limit=2), ["C", "B"]),
    (query(Item(ROOM), group=ROOM, having=Having(Item(None), ">=", 2)), ["r1"]),
    (query(Item(ROOM), group=ROOM, order=Item(PRICE, "sum"), descending=True, limit=1), ["r1"]),
    (query(Item(Ref("rooms", "size")), joins=JOIN, where=(Condition(WATTS, ">", 8),)), [5]),  # D has no room
    (query(Item(Ref("rooms", "size"), "sum"), joins=JOIN), [16]),
])
def test_both_executors_give_the_right_answer(asked, values):
    result = run(HOUSE, asked)
    assert same(result.values, values, asked.ordered) and same(select(HOUSE, sql(asked)), values, asked.ordered)


def test_needed_rows_are_those_behind_the_answer():
    assert run(HOUSE, query(Item(LAMP), where=(Condition(WATTS, "=", 9),))).needed == {"lamps": {2, 3}}
    assert run(HOUSE, query(Item(Ref("rooms", "size"), "sum"), joins=JOIN)).needed == {"lamps": {0, 1, 2}, "rooms": {0, 1}}


def test_ties_and_empty_values_make_an_order_unclear():
    by_watts = query(Item(LAMP), order=Item(WATTS), descending=True, limit=1)
    assert not run(HOUSE, by_watts).clear and not run(HOUSE, replace(by_watts, limit=2)).clear
    assert run(HOUSE, query(Item(LAMP), order=Item(PRICE), descending=True, limit=3)).clear
    assert not run(HOUSE, query(Item(LAMP), order=Item(PRICE), limit=1)).clear  # the empty price is the smallest in SQL


@pytest.mark.parametrize("statement", ["DELETE FROM lamps", "INSERT INTO rooms VALUES ('r9', 1)", "DROP TABLE lamps",
                                       "UPDATE rooms SET size = 0", "CREATE TABLE x (y)", "PRAGMA user_version = 3",
                                       "ATTACH DATABASE ':memory:' AS other"])
def test_sql_that_writes_is_refused(statement):
    with pytest.raises(Refused, match="does more than read; expected one SELECT over lamps, rooms"):
        select(HOUSE, statement)


@pytest.mark.parametrize("statement", ["SELECT 1; DELETE FROM lamps", "SELECT nothing FROM lamps", "SELEC"])
def test_sql_that_is_no_select_is_refused(statement):
    with pytest.raises(Refused, match="isn't understood"):
        select(HOUSE, statement)


def test_names_and_values_are_quoted():
    odd = Database((Table('a "b"', (Column("select", "text"), Column("x y", "integer")), (("it's", 1), ("so", 2))),))
    asked = Query("retrieval", 'a "b"', Item(Ref('a "b"', "x y")), where=(Condition(Ref('a "b"', "select"), "=", "it's"),))
    assert sql(asked) == '''SELECT "x y" FROM "a ""b""" WHERE "select" = 'it''s\''''
    assert select(odd, sql(asked)) == run(odd, asked).values == [1]


def test_answers_are_compared_as_multisets_unless_ordered():
    assert same([1, 2, 2], [2, 1, 2], False) and not same([1, 2, 2], [1, 1, 2], False) and not same([1, 2], [2, 1], True)
    assert same([0.1 + 0.2], [0.3], True) and same([None, "a", 1], ["a", 1, None], False) and not same([], [0], False)
