"""Calibration texts: the length asked for, nothing shared, facts that are really there."""

from __future__ import annotations

import pytest
from tiny_models import tiny_tokenizer as bytes_tokenizer
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.calibration import FACTS, calibration
from longspan.evaluation.texts import load_text
from longspan.registry import Refused


@pytest.fixture(params=[tiny_tokenizer, bytes_tokenizer], ids=["trained", "bytes"])
def tokenizer(request):
    return request.param()


def test_texts_fill_their_length_and_hide_their_facts(tokenizer):
    for reading in calibration(tokenizer, contexts=2, questions=3, length=700, known=True):
        assert 500 < len(reading.ids) <= 700
        text = tokenizer.decode(reading.ids)
        assert text.count("The magic number of the") == FACTS
        for question in reading.questions:
            asked, answer = tokenizer.decode(question.ids), tokenizer.decode(question.answer)
            assert asked.endswith(" is") and len(answer) == 8 and answer[1:].isdigit()
            assert asked[asked.rindex("The magic number") :] + answer + "." in text


def test_texts_share_no_sentence():
    prose = set(load_text("pydoc").sentences)
    found = [{s for s in prose if len(s) > 60 and s in tiny_tokenizer().decode(r.ids)}
             for r in calibration(tiny_tokenizer(), contexts=3, length=500)]
    assert all(found) and not (found[0] & found[1] or found[1] & found[2] or found[0] & found[2])


def test_the_model_answers_facts_and_open_questions_in_turn():
    reading, = calibration(tiny_tokenizer(), contexts=1, questions=4, length=300)
    asked = [tiny_tokenizer().decode(q.ids) for q in reading.questions]
    assert [a[-3:] == " is" for a in asked] == [True, False, True, False]
    assert not any(q.answer for q in reading.questions) and len(set(asked)) == 4


def test_seeds_decide():
    draw = lambda seed: calibration(tiny_tokenizer(), contexts=2, length=300, seed=seed)  # noqa: E731
    assert draw(0) == draw(0) != draw(1)


def test_what_cannot_be_made_is_refused(tokenizer):
    with pytest.raises(Refused, match="nothing to calibrate on"):
        calibration(tokenizer, contexts=0)
    with pytest.raises(Refused, match="hides 3 facts"):
        calibration(tokenizer, questions=4, known=True)
    with pytest.raises(Refused, match="of 20 tokens: their facts alone take"):
        calibration(tokenizer, length=20)


