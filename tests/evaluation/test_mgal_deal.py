import random

import pytest

from longspan.evaluation.mgal import Unit, own
from longspan.evaluation.mgal.cores import Asked
from longspan.evaluation.mgal.deal import Deal, Place
from longspan.evaluation.mgal.units import THIRDS

NINE = [Place(turn, third) for turn in THIRDS for third in THIRDS]


def deal(task="word-extract", places=NINE, seed=0):
    return Deal(Asked(task, 8, 3, "into"), Unit(own(), 0, 40), 12, places, random.Random(seed))


def every(made, fits=lambda one: True):
    found = []
    while (one := made.get(len(found), fits)) is not None:
        found.append(one)
    return found


def test_places_come_in_turn_and_no_question_twice():
    found = every(deal())
    assert [Place(one.turn, one.core.third) for one in found[:18]] == NINE * 2
    assert len({one.core.name for one in found}) == len(found) > 300
    assert all(one.core.paragraph in range(one.wide.first, one.wide.end) for one in found)


def test_the_order_is_drawn_and_the_same_however_it_is_read():
    first, again, other = deal(), deal(), deal(seed=1)
    names = [first.get(i, lambda one: True).core.name for i in range(12)]
    assert again.get(11, lambda one: True).core.name == names[11] and other.get(11, lambda one: True).core.name != names[11]


@pytest.mark.parametrize("turn", THIRDS)
def test_one_place_is_never_left(turn):
    found = every(deal("paragraph-fill", [Place(turn, None)]))
    assert {one.turn for one in found} == {turn} and 25 < len(found) < 40


def test_what_does_not_fit_is_left_out():
    found = every(deal("paragraph-fill", [Place("begin", None)]), lambda one: one.core.paragraph % 2 == 0)
    assert found and all(one.core.paragraph % 2 == 0 for one in found)
    assert every(deal(), lambda one: False) == []


def test_places_without_questions_are_filled_from_the_same_third_of_the_document():
    found = every(deal("paragraph-fill", NINE))[:6]
    assert [one.turn for one in found] == ["begin"] * 3 + ["middle"] * 3
