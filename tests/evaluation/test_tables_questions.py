import random

import pytest

from longspan.evaluation.tables.pool import Column, Database, Link, Table
from longspan.evaluation.tables.queries import Condition, Having, Item, Join, Query, Ref, cells_needed, sql
from longspan.evaluation.tables.questions import draw, join_of, needs_joins
from longspan.evaluation.tables.wording import words
from longspan.registry import Refused

LAMPS = Table("lamps", tuple(map(Column, ("lamp", "room", "watts", "bought"), ("text", "text", "integer", "date"))), (
    ("A", "r1", 7, "2020-01-01"), ("B", "r2", 8, "2021-01-01"), ("C", "r1", 9, "2022-01-01"), ("D", "r2", 9, "2023-01-01")))
ROOMS = Table("rooms", tuple(map(Column, ("room", "size"), ("text", "real"))), (("r1", 5.5), ("r2", 6.0)))
LINKS = (Link("lamps", "room", "rooms", "room"),)
HOUSE = Database((LAMPS, ROOMS), LINKS)
LAMP, ROOM, WATTS, BOUGHT, SIZE = (*(Ref("lamps", c.name) for c in LAMPS.columns), Ref("rooms", "size"))
JOIN = (Join(ROOM, Ref("rooms", "room")),)
DATE = Condition(BOUGHT, ">=", "2021-01-01")

CASES = {
    "look up": (Query("retrieval", "lamps", Item(WATTS), where=(Condition(LAMP, "=", "B"),)),
                'SELECT "watts" FROM "lamps" WHERE "lamp" = \'B\'',
                'What is `watts` in the row of `lamps` where `lamp` is "B"?',
                '表「lamps」中满足「lamp」等于"B"的行，其「watts」是什么？'),
    "filter": (Query("retrieval", "lamps", Item(LAMP), where=(DATE, Condition(WATTS, "<=", 9))),
               'SELECT "lamp" FROM "lamps" WHERE "bought" >= \'2021-01-01\' AND "watts" <= 9',
               'List `lamp` for every row of `lamps` where `bought` is on or after "2021-01-01" and `watts` is at most 9',
               '「bought」不早于"2021-01-01"且「watts」至多为9的行，逐行列出「lamp」'),
    "mean": (Query("computation", "lamps", Item(WATTS, "avg"), decimals=2), 'SELECT AVG("watts") FROM "lamps"',
             "What is the mean of `watts` over the rows of `lamps`? Round to 2 decimals.",
             "「watts」的平均值是多少？结果保留 2 位小数。"),
    "order": (Query("computation", "lamps", Item(LAMP), order=Item(BOUGHT), descending=True, limit=2),
              'SELECT "lamp" FROM "lamps" ORDER BY "bought" DESC LIMIT 2',
              "Order the rows of `lamps` by `bought`, latest first, and list `lamp` of the first 2",
              "按「bought」从晚到早排序，依次列出前 2 行"),
    "having": (Query("computation", "lamps", Item(ROOM), group=ROOM, having=Having(Item(None), ">=", 2)),
               'SELECT "room" FROM "lamps" GROUP BY "room" HAVING COUNT(*) >= 2',
               "Group the rows of `lamps` by `room`. List the values of `room` for which the number of rows is at least 2.",
               "按「room」分组，列出行数至少为2的「room」取值"),
    "group order": (Query("computation", "lamps", Item(ROOM), group=ROOM, order=Item(WATTS, "sum"), limit=1),
                    'SELECT "room" FROM "lamps" GROUP BY "room" ORDER BY SUM("watts") ASC LIMIT 1',
                    "Order the values of `room` by the sum of `watts`, smallest first, and list the first 1",
                    "按「watts」之和从小到大排序"),
    "different": (Query("computation", "lamps", Item(ROOM), different=True), 'SELECT DISTINCT "room" FROM "lamps"',
                  "List each different value of `room` once, over the rows of `lamps`.", "列出「room」的每个不同取值"),
    "count different": (Query("computation", "lamps", Item(ROOM, "count", different=True)),
                        'SELECT COUNT(DISTINCT "room") FROM "lamps"',
                        "What is the number of different values of `room`", "「room」的不同取值个数是多少"),
    "join": (Query("association", "lamps", Item(None), JOIN, (Condition(SIZE, ">", 5.7), DATE)),
             'SELECT COUNT(*) FROM "lamps" JOIN "rooms" ON "lamps"."room" = "rooms"."room" WHERE "rooms"."size" > 5.7 AND '
             '"lamps"."bought" >= \'2021-01-01\'',
             "Put each row of `lamps` together with the row of `rooms` whose `room` is its `room`. How many rows of `lamps` are "
             "there where `rooms.size` is more than 5.7",
             "把表「lamps」的每一行与表「rooms」中「room」等于其「room」的那一行连接起来。"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_query_is_written_as_sql_and_in_two_languages(name):
    query, statement, english, chinese = CASES[name]
    assert sql(query) == statement
    assert english in words(query, HOUSE, "en") and chinese in words(query, HOUSE, "zh")
    assert 'begins with "Answer:"' in words(query, HOUSE, "en") and 'Answer:' in words(query, HOUSE, "zh")


def test_cells_needed_are_rows_scanned_times_columns_used():
    needed = {name: cells_needed(query, HOUSE) for name, (query, *_) in CASES.items()}
    assert needed["look up"] == 8 and needed["filter"] == 12 and needed["mean"] == 4 and needed["group order"] == 8
    assert needed["join"] == 4 * 2 + 2 * 2  # bought and room; size and room
    assert cells_needed(Query("computation", "lamps", Item(None)), HOUSE) == 4


def test_answers_are_ordered_and_rounded_where_the_query_says_so():
    assert [name for name, (query, *_) in CASES.items() if query.ordered] == ["order", "group order"]
    drawn = [draw(HOUSE, "computation", ("lamps",), random.Random(n)) for n in range(400)]
    assert {(q.item.aggregate, q.decimals) for q in drawn if q and q.item.aggregate} == {
        ("sum", None), ("avg", 2), ("min", None), ("max", None), ("count", None)}
    assert any(q and q.decimals == 2 and q.item == Item(SIZE, "sum") for q in (
        draw(HOUSE, "computation", ("rooms",), random.Random(n)) for n in range(200)))


def test_families_are_what_they_say():
    for n in range(200):
        rng = random.Random(n)
        if (query := draw(HOUSE, "retrieval", ("lamps",), rng)) is not None:
            assert query.where and not (query.item.aggregate or query.order or query.group or query.joins)
        if (query := draw(HOUSE, "computation", ("lamps",), rng)) is not None:
            assert not query.joins
            assert query.item.aggregate or query.order or query.group or query.different or query.item.ref is None
        if (query := draw(HOUSE, "association", ("lamps", "rooms"), rng)) is not None:
            assert query.tables == ("lamps", "rooms") and {ref.table for ref in query.refs} == {"lamps", "rooms"}


def test_an_association_needs_every_table_it_joins():
    idle = Query("association", "lamps", Item(LAMP), JOIN, (Condition(WATTS, ">", 7),))
    assert not needs_joins(idle)
    assert needs_joins(Query("association", "lamps", Item(LAMP), JOIN, (Condition(SIZE, ">", 5.7),)))
    chain = (*JOIN, Join(SIZE, Ref("sizes", "size")))  # rooms only bridge
    assert needs_joins(Query("association", "lamps", Item(LAMP), chain, (Condition(Ref("sizes", "name"), "=", "big"),)))


def test_conditions_are_fulfilled_by_a_row_that_is_there():
    from longspan.evaluation.tables.executors import run

    for n in range(200):
        query = draw(HOUSE, "association", ("lamps", "rooms"), random.Random(n))
        if query is not None and query.where:
            assert run(HOUSE, query).needed["lamps"]


def test_questions_without_a_table_or_a_link_are_refused():
    with pytest.raises(Refused, match="question without a table; expected at least one"):
        draw(HOUSE, "retrieval", (), random.Random(0))
    with pytest.raises(Refused, match="no key links 'rooms' with lamps"):
        join_of((), ("lamps",), "rooms")
    assert join_of(LINKS, ("rooms",), "lamps") == Join(Ref("rooms", "room"), ROOM)
