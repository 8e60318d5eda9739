import pytest

from longspan.evaluation.mgal import LANGUAGES, TASKS, Unit, own, prompt
from longspan.evaluation.mgal.drawing import legal_words
from longspan.evaluation.mgal.items import fill_item, translate_item, word_item
from longspan.evaluation.mgal.prompts import ANSWER, INSTRUCTIONS, NAMED
from longspan.registry import Refused

UNIT = Unit(own(), 10, 20)


def word(language="ar"):
    return word_item(UNIT, next(legal_words(UNIT, 10)), language)


def test_every_task_has_an_instruction_of_its_own_in_every_language():
    assert set(INSTRUCTIONS) == set(NAMED) == set(ANSWER) == set(LANGUAGES)
    assert all(set(own_texts) == set(TASKS) for own_texts in INSTRUCTIONS.values())
    assert len({text for own_texts in INSTRUCTIONS.values() for text in own_texts.values()}) == 42


def test_the_order_is_instruction_document_question_options():
    item = word()
    text, shown = INSTRUCTIONS["ar"]["word-choice"], prompt(item)
    assert shown.context == f"{text}\n\n{item.document}"
    assert shown.question == f"\n\n{item.asked}\n\n{item.choices.shown()}" and shown.answer_prefix == ANSWER["ar"]


@pytest.mark.parametrize("place,first,last", [("first", 1, 0), ("last", 0, 1), ("both", 1, 1)])
def test_the_instruction_stands_where_asked(place, first, last):
    shown, text = prompt(word(), place), INSTRUCTIONS["ar"]["word-choice"]
    assert (shown.context.count(text), shown.question.count(text)) == (first, last)


def test_prompts_in_english_and_targets_named_in_their_language():
    assert prompt(word(), prompt_language="english").context.startswith(INSTRUCTIONS["en"]["word-choice"])
    assert prompt(translate_item(UNIT, 12, "ru")).context.startswith("Переведите на английский")
    assert prompt(translate_item(UNIT, 12, "ru", "from")).context.startswith("Translate into Russian")
    assert "[[...]]\n\n" in prompt(fill_item(UNIT, 12, "zh")).context


def test_other_places_and_languages_are_refused():
    with pytest.raises(Refused, match="did you mean 'first'"):
        prompt(word(), "firts")
    with pytest.raises(Refused, match="unknown prompt language 'german'"):
        prompt(word(), prompt_language="german")
