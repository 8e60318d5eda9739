"""The reward of answers over tables."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.evaluation.tables.reward import parse, reward
from longspan.registry import Refused

VALUES = st.lists(st.one_of(st.integers(-10**9, 10**9), st.floats(-1e6, 1e6), st.text(max_size=8)), min_size=1, max_size=6)


@given(VALUES, st.randoms())
def test_the_gold_answer_is_right_in_any_order_and_in_its_own_where_it_counts(gold, rng):
    said = f"Answer: {json.dumps(gold)}"
    assert reward(said, gold) == reward(said, gold, ordered=True) == reward(said, gold, decimals=2) == 1.0
    turned = list(gold)
    rng.shuffle(turned)
    assert reward(f"Answer: {json.dumps(turned)}", gold) == 1.0
    assert reward(f"Answer: {json.dumps([*gold, 0])}", gold) == 0.0


@pytest.mark.parametrize("said,ordered,right", [
    ("[3, 1, 2]", False, 1), ("[3, 1, 2]", True, 0), ("[1, 2, 3]", True, 1), ("[1, 1, 2, 3]", False, 0), ("[1, 2, 2]", False, 0),
    ("[1.0000005, 2, 3]", False, 1), ("[1.00001, 2, 3]", False, 0), ('["1", 2, 3]', False, 0), ("[true, 2, 3]", False, 0),
    ("[1, 2, 3] and so on", False, 1), ("[1, 2, 3]]", False, 1), ("[1, 2, [3]]", False, 0), ("[1, 2, null]", False, 0),
])
def test_lists_of_numbers(said, ordered, right):
    assert reward(f"Answer: {said}", [1, 2, 3], ordered) == right


def test_numbers_are_rounded_to_the_decimals_asked():
    assert reward("Answer: [3.14159]", [3.14], decimals=2) == 1.0
    assert reward("Answer: [3.14159]", [3.14]) == reward("Answer: [3.15]", [3.14], decimals=2) == 0.0
    assert reward("Answer: [3]", [3.0]) == 1.0


def test_strings_are_folded_and_stripped():
    assert reward('Answer: [" STRASSE ", "b"]', ["B", "straße"]) == 1.0
    assert reward('Answer: ["a b"]', ["ab"]) == 0.0


def test_the_last_answer_or_box_counts():
    assert reward("Answer: [0]\nno:\nAnswer: [1]", [1]) == reward("Answer: [0], so \\boxed{[1]}", [1]) == 1.0
    assert reward("\\boxed{[1]}\n**Answer:** [2]", [1]) == 0.0
    assert reward("\\boxed{[1]}\n**Answer:** [2]", [2]) == reward("Answer:\n[\n2\n]", [2]) == 1.0
    assert parse('Answer: ["Answer: [2]"]') == ["Answer: [2]"]


@pytest.mark.parametrize("said", [
    "", "Answer:", "[1]", "Answer: 1", "Answer: {\"a\": 1}", "Answer: [", "Answer: [1", "Answer: [NaN]", "Answer: [Infinity]",
    "Answer: [1e999]", "Answer: [" + "9" * 5000 + "]", "Answer: [" + "9" * 400 + "]", "Answer: " + "[" * 200_000, "\\boxed{",
    "Answer: [1]\nAnswer: none", "The Answer: [1]",
])
def test_anything_else_is_wrong_and_nothing_raises(said):
    assert reward(said, [1]) == reward(said, [1.5]) == reward(said, ["1"], ordered=True, decimals=1) == 0.0


@pytest.mark.parametrize("gold", [[float("nan")], [float("inf")], [None], [True], [[1]], 1, "1", None, {"a": 1}])
def test_a_gold_answer_that_no_list_can_equal_is_refused(gold):
    with pytest.raises(Refused, match="gold answer"):
        reward("Answer: [1]", gold)


def test_decimals_below_zero_are_refused():
    with pytest.raises(Refused, match="decimals=-1: expected at least 0"):
        reward("Answer: [1]", [1], decimals=-1)
