import json
import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.nolima import PAIRS, NoLiMa
from longspan.registry import Refused

FUNCTION_WORDS = {"a", "an", "the", "in", "of", "to"}
"""What a needle and its question may share."""


@pytest.mark.parametrize("needle,question", PAIRS)
def test_needle_and_question_share_no_word_but_articles_and_prepositions(needle, question):
    first, second = (set(re.findall("[a-z]+", text.lower())) - FUNCTION_WORDS for text in (needle, question))
    assert not first & second
    assert needle.count("{name}") == 1


def test_needle_occurs_once_and_the_name_nowhere_else():
    for example in NoLiMa().examples(800, 6, 0, tiny_tokenizer()):
        (start, end), = example.meta["spans"]
        assert example.context[start:end] == example.meta["needle"]
        assert len(re.findall(rf"\b{example.answers[0]}\b", example.context)) == 1
        assert example.answers[0] not in example.question


def test_distractor_stays_a_fifth_away():
    for example in NoLiMa(distractor=True).examples(1200, 8, 0, tiny_tokenizer()):
        (start, end), = example.meta["distractors"]
        assert example.context[start:end].startswith("Nobody remembers which person")
        assert abs(start / len(example.context) - example.meta["spans"][0][0] / len(example.context)) > 0.1


def test_name_anywhere_in_the_answer_counts():
    task = NoLiMa()
    example, = task.examples(800, 1, 0, tiny_tokenizer())
    assert task.metric(f"I think it is {example.answers[0]}!", example) == 1.0
    assert task.metric("Nobody", example) == 0.0


def test_needles_of_a_file(tmp_path):
    rows = [{"id": "01", "needle": "Then {CHAR} sat beside {1}.",
             "questions": {"onehop": "Who has been to {2}?", "twohop": "Who to {3}?"}, "character_set": ["Zora", "Quill"],
             "tests": {"T1": {"input_args": ["the gate", "Ur", "Sumer"]}}}]
    path = tmp_path / "needle_set.json"
    path.write_text(json.dumps(rows))
    task = NoLiMa(file=str(path))
    found = list(task.examples(600, 8, 0, tiny_tokenizer()))
    assert {example.meta["pair"] for example in found} == {"01/T1/onehop", "01/T1/twohop"}
    for example in found:
        assert example.meta["needle"] == f"Then {example.answers[0]} sat beside the gate."
        assert example.context.count(example.meta["needle"]) == 1
        assert ("Ur?" if example.meta["pair"].endswith("onehop") else "Sumer?") in example.question
    for broken, problem in (([{"id": "01"}], "no field"), ([], "no needles"), ({}, "no needles")):
        path.write_text(json.dumps(broken) + " " * len(problem + str(broken)))
        with pytest.raises(Refused, match=problem):
            list(task.examples(600, 1, 0, tiny_tokenizer()))
