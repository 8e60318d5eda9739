import random

import pytest

from longspan.evaluation.ink import GRID, Nested, Question, grid, hard_count, holds, nested, text_of, token_totals
from longspan.registry import Refused

QUESTION = Question("Where is the key?", "The key lies in the red box.", ("red box",))
HARD = [f"The key {i} lies in drawer {i}." for i in range(40)]
WEAK = [f"It rained on day number {i} again." for i in range(40)]


def words(passage):
    return len(passage.split())


def draw(n=30, seed=0, question=QUESTION, hard=HARD, weak=WEAK, **more) -> Nested:
    return nested(question, hard, weak, n, random.Random(seed), **more)


def test_contexts_at_two_shares_differ_in_the_swapped_slots_only():
    made = draw()
    for p in GRID:
        for other in GRID:
            a, b = made.at(p), made.at(other)
            swapped = sum(x != y for x, y in zip(a.documents, b.documents))
            assert swapped == abs(hard_count(p, 30) - hard_count(other, 30))
            assert a.gold == b.gold


def test_gold_is_there_once_and_answers_nowhere_else():
    for p in GRID:
        mix = draw().at(p)
        assert mix.documents.count(QUESTION.gold) == 1 == mix.kinds.count("gold") and mix.documents[mix.gold] == QUESTION.gold
        assert [holds(d, QUESTION.answers) for d in mix.documents].count("red box") == 1
        assert mix.share == hard_count(p, 30) / 30 and mix.distractors == 30


def test_all_hard_leaves_no_weak_passage_and_none_hard_no_hard_one():
    made = draw()
    assert "weak" not in made.at(1.0).kinds and not set(made.at(1.0).documents) & set(WEAK)
    assert "hard" not in made.at(0.0).kinds and not set(made.at(0.0).documents) & set(HARD)


def test_token_totals_agree():
    made = draw(count=words, slot=8)
    totals = token_totals(made, words)
    assert len(totals) == 31 and max(totals) - min(totals) <= 0.01 * max(totals)
    assert totals[3] == sum(words(d) for d in made.at(0.1).documents)


def test_draws_depend_on_the_generator_only():
    assert draw() == draw() and draw(seed=1) != draw()
    slots = {draw(seed=seed).gold_slot for seed in range(200)}
    assert {0, 30} <= slots and len(slots) > 25


def test_half_a_passage_counts_as_one():
    assert [hard_count(p, 30) for p in (0, 0.01, 0.02, 0.05, 0.1, 1)] == [0, 0, 1, 2, 3, 30]


def test_grid_drops_shares_without_a_new_count_with_a_warning():
    with pytest.warns(UserWarning, match=r"N=30 some shares \(0\.01, 0\.02\) give no new"):
        assert grid(30) == (0.0, 0.03, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    with pytest.warns(UserWarning, match="0.0, 1.0 stay"):
        assert grid(1) == (0.0, 1.0)
    with pytest.warns(UserWarning, match="given twice"):
        assert grid(30, (0.0, 0.1, 0.1, 1.0)) == (0.0, 0.1, 1.0)


def test_grid_that_fits_is_kept_silently(recwarn):
    assert grid(200) == GRID and not recwarn.list


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_shares_out_of_range_are_refused(p):
    with pytest.raises(Refused, match="from 0 to 1"):
        draw().at(p)


@pytest.mark.parametrize("n", [0, -3])
def test_no_distractor_is_refused(n):
    with pytest.raises(Refused, match="at least 1 distractor"):
        draw(n)
    with pytest.raises(Refused, match="at least 1 distractor"):
        hard_count(0.5, n)


def test_small_pools_are_refused():
    with pytest.raises(Refused, match="hard pool holds 3 passages for 30 slots"):
        draw(hard=HARD[:3])
    with pytest.raises(Refused, match="weak pool holds 29 passages"):
        draw(weak=WEAK[:29])


def test_gold_without_an_answer_and_gold_among_the_distractors_are_refused():
    with pytest.raises(Refused, match="holds none of the answers blue box"):
        draw(question=Question("Where?", QUESTION.gold, ("blue box",)))
    with pytest.raises(Refused, match="holds none of the answers"):
        draw(question=Question("Where?", "", ("red box",)))
    with pytest.raises(Refused, match="also among the distractors"):
        draw(n=40, hard=[*HARD[:39], QUESTION.gold])


def test_a_leaked_answer_is_named():
    with pytest.raises(Refused, match=r"The key 0 isn't in the Red Box!. holds the answer 'red box'"):
        draw(n=40, hard=["The key 0 isn't in the Red Box!", *HARD[1:]])
    assert holds("a bored boxer", ("red box",)) is None


def test_passages_longer_than_their_slot_and_uneven_totals_are_refused():
    with pytest.raises(Refused, match="has 7 tokens, its slot 6; cut it"):
        draw(count=words, slot=6)
    with pytest.raises(Refused, match=r"tokens as the share grows; expected totals within 1%"):
        draw(weak=[f"{text} And on." for text in WEAK], count=words)


def test_a_part_that_is_not_there_is_refused():
    with pytest.raises(Refused, match="expected no more than it has"):
        draw().kept(3, 4, 0)


def test_text_names_where_passages_stand():
    mix = draw(3).at(0.5)
    body, spans = text_of(mix)
    assert [body[a:b] for a, b in spans] == list(mix.documents) and body.count("\n") == 3 and body.startswith("Document 1: ")
