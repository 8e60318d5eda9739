import random
import re
import string
import sys
import uuid

import pytest

from longspan.evaluation import words
from longspan.registry import Refused


@pytest.mark.parametrize("found", [words.ADJECTIVES, words.NOUNS, words.VERBS])
def test_lists_hold_distinct_plain_words(found):
    assert len(set(found)) == len(found) >= 100
    assert all(re.fullmatch("[a-z]+", word) for word in found)


def test_draws_never_repeat_and_have_their_form():
    draws = words.Draws(random.Random(0))
    keys = [draws.draw("words") for _ in range(2000)]
    assert len(set(keys)) == 2000
    assert all(re.fullmatch("[a-z]+-[a-z]+", key) for key in keys)
    assert all(re.fullmatch("[1-9][0-9]{6}", draws.draw("numbers")) for _ in range(50))
    assert all(uuid.UUID(draws.draw("uuids")).version == 4 for _ in range(50))
    codes = [draws.letters(2, "ab") for _ in range(4)]
    assert sorted(codes) == ["aa", "ab", "ba", "bb"]


def test_keys_do_not_run_out():
    draws = words.Draws(random.Random(0))
    draws.adjectives, draws.nouns = ("red", "blue"), ("hat", "tree")
    keys = [draws.draw("words") for _ in range(40)]
    assert len(set(keys)) == 40


def test_draws_depend_on_the_generator_only():
    first, second = (words.Draws(random.Random("k")) for _ in range(2))
    assert [first.draw(kind) for kind in ("words", "numbers", "uuids")] == [
        second.draw(kind) for kind in ("words", "numbers", "uuids")]
    assert words.Draws(random.Random("other")).draw("uuids") != words.Draws(random.Random("k")).draw("uuids")
    assert first.letters(5, string.ascii_uppercase).isupper()


def test_word_list_is_sorted_and_distinct():
    found = words.word_list("own").text.split("\n")
    assert found == sorted(set(found))
    assert len(found) > 2000
    assert all(re.fullmatch("[a-z]{4,}", word) for word in found)


def test_word_sources(monkeypatch):
    with pytest.raises(Refused, match="did you mean 'own'"):
        words.word_list("owns")
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    words._wonderwords.cache_clear()
    with pytest.raises(Refused, match="package wonderwords"):
        words.adjectives_and_nouns("wonderwords")
