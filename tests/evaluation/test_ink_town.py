import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import Key
from longspan.evaluation.ink import holds, token_totals
from longspan.evaluation.ink.pools import EASY
from longspan.evaluation.ink.town import FIRST, JOBS, LAST, counter, hard_passages, most_hard, town
from longspan.registry import Refused


def key(index=0):
    return Key("first-drop-of-ink", 0, 7, index)


def test_names_and_jobs_are_those_of_the_specification():
    assert (len(set(FIRST)), len(set(LAST)), len(set(JOBS)), len(set(EASY))) == (26, 16, 16, 10)
    assert not any(holds(sentence, JOBS) for sentence in EASY)


@pytest.mark.parametrize("index", range(6))
def test_hard_people_share_one_name_and_have_another_job(index):
    person, contexts = town(key(index), 40, tiny_tokenizer())
    seen = set()
    for passage in contexts.hard:
        first, last, _, _, _, job, *_ = passage.split()
        assert (first == person.first) != (last == person.last) and job != person.job
        seen.add((first, last))
    assert len(seen) == 40  # everybody once before anybody twice


def test_other_people_share_no_name():
    person, contexts = town(key(), 30, tiny_tokenizer(), hard="other-name")
    assert not any(part in passage.split() for passage in contexts.hard for part in (person.first, person.last))


@pytest.mark.parametrize("pools", [("shared-name", "easy"), ("shared-name", "random"), ("other-name", "easy"), ("easy", "easy")])
def test_token_totals_agree_within_a_hundredth(pools):
    count = counter(tiny_tokenizer())
    for index in range(4):
        totals = token_totals(town(key(index), 30, tiny_tokenizer(), *pools)[1], count)
        assert max(totals) - min(totals) <= 0.01 * max(totals)


def test_more_distractors_keep_the_passages_of_fewer():
    few, many = (town(key(), n, tiny_tokenizer())[1] for n in (10, 30))
    assert many.hard[:10] == few.hard and many.weak[:10] == few.weak


def test_pools_end():
    person, _ = town(key(), 1, tiny_tokenizer())
    whole = hard_passages(person, "shared-name", most_hard("shared-name"), key().rng())
    assert len(set(whole)) == most_hard("shared-name") == 600
    with pytest.raises(Refused, match="holds 600 passages for 601 slots"):
        hard_passages(person, "shared-name", 601, key().rng())
    with pytest.raises(Refused, match="unknown pool 'shared-nam'; did you mean 'shared-name'"):
        hard_passages(person, "shared-nam", 3, key().rng())
