import random

import pytest

from longspan.evaluation.tables import verification
from longspan.evaluation.tables.executors import run
from longspan.evaluation.tables.pool import Column, Database, Table
from longspan.evaluation.tables.queries import Condition, Having, Item, Query, Ref
from longspan.evaluation.tables.verification import another, changes, doubted, on_edge, rounded, shuffled, unfit

LAMPS = Table("lamps", tuple(map(Column, ("lamp", "room", "watts", "price"), ("text", "text", "integer", "real"))), tuple(
    (f"L{i}", f"r{i % 3}" if i != 5 else None, 5 + i // 2, 1.25 if i == 0 else 2.0 + i) for i in range(12)))
OTHER = Table("boxes", (Column("box", "text"), Column("size", "integer")), (("b1", 1), ("b2", 2)))
HOUSE = Database((LAMPS, OTHER))
LAMP, ROOM, WATTS, PRICE = (Ref("lamps", c.name) for c in LAMPS.columns)


def query(item, *where, **more):
    return Query("computation", "lamps", item, where=tuple(where), **more)


def reason(asked):
    return unfit(asked, run(HOUSE, asked))


GOOD = (query(Item(PRICE), Condition(LAMP, "=", "L3")), query(Item(PRICE, "avg"), decimals=2),
        query(Item(None), Condition(WATTS, ">", 6)),
        query(Item(LAMP), order=Item(PRICE), descending=True, limit=3),
        query(Item(ROOM), Condition(WATTS, "<", 7), group=ROOM, having=Having(Item(None), ">=", 2)))


@pytest.mark.parametrize("asked", GOOD)
def test_clear_questions_are_kept_and_verified(asked):
    assert reason(asked) == "" and doubted(HOUSE, asked, random.Random(0)) == ""


@pytest.mark.parametrize("asked,why", [
    (query(Item(LAMP), Condition(LAMP, "=", "Z")), "empty"), (query(Item(LAMP)), "12 values, more than 10"),
    (query(Item(ROOM), Condition(LAMP, "=", "L5")), "an empty value"),
    (query(Item(PRICE, "sum"), Condition(LAMP, "=", "Z")), "an empty value"),
    (query(Item(LAMP), order=Item(WATTS), limit=1), "tie"), (query(Item(LAMP), order=Item(WATTS), limit=2), "tie"),
    (query(Item(LAMP), Condition(WATTS, ">", 9), order=Item(PRICE), limit=5), "there are 2 of the 5"),
    (query(Item(PRICE, "avg"), Condition(LAMP, "=", "L0"), decimals=1), "between two roundings"),
])
def test_unclear_answers_are_not_kept(asked, why):
    assert why in reason(asked) and why in doubted(HOUSE, asked, random.Random(0))


def test_an_answer_that_depends_on_the_order_of_rows_is_caught(monkeypatch):
    monkeypatch.setattr(verification, "select", lambda database, statement: [database.table("lamps").rows[3][3]])
    assert doubted(HOUSE, GOOD[0], random.Random(0)) == "the answer depends on the order of rows"


def test_a_question_that_no_cell_changes_is_caught():
    assert "no cell" in doubted(HOUSE, query(Item(None)), random.Random(0))


def test_executors_that_disagree_are_caught(monkeypatch):
    monkeypatch.setattr(verification, "select", lambda database, statement: [7.5])
    assert doubted(HOUSE, GOOD[0], random.Random(0)) == "SQL gives [7.5], the second executor [5.0]"


def test_a_dependence_on_another_table_is_caught(monkeypatch):
    real = verification.select
    monkeypatch.setattr(verification, "select",
                        lambda database, statement: real(database, statement) if len(database.tables) == 2 else [0])
    assert "a table that the question doesn't name" in doubted(HOUSE, GOOD[0], random.Random(0))


def test_changes_touch_one_needed_cell_each():
    asked = query(Item(PRICE), Condition(ROOM, "=", "r1"))
    needed = run(HOUSE, asked).needed
    found = list(changes(HOUSE, asked, needed, random.Random(0)))
    assert len(found) == 2 * len(needed["lamps"])
    for changed in found:
        both = enumerate(zip(changed.table("lamps").rows, LAMPS.rows))
        cells = [(i, j) for i, (new, old) in both for j in range(4) if new[j] != old[j]]
        assert len(cells) == 1 and cells[0][0] in needed["lamps"] and cells[0][1] in (1, 3)
        assert changed.table("boxes") == OTHER


def test_another_value_is_of_the_same_kind_and_differs():
    for at in range(4):
        for seed in range(20):
            value = another(LAMPS, 2, at, random.Random(seed))
            assert value != LAMPS.rows[2][at] and (value is None or isinstance(value, (int, float)) == (at > 1))
    alone = Table("t", (Column("a", "text"),), (("x",), ("x",)))
    assert another(alone, 0, 0, random.Random(0)) == "x-"


def test_shuffling_keeps_rows_and_tables():
    other = shuffled(HOUSE, random.Random(1))
    assert set(other.table("lamps").rows) == set(LAMPS.rows) and other.table("lamps").rows != LAMPS.rows
    assert {t.name for t in other.tables} == {"lamps", "boxes"}


def test_rounding_and_its_edges():
    assert rounded([2.346, 7, "x"], 2) == [2.35, 7, "x"] and rounded([2.346], None) == [2.346]
    assert on_edge(0.125, 2) and on_edge(-0.125, 2) and not on_edge(0.126, 2) and not on_edge(0.125, None) and not on_edge(3, 2)
