import re
from collections import Counter

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.ruler_words import CommonWords, FrequentWords, zipf_counts
from longspan.registry import Refused


def listed(text):
    return Counter(re.findall(r"\d+\. (\w+)", text))


@pytest.mark.parametrize("length,often,seldom,shown_often,shown_seldom", [(1300, 6, 1, 3, 1), (5000, 30, 3, 10, 3)])
def test_ten_words_are_the_most_common(length, often, seldom, shown_often, shown_seldom):
    example, = CommonWords().examples(length, 1, 0, tiny_tokenizer())
    (_, end), = example.meta["shots"]
    counts = listed(example.context[end:])
    assert {word for word, count in counts.items() if count == often} == set(example.answers)
    assert len(set(example.answers)) == 10
    assert set(counts.values()) == {often, seldom}
    shot, answer = example.context[:end].rsplit("list are:", 1)
    assert sorted(set(listed(shot).values())) == sorted({shown_often, shown_seldom})
    assert {word for word, count in listed(shot).items() if count == shown_often} == set(listed(answer))
    assert not set(listed(shot)) & set(counts)
    numbers = re.findall(r"(\d+)\. ", example.context[end:])
    assert numbers == [str(i) for i in range(1, len(numbers) + 1)]


def test_a_word_list_that_runs_out_is_refused(monkeypatch):
    from longspan.evaluation.tasks import ruler_words
    from longspan.evaluation.texts import make_text

    few = make_text("few", "here", "\n".join(f"word{chr(97 + i)}{chr(97 + j)}" for i in range(5) for j in range(20)))
    monkeypatch.setattr(ruler_words, "word_list", lambda source: few)
    with pytest.raises(Refused, match=r"has only 100 words; use words='docstrings'"):
        list(CommonWords().examples(3000, 1, 0, tiny_tokenizer()))


def test_frequent_words_fall_strictly_for_ranks_two_to_four():
    task, tokenizer = FrequentWords(), tiny_tokenizer()
    for length in (task.floor(tokenizer), 900, 2500):
        for example in task.examples(length, 2, 0, tokenizer):
            words = example.context.split("most often.\n")[1].split()
            counts = Counter(words)
            second, third, fourth = (counts[answer] for answer in example.answers)
            assert counts["..."] > second > third > fourth > counts.most_common(5)[4][1] > 0
            assert [second, third, fourth] == example.meta["counts"][:3]
            assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")


def test_counts_follow_the_zeta_law():
    assert zipf_counts(1000, 2.0, 4) == [607, 151, 67, 37]  # 1000 / (k^2 pi^2 / 6), rounded down


def test_vocabulary_has_one_code_for_fifty_tokens():
    example, = FrequentWords(alpha=1.05).examples(1050, 1, 0, tiny_tokenizer())
    assert len(set(example.context.split("most often.\n")[1].split())) == 20
