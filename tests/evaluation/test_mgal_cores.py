import random

import pytest

from longspan.evaluation.mgal import LANGUAGES, TASKS, Unit, own
from longspan.evaluation.mgal.cores import FARTHEST, Asked, around, indices, placed, reachable
from longspan.evaluation.mgal.units import THIRDS, third

WIDE = Unit(own(), 5, 35)


def cores(task, k=20, wide=WIDE, turn="middle"):
    return list(Asked(task, 8, 3, "into").cores(k, wide, random.Random(0), None if task.startswith("document") else turn))


@pytest.mark.parametrize("task", TASKS)
def test_a_core_asks_the_same_in_every_unit_that_holds_it(task):
    core = cores(task)[0]
    small, large = (core.make(unit, "fr") for unit in (core.pool, WIDE))
    assert (small.asked, small.choices) == (large.asked, large.choices) and large.task == task
    if not task.startswith("document"):
        assert small.gold == large.gold
    if task.startswith("word"):
        assert len({core.make(WIDE, language).gold for language in LANGUAGES}) == 1


@pytest.mark.parametrize("turn", THIRDS)
def test_surroundings_grow_inside_the_widest_unit_with_the_paragraph_in_its_third(turn):
    found = around(WIDE, 20, turn)
    assert [len(unit) for unit in found] == list(range(3, 2 * FARTHEST + 2, 2))
    assert {third(20 - unit.first, len(unit)) for unit in found} == {turn}
    assert all(WIDE.first <= unit.first and unit.end <= WIDE.end for unit in found)


def test_an_edge_has_no_surroundings_for_the_other_end():
    assert around(WIDE, 5, "end") == [] == around(WIDE, 34, "begin") and around(WIDE, 5, "begin")


@pytest.mark.parametrize("count", (1, 2, 3, 4, 5, 10, 11))
def test_indices_are_those_of_a_third(count):
    for turn in THIRDS:
        assert list(indices(turn, count)) == [i for i in range(count) if third(i, count) == turn]


@pytest.mark.parametrize("turn", THIRDS)
@pytest.mark.parametrize("units", (4, 15, 40))
def test_reachable_paragraphs_are_those_of_all_runs_with_the_place(turn, units):
    for k in range(40):
        runs = [(f, f + units) for f in range(41 - units) if f <= k < f + units and third(k - f, units) == turn]
        assert reachable(40, k, units, turn) == ((runs[0][0], runs[-1][1]) if runs else None)


@pytest.mark.parametrize("turn", THIRDS)
@pytest.mark.parametrize("share", (0.0, 0.5, 0.99))
def test_a_unit_of_any_size_holds_its_core_in_its_third(turn, share):
    core = cores("word-choice", turn=turn)[0]
    for units in range(len(core.pool), 16):
        unit = placed(core, WIDE, units, turn, share)
        assert len(unit) == units and unit.first <= core.pool.first and core.pool.end <= unit.end
        assert WIDE.first <= unit.first and unit.end <= WIDE.end and third(20 - unit.first, units) == turn
    assert placed(core, WIDE, 31, turn, share) is None
