from itertools import pairwise

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.haystack import (
    RULER_DEPTHS,
    Essay,
    at_characters,
    grid_depth,
    insert,
    spread_depth,
)
from longspan.evaluation.texts import make_text


def test_ruler_has_forty_depths():
    assert len(RULER_DEPTHS) == 40
    assert (RULER_DEPTHS[0], RULER_DEPTHS[1], RULER_DEPTHS[-1]) == (0.0, 0.03, 1.0)


@pytest.mark.parametrize("depths", [1, 2, 3, 10, 11, 35])
def test_grid_takes_each_depth_once(depths):
    found = [grid_depth(i, depths) for i in range(depths)]
    assert sorted(found) == ([0.5] if depths == 1 else [i / (depths - 1) for i in range(depths)])
    assert grid_depth(depths, depths) == found[0]


def test_grid_spreads_from_the_start():
    first = sorted(grid_depth(i, 35) for i in range(5))
    assert max(b - a for a, b in zip([0, *first], [*first, 1])) < 0.45


def test_spread_depths_cover_the_context():
    found = sorted(spread_depth(0, i) for i in range(20))
    assert all(0 <= depth < 1 for depth in found)
    assert max(b - a for a, b in pairwise(found)) < 0.11
    assert spread_depth(1, 0) != spread_depth(0, 0)


def test_at_characters_goes_back_to_the_end_of_a_unit():
    units = ["aaaa", "bb", "cccc"]
    assert [at_characters(units, depth) for depth in (0, 0.39, 0.4, 0.59, 0.6, 0.99, 1.0)] == [0, 0, 1, 1, 2, 2, 3]


def test_insert_places_needles_and_tells_where():
    text, spans = insert(["a", "b"], ["N1", "N2", "N3"], [2, 0, 2], " ", shift=5)
    assert text == "N2 a b N1 N3"
    assert [text[start - 5:end - 5] for start, end in spans] == ["N1", "N2", "N3"]


def test_essay_goes_round_and_guesses_its_tokens():
    essay = Essay(make_text("t", "here", "One fish. Two fish. Red fish."), 2, tiny_tokenizer())
    assert essay.take(4) == ["Red fish.", "One fish.", "Two fish.", "Red fish."]
    one = [len(tiny_tokenizer().encode(" " + s)) for s in ("Red fish.", "One fish.", "Two fish.")]
    assert essay.tokens(2) == one[0] + one[1]
    assert essay.tokens(7) == 2 * sum(one) + one[0]
