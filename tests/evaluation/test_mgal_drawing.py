from collections import Counter

import pytest

from longspan.evaluation.mgal import LANGUAGES, cloze_items, document_items, own, paragraph_items, units, word_items
from longspan.evaluation.mgal.drawing import cell
from longspan.registry import Refused

UNITS = units(own(), 10)


def test_ids_are_identical_in_the_six_languages():
    words = {one: [i.id for i in word_items(UNITS, 13, one)] for one in LANGUAGES}
    gaps = {one: [i.id for i in cloze_items(UNITS, 5, one, following=60)[9]] for one in LANGUAGES}
    fills = {one: [i.id for i in paragraph_items(UNITS, 5, one)] for one in LANGUAGES}
    for found in (words, gaps, fills):
        assert len(set(map(tuple, found.values()))) == 1 and len(set(found["en"])) == len(found["en"])


@pytest.mark.parametrize("n", (9, 13, 30))
def test_cells_differ_by_at_most_one(n):
    for items in (word_items(UNITS, n, "ar"), cloze_items(UNITS, n, "zh", following=60)[0]):
        counts = Counter(map(cell, items))
        assert len(items) == n and len(counts) == 9 and max(counts.values()) - min(counts.values()) <= 1


def test_all_crowdings_ask_about_the_same_gaps():
    found = cloze_items(UNITS, 4, "fr", following=60)
    assert len({tuple(i.id for i in items) for items in found.values()}) == 1 and list(found) == [0, 3, 6, 9]


def test_paragraphs_are_balanced_over_thirds_and_documents_are_one_a_unit():
    assert sorted(Counter(i.place[0] for i in paragraph_items(UNITS, 8, "es", "paragraph-translate")).values()) == [2, 3, 3]
    assert [i.unit for i in document_items(UNITS, "ru")] == UNITS
    assert [i.task for i in document_items(UNITS, "ru", "document-translate")] == ["document-translate"] * 4
    with pytest.raises(Refused, match="expected paragraph-fill or paragraph-translate"):
        paragraph_items(UNITS, 1, "fr", "word-choice")


def test_more_items_than_exist_are_refused_with_their_number():
    with pytest.raises(Refused, match=r"5000 word-choice items: only \d+ legal ones exist"):
        word_items(UNITS, 5000, "en")
    with pytest.raises(Refused, match="only 0 legal ones exist"):
        cloze_items(units(own(), 2), 1, "en")
