import random
from collections import Counter
from itertools import pairwise

import pytest

from longspan.evaluation.mgal import Unit, balanced, own, units, units_of_tokens
from longspan.evaluation.mgal.units import GAP, paragraph_third, third
from longspan.registry import Refused


def count(text):
    return len(text.split())


def test_units_are_the_same_paragraphs_in_every_language():
    corpus = own()
    found = units(corpus, 8)
    assert [(u.first, u.end) for u in found] == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]
    unit = found[1]
    for language in corpus.languages:
        assert unit.text(language).split(GAP) == list(corpus.of(language)[8:16])
        assert unit.text(language)[unit.start(11, language) :].startswith(corpus.of(language)[11])


def test_english_tokens_are_within_two_percent_and_each_language_has_its_own_count():
    tokens = count(Unit(own(), 0, 6).text("en"))
    found = units_of_tokens(own(), tokens, count)
    assert len(found) >= 3 and all(abs(count(u.text("en")) - tokens) <= 0.02 * tokens for u in found)
    assert all(a.end <= b.first for a, b in pairwise(found))
    assert len(set(found[0].tokens(count).values())) > 3


@pytest.mark.parametrize("tokens,said", [(10**6, "expected 1 to"), (0, "expected 1 to"), (20, "no run of paragraphs")])
def test_units_that_cannot_be_are_refused(tokens, said):
    with pytest.raises(Refused, match=said):
        units_of_tokens(own(), tokens, count)


def test_runs_outside_the_corpus_are_refused():
    with pytest.raises(Refused, match="expected a run inside it"):
        Unit(own(), 35, 41)
    with pytest.raises(Refused, match="units of 41 paragraphs"):
        units(own(), 41)


def test_places_are_thirds():
    assert [third(i, 6) for i in range(6)] == ["begin", "begin", "middle", "middle", "end", "end"]
    assert [paragraph_third(i, 3) for i in range(3)] == ["begin", "middle", "end"]
    assert paragraph_third(0, 2) is None


def test_balanced_cells_differ_by_at_most_one():
    candidates = [(i % 9 if i % 5 else i % 4, i) for i in range(200)]
    for n in (9, 13, 25, 90):
        drawn = balanced(candidates, n, lambda c: c[0], random.Random(0))
        counts = Counter(cell for cell, _ in drawn)
        assert len(drawn) == n == len(set(drawn)) and len(counts) == 9 and max(counts.values()) - min(counts.values()) <= 1


def test_candidates_without_a_cell_are_passed_over_and_short_cells_refused():
    candidates = [(i % 3, i) for i in range(9)] + [(None, 9)]
    assert len(balanced(candidates, 9, lambda c: c[0], random.Random(0), cells=3)) == 9
    with pytest.raises(Refused, match="10 words: only 9 legal ones exist, 9 of them balanced over 3 places"):
        balanced(candidates, 10, lambda c: c[0], random.Random(0), "words", cells=3)
    with pytest.raises(Refused, match="only 9 legal ones exist, 3 of them balanced over 9"):
        balanced(candidates, 4, lambda c: c[0], random.Random(0))
