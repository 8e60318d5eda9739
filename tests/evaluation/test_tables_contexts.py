import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import Key, total_length
from longspan.evaluation.tables.contexts import Costs, choose, log_uniform, supply
from longspan.evaluation.tables.executors import same, select
from longspan.evaluation.tables.generator import TooLong, Wishes, candidates, draft, fill, filled
from longspan.evaluation.tables.pool import Column, Own, Table
from longspan.evaluation.tables.queries import FAMILIES, sql
from longspan.evaluation.tables.schemas import synthetic_sources
from longspan.evaluation.tables.serialise import FORMS
from longspan.registry import Refused

SOURCES = synthetic_sources("en")
LENGTH = 1600


def first(family, index=0, length=LENGTH, **wishes):
    key = Key("tablelong", length, 0, index)
    return next(candidates(key, SOURCES, Wishes(family, **wishes), tiny_tokenizer())), key


@given(st.lists(st.integers(5, 60), max_size=40), st.integers(0, 900), st.integers(0, 20))
def test_rows_are_chosen_within_the_budget(costs, budget, slack):
    taken = choose(costs, budget, slack)
    total = sum(costs[i] for i in taken)
    assert len(set(taken)) == len(taken) and total <= budget
    left = budget - total
    if left > slack:  # then no row fits, and no exchange would bring it nearer
        out = [c for i, c in enumerate(costs) if i not in taken]
        assert all(c > left for c in out) and not any(0 < d - costs[i] <= left for i in taken for d in out)


def test_an_exchange_fills_what_no_row_fits():
    assert choose([10, 10, 14], 24, 0) == [0, 2] and choose([10, 10, 14], 24, 4) == [0, 1]
    assert choose([10, 10], 9, 0) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_as_long_as_asked_for_and_show_every_row_needed(form, family):
    tokenizer = tiny_tokenizer()
    for index in range(3):
        key = Key("tablelong", LENGTH, 0, index)
        made = filled(candidates(key, SOURCES, Wishes(family, serialisation=form), tokenizer), key, tokenizer)
        candidate, rows, example, length = made.candidate, made.rows, made.example, made.length
        assert length == total_length(example, tokenizer) and 0.98 * LENGTH <= length <= LENGTH
        assert all(needed <= set(rows[name]) for name, needed in candidate.result.needed.items())
        assert all(len(own) >= 2 for own in rows.values()) and set(rows) == set(candidate.order)
        shown = candidate.shown(rows)
        assert same(select(shown, sql(candidate.query)), candidate.result.values, candidate.query.ordered)
        lines = {example.context[a:b] + "\n" for a, b in example.meta["spans"]}
        assert lines == {candidate.lines[name][1][i] for name, needed in candidate.result.needed.items() for i in needed}
        assert [example.context[a:b].count("\n") for a, b in example.meta["documents"]] == [
            candidate.lines[t.name][0].count("\n") + len(t.rows) - 1 for t in shown.tables]


def test_a_target_below_the_needed_rows_is_refused_with_both_numbers():
    candidate, key = first("association")
    with pytest.raises(TooLong) as said:
        fill(candidate, 200, tiny_tokenizer(), key.rng("rows"))
    least = int(str(said.value).split()[-1].rstrip("."))
    assert "a target of 200 tokens" in str(said.value) and least > 200
    assert fill(candidate, least, tiny_tokenizer(), key.rng("rows")).length == least
    with pytest.raises(TooLong, match=f"expected at least {least}"):
        fill(candidate, least - 1, tiny_tokenizer(), key.rng("rows"))


def test_tables_that_run_out_are_refused():
    lamps = Own(Table("lamps", (Column("lamp", "text"), Column("watts", "integer")), tuple((f"L{i}", i) for i in range(20))))
    made = draft(Key("tablelong", 3000, 0, 0), [lamps], Wishes("retrieval", tables=1), tiny_tokenizer(), preferred=1)
    with pytest.raises(Refused, match=r"fill \d+ tokens, expected at least 2940"):
        made.build(1)
    made = draft(Key("tablelong", 3000, 0, 0), [lamps, *SOURCES], Wishes("retrieval"), tiny_tokenizer(), preferred=1)
    assert 2940 <= total_length(made.build(1), tiny_tokenizer()) <= 3000  # other tables fill


def test_tables_of_which_no_question_can_be_asked_are_refused():
    same_rows = Own(Table("t", (Column("a", "text"),), (("x",), ("x",))))
    with pytest.raises(Refused, match="no retrieval question with a clear answer"):
        draft(Key("tablelong", 500, 0, 0), [same_rows], Wishes("retrieval", tables=1), tiny_tokenizer(), preferred=1)


def drawn(n=40, association=False, room=3000, **more):
    costs = Costs(tiny_tokenizer(), "markdown")
    return [supply(SOURCES, association, random.Random(i), costs, room, **more) for i in range(n)]


def test_the_seeds_keys_bring_their_tables_before_others():
    for found in drawn(tables=4):
        chain = found.asked[0]
        schema = [source.name for source in SOURCES].index(chain)
        above = [SOURCES[i].name for i in range(3 * (schema // 3), schema)]
        assert len(found.database.tables) == 4 and set(above) <= {t.name for t in found.database.tables}


def test_associations_follow_keys():
    found = drawn(association=True, n=60)
    assert {len(one.asked) for one in found} == {2, 3}
    for one in found:
        assert all(any(k.child == a and k.parent == b for k in one.database.links) for a, b in zip(one.asked, one.asked[1:]))
    assert all(len(one.asked) == 2 for one in drawn(association=True, tables=2))
    with pytest.raises(Refused, match="association over depots: no column of one is a key of another"):
        supply(SOURCES[:1], True, random.Random(0), Costs(tiny_tokenizer(), "csv"), 500)
    with pytest.raises(Refused, match="without a table"):
        supply([], False, random.Random(0), Costs(tiny_tokenizer(), "csv"), 500)


def test_numbers_of_tables_and_cells_are_spread():
    found = drawn(n=120, room=12_000)
    tables = sorted(len(one.database.tables) for one in found)
    assert tables[0] == 1 and tables[-1] >= 25 and 3 <= median(tables) <= 10
    cells = sorted(one.cells for one in found)
    assert cells[0] < 20 and cells[-1] > 400
    draws = [log_uniform(1, 8, random.Random(i)) for i in range(900)]
    assert set(draws) == set(range(1, 9)) and abs(draws.count(1) / 900 - 0.315) < 0.05  # log 2 / log 9


def test_cells_can_be_asked_for():
    for index in range(4):
        candidate, key = first("computation", index, length=3000, cells=60, tables=4)
        meta = fill(candidate, 3000, tiny_tokenizer(), key.rng("rows")).example.meta
        assert 30 <= meta["cells_needed"] <= 70 and meta["tables"] == 4


def test_rows_are_counted_by_their_own_tokens():
    tokenizer, table = tiny_tokenizer(), SOURCES[2].take(6, random.Random(0), {})
    head, rows = Costs(tokenizer, "json").of(table)
    from longspan.evaluation.tables.serialise import serialise

    text, lines = serialise(table, "json")
    assert rows == [len(tokenizer.encode(line)) for line in lines] and head == len(tokenizer.encode(text + "\n"))
    assert Costs(tokenizer, "json").lines([]) == []
