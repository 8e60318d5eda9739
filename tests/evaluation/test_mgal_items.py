import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.evaluation.mgal import LANGUAGES, Aligned, Gap, Unit, neighbours, own, restored
from longspan.evaluation.mgal.drawing import legal_gaps, legal_words
from longspan.evaluation.mgal.items import (
    BLANK,
    MARKER,
    check_marker,
    cloze_item,
    distractors,
    fill_item,
    first_words,
    gaps,
    kind_of,
    same_kind,
    spots,
    strings,
    summary_item,
    translate_item,
    word_is_legal,
    word_item,
)
from longspan.evaluation.mgal.language import sentences
from longspan.evaluation.mgal.units import GAP, units
from longspan.registry import Refused

UNIT = Unit(own(), 10, 20)


def word(language="en", task="word-choice", number=0):
    spot = [s for s in legal_words(UNIT, 10) if s.kind == "name"][number]
    return word_item(UNIT, spot, language, task)


def gap():
    return next(g for g in legal_gaps(UNIT, following=60) if 12 <= g.paragraph <= 16 and g.sentence == 1)


def test_word_items_are_the_same_in_every_language():
    for task in ("word-choice", "word-extract"):
        made = [word(language, task) for language in LANGUAGES]
        assert len({i.id for i in made}) == 1 and len({i.gold for i in made}) == 1 and len({i.choices for i in made}) == 1
        assert len({i.document for i in made}) == 6


@pytest.mark.parametrize("language", LANGUAGES)
def test_answers_stand_once_and_come_back_into_their_sentence(language):
    for spot in legal_words(UNIT):
        item = word_item(UNIT, spot, language, "word-extract")
        assert item.document.count(item.gold) == 1 and item.asked.count(BLANK) == 1
        assert item.asked.replace(BLANK, item.gold) in item.document
        assert item.before + item.gold + item.after in item.document and item.place is not None


def test_strings_and_their_kinds():
    assert strings("Use apt-get or dpkg in 1999, 12 days, and 7.") == ["apt-get", "1999", "12"]
    assert [kind_of(s) for s in ("apt-get", "1999", "12", "1.5")] == ["name", "date", "number", "number"]


def test_options_of_the_same_form_have_signs_or_none():
    corpus = Aligned("signs", {"en": ("The log is in var/log/daemon.log here.", "The tools apt-get and Debian, users/groups.")})
    path = spots(corpus, 0)[0]
    unit = Unit(corpus, 0, 2)
    assert path.string == "var/log/daemon.log" and same_kind(unit, path) == ["apt-get", "Debian", "tools", "users/groups"]
    assert same_kind(unit, path, same_form=True) == ["apt-get", "users/groups"]
    item = word_item(unit, path, "en", options=3, same_form=True)
    assert set(item.choices.options) == {path.string, "apt-get", "users/groups"}
    with pytest.raises(Refused, match="4 options: the unit holds 2 strings"):
        word_item(unit, path, "en", options=4, same_form=True)


def test_options_are_of_one_kind():
    item = word()
    spot = next(s for s in legal_words(UNIT, 10) if s.string == item.gold)
    assert item.choices.options[item.choices.right] == item.gold and len(item.choices.options) == 10
    assert set(item.choices.options) - {item.gold} <= set(same_kind(UNIT, spot))
    with pytest.raises(Refused, match=r"14 options: the unit holds \d+ strings of kind name"):
        word_item(Unit(own(), 10, 12), spot, "en", options=14)


def test_a_word_that_stands_twice_is_not_legal():
    spot = next(legal_words(UNIT))
    wide = Unit(own(), 0, 40)
    assert word_is_legal(UNIT, spot) and word_is_legal(wide, spot)
    twice = Aligned("twice", {one: (*own().of(one)[:20], own().of(one)[spot.paragraph] + "!") for one in LANGUAGES})
    assert not word_is_legal(Unit(twice, 10, 21), spot)


def test_a_sentence_whose_rest_comes_again_is_not_legal():
    corpus = Aligned("alike", {"en": ("The keeper of the light was Kelmark.", "The keeper of the light was Ostinde.")})
    spot = next(s for s in spots(corpus, 0) if s.string == "Kelmark")
    assert word_is_legal(Unit(corpus, 0, 1), spot) and not word_is_legal(Unit(corpus, 0, 2), spot)


# ------------------------------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("crowding", (0, 3, 6, 9))
def test_clozes_crowd_as_asked_and_restore_the_unit(language, crowding):
    where = gap()
    item = cloze_item(UNIT, where, language, crowding, following=60)
    near = {s for k in range(where.paragraph - 1, where.paragraph + 2) for s in sentences(own().of(language)[k], language)}
    wrong = [o for o in item.choices.options if o != item.gold]
    assert sum(o in near for o in wrong) == crowding and len(wrong) == 9
    assert restored(item) == UNIT.text(language) and item.document.count(MARKER) == 1
    assert all(o in item.document for o in wrong) and item.gold not in item.document
    assert item.before + item.gold + item.after == UNIT.text(language)[: len(item.before + item.gold + item.after)]


def test_clozes_at_two_crowdings_are_nested():
    at = {c: set(cloze_item(UNIT, gap(), "en", c, following=60).choices.options) for c in (3, 6)}
    assert len(at[3] & at[6]) == 7


@pytest.mark.parametrize("following", (60, 240))
def test_sentences_in_the_text_scored_are_no_options(following):
    item = cloze_item(UNIT, gap(), "en", 0, following=following)
    found = distractors(UNIT, gap(), "en", following)
    text, end = UNIT.text("en"), len(item.before) + len(item.gold)
    reached = {s for s in sentences(text, "en") if text.index(s) < end + following and text.index(s) + len(s) > end}
    assert len(reached) >= 1 + (following > 100) and not reached & {*found.near, *found.far}
    assert len(found.near) + len(found.far) + len(reached) + 1 == 50 and len(item.after) == following


def test_short_and_unequal_paragraphs_are_skipped():
    corpus = Aligned("x", {"en": ("One.", "One. Two. Three.", "One. Two. Three."),
                           "fr": ("Un.", "Un. Deux.", "Un. Deux. Trois.")})
    assert [gaps(corpus, k) for k in range(3)] == [[], [], [Gap(2, 0), Gap(2, 1), Gap(2, 2)]]


def test_too_few_sentences_are_refused_with_their_number():
    with pytest.raises(Refused, match=r"holds \d+ sentences near the gap and 0 further away; expected 9 and 0|expected 3 and 6"):
        cloze_item(Unit(own(), 10, 13), Gap(11, 1), "en", 3)
    with pytest.raises(Refused, match="crowding 10 with 10 options; expected 0 to 9"):
        cloze_item(UNIT, gap(), "en", 10)
    with pytest.raises(Refused, match="1 options: expected 2"):
        cloze_item(UNIT, gap(), "en", 0, options=1)


def test_neighbours_are_the_sentences_around_the_gap():
    where = gap()
    own_sentences = sentences(own().of("en")[where.paragraph], "en")
    assert neighbours(cloze_item(UNIT, where, "en", following=240)) == f"{own_sentences[0]} {own_sentences[2]}"


# --------------------------------------------------------------------------------------------- paragraphs and documents


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_filled_paragraph_restores_the_unit(language):
    for k in (10, 14, 19):
        item = fill_item(UNIT, k, language)
        assert restored(item) == UNIT.text(language) and item.gold == own().of(language)[k] and item.gold not in item.document


def test_translations_go_both_ways():
    into, from_ = (translate_item(UNIT, 12, "ru", direction) for direction in ("into", "from"))
    assert (into.document, into.gold) == (UNIT.text("ru"), own().of("en")[12]) and into.paragraph.startswith(into.asked)
    assert (from_.document, from_.gold) == (UNIT.text("en"), own().of("ru")[12])
    whole = translate_item(UNIT, None, "ar")
    assert (whole.task, whole.gold) == ("document-translate", UNIT.text("en"))
    with pytest.raises(Refused, match="language=en; expected another"):
        translate_item(UNIT, 12, "en")
    with pytest.raises(Refused, match="expected 'into'"):
        translate_item(UNIT, 12, "fr", "to")


def test_summaries_refer_to_headings_and_first_sentences():
    corpus = Aligned("x", {"en": ("One. A.", "Two. B.", "Three. C.")}, {"en": ("Top", "Top", "Next")})
    assert summary_item(Unit(corpus, 0, 3), "en").gold == "Top\nOne.\nNext\nThree."
    assert summary_item(UNIT, "en").gold.split("\n") == [sentences(t, "en")[0] for t in UNIT.text("en").split(GAP)]


def test_the_marker_must_be_new():
    with pytest.raises(Refused, match="holds the marker"):
        check_marker(f"a {MARKER} b")


def test_first_words_are_whole():
    assert first_words("short") == "short"
    assert first_words("a word " * 20).split()[-1] in ("a", "word") and len(first_words("字" * 90)) == 40


def test_ids_name_unit_and_content():
    found = [fill_item(unit, k, "en").id for unit in units(own(), 10) for k in range(unit.first, unit.end)]
    assert len(set(found)) == 40 and found[0] == "paragraph-fill/0-10/0"


def test_options_do_not_depend_on_how_strings_are_hashed() -> None:
    """Of spellings that differ in case only, the same one is taken in every process."""
    code = """
from longspan.evaluation.mgal import LANGUAGES, Aligned, Unit
from longspan.evaluation.mgal.items import same_kind, spots
text = "The Debian system. Apache, apache, APACHE, Samba, samba, Kernel, kernel, Docker and docker are known."
corpus = Aligned("made", {language: (text + " " + language,) for language in LANGUAGES})
print(same_kind(Unit(corpus, 0, 1), next(spot for spot in spots(corpus, 0) if spot.string == "Debian")))
"""
    here = Path(__file__).parents[2]
    found = {subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
                            text=True, check=True, cwd=here).stdout for seed in ("1", "2", "3", "4")}
    assert found == {"['APACHE', 'Docker', 'Kernel', 'known', 'Samba', 'system']\n"}
