import math
import random
from itertools import pairwise

import pytest

from longspan.evaluation.ink import Question, nested
from longspan.evaluation.ink.filtering import filter_hard, filter_random, proportional, recovery, replace
from longspan.registry import Refused

QUESTION = Question("Where is the key?", "The key lies in the red box.", ("red box",))
LENGTHS = (30, 24, 11, 7)


def contexts(n=30):
    hard, weak = ([f"{name} {i}" for i in range(n)] for name in ("drawer", "rain"))
    return nested(QUESTION, hard, weak, n, random.Random(0))


def counts(arm):
    return [(mix.kinds.count("hard"), mix.kinds.count("weak")) for mix in arm.mixes]


def test_filters_delete_one_kind_and_walk_through_the_same_lengths():
    assert counts(filter_hard(contexts(), LENGTHS)) == [(24, 6), (18, 6), (5, 6), (1, 6)]
    assert counts(filter_random(contexts(), LENGTHS)) == [(6, 24), (6, 18), (6, 5), (6, 1)]


def test_proportional_filtering_keeps_the_share():
    assert counts(proportional(contexts(), (30, 20, 10), 0.2)) == [(6, 24), (4, 16), (2, 8)]
    assert counts(proportional(contexts(), (30, 20, 10), 0.8)) == [(24, 6), (16, 4), (8, 2)]


def test_replacing_keeps_the_length():
    arm = replace(contexts(), (0.5, 0.1, 0.0))
    assert counts(arm) == [(15, 15), (3, 27), (0, 30)] and arm.start == 0.5


@pytest.mark.parametrize("walk", [lambda c: filter_hard(c, LENGTHS), lambda c: filter_random(c, LENGTHS),
                                  lambda c: proportional(c, LENGTHS, 0.5)])
def test_what_is_left_is_nested_in_order_and_keeps_gold(walk):
    mixes = walk(contexts()).mixes
    for longer, shorter in pairwise(mixes):
        left = iter(longer.documents)
        assert all(document in left for document in shorter.documents)
        assert shorter.kinds.count("gold") == 1 and len(shorter.documents) < len(longer.documents)


def test_recovery():
    assert recovery(arm=0.5, start=0.2, clean=0.8) == pytest.approx(0.5)
    assert recovery(0.8, 0.2, 0.8) == 1 and math.isnan(recovery(0.5, 0.2, 0.2))


@pytest.mark.parametrize("call,said", [
    (lambda c: filter_hard(c, (30, 5)), "6 stay in any case"), (lambda c: filter_random(c, (30, 5)), "6 stay in any case"),
    (lambda c: filter_hard(c, (20, 10)), "fall from 30"), (lambda c: proportional(c, (30, 30), 0.5), "fall from 30"),
    (lambda c: proportional(c, (30, 0), 0.5), "at least 1"), (lambda c: filter_hard(c, ()), "fall from 30"),
    (lambda c: replace(c, (0.1, 0.5)), "falling ones"), (lambda c: replace(c, (1.5, 0.5)), "from 0 to 1")])
def test_walks_that_do_not_fall_are_refused(call, said):
    with pytest.raises(Refused, match=said):
        call(contexts())
