import random
from collections import Counter

import pytest
from scipy import stats

from longspan.evaluation.mgal import LETTERS, Choices, chosen_letter, rotation_accuracy
from longspan.registry import Refused

WRONG = [f"wrong {i}" for i in range(9)]


def choices(seed=0):
    return Choices.shuffled("gold", WRONG, "en", random.Random(seed))


def test_the_gold_is_there_once_at_its_letter():
    made = choices()
    assert made.options.count("gold") == 1 and sorted(made.options) == sorted(["gold", *WRONG])
    assert made.options[LETTERS.index(made.letter)] == "gold" and f"({made.letter}) gold" in made.shown().splitlines()


def test_letters_are_uniform_over_items():
    counts = Counter(choices(f"item {i}").right for i in range(5000))
    assert len(counts) == 10 and stats.chisquare(list(counts.values())).pvalue > 0.001


def test_rotations_only_permute_letters():
    made = choices()
    turns = made.rotations(10)
    assert turns[0] == made and {t.right for t in turns} == set(range(10))
    assert all(sorted(t.options) == sorted(made.options) and t.options[t.right] == "gold" for t in turns)
    assert rotation_accuracy(lambda c: c.options.index("gold"), turns) == 1.0
    assert rotation_accuracy(lambda c: 0, turns) == pytest.approx(0.1)
    assert len({t.right for t in made.rotations()}) == 4


@pytest.mark.parametrize("wrong,language,said", [([], "en", "1 options: expected 2 to 14"), (["GOLD "], "en", "identical after"),
                                                 (["a", "Ａ"], "en", "'a' and 'Ａ' are identical"),
                                                 ([str(i) for i in range(14)], "en", "15 options: expected 2 to 14, such as 14")])
def test_options_that_cannot_be_are_refused(wrong, language, said):
    with pytest.raises(Refused, match=said):
        Choices.shuffled("gold", wrong, language, random.Random(0))


def test_options_alike_but_for_vowel_signs_are_refused():
    with pytest.raises(Refused, match="identical after normalisation"):
        Choices.shuffled("محمد", ["مُحَمَّد"], "ar", random.Random(0))


def test_too_many_rotations_are_refused():
    with pytest.raises(Refused, match="11 rotations of 10 options"):
        choices().rotations(11)


@pytest.mark.parametrize("said,letter", [(" (C) because", "C"), (" C", "C"), ("C.", "C"), ("The answer is (J)", "J"),
                                         ("Cats", None), ("(K)", None), ("", None), ("答案是(B)。", "B"), ("B。", "B"),
                                         ("(g)", "G"), (" g.", "G"), ("a cat", None), ("(G), so (G)", "G"),
                                         ("C. A school was built", "C"), ("C. I think", "C")])
def test_the_letter_is_found(said, letter):
    assert chosen_letter(said, 10) == letter


@pytest.mark.parametrize("said", ["(G) (A) (B)", "(G) or (a)", "G A B", "G, A", "G or A", "A/B/C", "G. A. B.", "GAB"])
def test_more_than_one_letter_is_no_answer(said):
    assert chosen_letter(said, 10) is None
