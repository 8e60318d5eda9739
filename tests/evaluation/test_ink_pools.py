import random

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.ink import bm25, cut, easy_pool, hard_pool, holds, random_pool, scored
from longspan.evaluation.ink.pools import EASY
from longspan.registry import Refused

PASSAGES = ["Paris is the capital of France.", "Lyon was once a capital of Gaul.", "The capital gains tax rose.",
            "Bread is baked at night.", "France has many rivers."]


def test_bm25_is_the_formula():
    import math

    scores = bm25("capital", PASSAGES)
    idf = math.log(1 + (5 - 3 + 0.5) / (3 + 0.5))
    lengths = [5, 6, 4, 5, 4]  # articles are no words of the normal form
    usual = sum(lengths) / 5
    assert scores[0] == pytest.approx(idf * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 5 / usual)))
    assert scores[2] > scores[0] > scores[1] and scores[3] == scores[4] == 0


def test_hard_passages_are_hits_without_the_answer():
    found = hard_pool("Capital of France?", PASSAGES, ("Paris",), 3)
    assert len(found) == 3 and PASSAGES[0] not in found and PASSAGES[3] not in found
    with pytest.raises(Refused, match="hard pool holds 3 passages without an answer; expected at least 5"):
        hard_pool("Capital of France?", PASSAGES, ("Paris",), 5)


def test_random_passages_hold_no_answer():
    assert sorted(random_pool(PASSAGES, ("france", "gaul"), 2, random.Random(0))) == sorted([PASSAGES[2], PASSAGES[3]])
    with pytest.raises(Refused, match="random pool holds 2"):
        random_pool(PASSAGES, ("france", "gaul"), 3, random.Random(0))


def test_filler_comes_round_again():
    found = easy_pool(25, random.Random(0))
    assert len(found) == 25 and set(found[:10]) == set(EASY) == set(found[10:20])


def test_passages_are_cut_to_one_length():
    tokenizer = tiny_tokenizer()
    text = ["The with statement is used to wrap the execution of a block.", "No."]
    (found,) = cut(text, 9, tokenizer)
    assert text[0].startswith(found) and len(tokenizer.encode(found, add_special_tokens=False)) == 9


def test_answers_count_as_whole_words_in_normal_form():
    assert holds("He's a Nurse, they say.", ("doctor", "nurse")) == "nurse"
    assert holds("nursery", ("nurse",)) is None and holds("anything", ("",)) is None
    assert scored("She is a nurse", ("nurse", "a nurse at night")) == {"accuracy": 1.0, "f1": pytest.approx(0.5)}
    assert scored("", ("nurse",)) == {"accuracy": 0.0, "f1": 0.0}
