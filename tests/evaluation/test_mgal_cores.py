import random

import pytest

from longspan.evaluation.mgal import LANGUAGES, TASKS, Unit, own
from longspan.evaluation.mgal.cores import FARTHEST, Asked, around, placed

WIDE = Unit(own(), 5, 35)


def cores(task, k=20, wide=WIDE):
    return list(Asked(task, 8, 3, "into").cores(k, wide, random.Random(0)))


@pytest.mark.parametrize("task", TASKS)
def test_a_core_asks_the_same_in_every_unit_that_holds_it(task):
    core = cores(task)[0]
    small, large = (core.make(unit, "fr") for unit in (core.pool, WIDE))
    assert (small.asked, small.choices) == (large.asked, large.choices) and large.task == task
    if not task.startswith("document"):
        assert small.gold == large.gold
    if task.startswith("word"):
        assert len({core.make(WIDE, language).gold for language in LANGUAGES}) == 1


def test_surroundings_grow_inside_the_widest_unit():
    found = around(WIDE, 6)
    assert found[0] == Unit(own(), 5, 8) and found[-1] == Unit(own(), 5, 7 + FARTHEST) and len(found) == FARTHEST


@pytest.mark.parametrize("units", (9, 15, 30))
@pytest.mark.parametrize("at", (0.1, 0.5, 0.9))
def test_a_unit_holds_its_core_and_puts_it_where_asked(units, at):
    core = cores("word-choice")[0]
    unit = placed(core, WIDE, units, at)
    assert len(unit) == units and unit.first <= core.pool.first and core.pool.end <= unit.end
    assert WIDE.first <= unit.first and unit.end <= WIDE.end
    if units == 15:
        assert (core.paragraph - unit.first) / units == pytest.approx(at, abs=0.2)
