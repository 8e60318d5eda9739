import math
import random
import sys

import pytest

from longspan.evaluation import metrics
from longspan.registry import Refused


def test_squad_normal_form_and_f1():
    assert metrics.normalise(" The  Cat, sat on A mat! ") == "cat sat on mat"
    assert metrics.f1("the cat", "cat") == 1.0
    assert metrics.f1("", "cat") == 0.0
    assert metrics.f1("dog", "cat") == 0.0
    assert metrics.f1("a big cat", "cat") == pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert metrics.f1("cat cat", "cat") == pytest.approx(2 / 3)  # multisets: the second cat isn't matched
    assert metrics.best(metrics.f1, "paris", ["london", "Paris"]) == 1.0
    assert metrics.best(metrics.f1, "paris", []) == 0.0


def test_characters_for_chinese():
    assert metrics.normalise_zh("你好， 世界！") == "你好世界"
    assert metrics.f1_characters("你好。", "你好") == 1.0
    assert metrics.f1_characters("你", "你好") == pytest.approx(2 / 3)


def test_missing_jieba_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(Refused, match="jieba"):
        metrics.f1_zh("你好", "你好")


def test_ruler_matching():
    assert metrics.match_all("11 and 33", ["11", "22", "33", "44"]) == 0.5
    assert metrics.match_all("ALPHA beta", ["alpha", "Beta"]) == 1.0
    assert metrics.match_all("", ["11"]) == 0.0
    assert metrics.match_all("anything", []) == 0.0
    assert metrics.match_part("in Paris, France", ["london", "paris"]) == 1.0
    assert metrics.match_part("", ["paris"]) == 0.0
    assert metrics.clean(" a\x00b\x1fc\n") == "a\nb\nc"


def test_contains_whole_words():
    assert metrics.contains("You should EAT a lemon\ntart, really.", "eat a lemon tart") == 1.0
    assert metrics.contains("eat a lemon tartlet", "eat a lemon tart") == 0.0
    assert metrics.contains("", "eat") == 0.0
    assert metrics.contains("eat", "") == 0.0


def test_infinitebench_rules():
    assert metrics.passkey("is 12345. 6", "12345") == 1.0
    assert metrics.passkey("is 6, not 12345", "12345") == 0.0
    assert metrics.passkey("", "12345") == 0.0
    label = "3f2b8a9c-0d1e-4567-8a9c-0d1e45678a9c"
    assert metrics.kv_label(f'{{"{label}"}}.', label) == 1.0
    assert metrics.kv_label(label[:-1], label) == 0.0
    assert metrics.last_integer("The result is `-7`.", -7) == 1.0
    assert metrics.last_integer("", -7) == 0.0
    assert metrics.first_number("it is 3.5, or 3", 3) == 0.0  # the published scorer crashes here
    assert metrics.first_number("it is 3", 3) == 1.0
    assert metrics.correct_prefix("1, 4, 8, 9", [1, 4, 7, 9]) == 0.5
    assert metrics.correct_prefix("", [1, 4]) == 0.0


def test_babilong_label_rule():
    labels = ["bathroom", "bedroom", "kitchen", "office"]
    assert metrics.babilong("The kitchen. Or the office.", "kitchen", "Where is Mary?", labels) == 1.0
    assert metrics.babilong("kitchen or office", "kitchen", "Where is Mary?", labels) == 0.0
    assert metrics.babilong("from the office to the kitchen", "kitchen", "Where before the office?", labels) == 1.0
    assert metrics.babilong("", "kitchen", "Where is Mary?", labels) == 0.0
    things = ["apple", "football", "milk", "nothing"]
    assert metrics.babilong("milk, apple", "apple,milk", "What is Mary carrying?", things) == 1.0
    assert metrics.babilong("apple", "apple,milk", "What is Mary carrying?", things) == 0.0
    assert metrics.babilong("n,e", "n,e", "How do you go?", ["n,e", "e,n", "s,s"]) == 1.0


def test_babilong_labels_are_whole_words():
    counts, question = ["none", "one", "two", "three"], "How many objects is Mary carrying?"
    assert metrics.babilong("none", "none", question, counts) == 1.0
    assert metrics.babilong("None.", "one", question, counts) == 0.0
    assert metrics.babilong("one or none", "none", question, counts) == 0.0
    for said in ("I don't know", "noon", "nobody"):
        assert metrics.babilong(said, "no", "Is Mary in the office?", ["yes", "no"]) == 0.0
    assert metrics.babilong(" No, she isn't", "no", "Is Mary in the office?", ["yes", "no"]) == 1.0
    assert metrics.babilong("one", "one", "Is anyone carrying something?", counts) == 1.0  # "one" isn't in the question either


def test_rouge():
    assert metrics.rouge_1("the cat sat", "the cat sat") == 1.0
    assert metrics.rouge_1("", "the cat sat") == 0.0
    assert metrics.rouge_1("cat the", "the cat sat") == pytest.approx(0.8)  # order doesn't matter: 2 of 2, 2 of 3
    assert metrics.rouge_l("cat the", "the cat sat") == pytest.approx(0.4)  # it does: 1 of 2, 1 of 3


def test_missing_rouge_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(Refused, match="rouge"):
        metrics.rouge_l_upstream("a b", "a b")


def test_classification():
    classes = ["Food", "Animal", "Animal food", "Sport"]
    assert metrics.classification("Sport", "Sport", classes) == 1.0
    assert metrics.classification("Food or Sport", "Sport", classes) == 0.5
    assert metrics.classification("Animal", "Sport", classes) == 0.0
    assert metrics.classification("", "Sport", classes) == 0.0


def test_classification_drops_parts_of_the_right_name():
    classes = ["Animal", "Anim", "Animal food", "Sport"]
    assert metrics.classification("Animal food", "Animal food", classes) == 1.0
    # The published loop removes Animal, thereby skips Anim, and so scores one of two.
    assert metrics.classification("Animal food", "Animal food", classes, upstream=True) == 0.5


def test_counting_and_retrieval():
    assert metrics.count("There are 7", "7") == 1.0
    assert metrics.count("7 or 8", "7") == 0.5
    assert metrics.count("", "7") == 0.0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert metrics.retrieval("段落12", "段落12") == 1.0
    assert metrics.retrieval("Paragraph 1", "Paragraph 12") == 0.0
    assert metrics.retrieval("no idea", "Paragraph 12") == 0.0


def test_code_similarity():
    assert metrics.code_sim("return x", "return x") == 1.0
    assert metrics.code_sim("\n```python\n# a comment\nreturn x\nmore", "return x") == 1.0
    assert metrics.code_sim("", "return x") == 0.0
    assert metrics.code_sim("", "") == 0.0
    exact = metrics.code_sim("return y", "return x")
    assert exact == pytest.approx(14 / 16)
    assert metrics.code_sim("return y", "return x", upstream=True) == pytest.approx(0.88)


def test_perplexity_of_a_uniform_model():
    assert metrics.perplexity([math.log(256)] * 5) == pytest.approx(256)
    with pytest.raises(ValueError, match="no tokens"):
        metrics.perplexity([])


def test_word_perplexity_does_not_depend_on_the_tokenizer():
    """A model that is uniform over bytes gives a token of k bytes k ln 256, however the text is cut into tokens."""
    text = "several words, cut at random"
    rng = random.Random(0)
    found = []
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, len(text)), 6))
        tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        total = sum(len(token.encode()) * math.log(256) for token in tokens)
        found.append(metrics.word_perplexity(total, len(text.split())))
    assert found == pytest.approx([256 ** (len(text) / 5)] * 3)
    with pytest.raises(ValueError, match="0 words"):
        metrics.word_perplexity(1.0, 0)


@pytest.mark.parametrize("tokens,window,stride", [(100, 16, 8), (100, 16, 16), (5, 16, 8), (17, 16, 16), (33, 2, 1)])
def test_windows_score_every_token_once(tokens, window, stride):
    found = metrics.windows(tokens, window, stride)
    assert [t for start, first, end in found for t in range(first, end)] == list(range(1, tokens))
    assert all(start < first and end - start <= window for start, first, end in found)


def test_windows_refuse_a_stride_beyond_the_window():
    with pytest.raises(ValueError, match="stride 9"):
        metrics.windows(100, 8, 9)


def test_more_context_lowers_perplexity():
    """A model that is sure only once it has 64 tokens of context: a smaller stride gives it more."""
    def nll(start, first, end):
        return [0.1 if token - start >= 64 else 3.0 for token in range(first, end)]

    wide = metrics.windowed_perplexity(nll, 1024, 128, 128)
    narrow = metrics.windowed_perplexity(nll, 1024, 128, 32)
    assert narrow < wide
    assert metrics.windowed_perplexity(nll, 1024, 128, 32, words=300) > narrow  # fewer words than tokens


def test_helmet_matching():
    assert metrics.substring_match("It is the Blue-Whale, I think.", ["bluewhale"]) == 1.0
    assert metrics.substring_match("", ["blue"]) == 0.0
    assert metrics.substring_match("blue", [""]) == 0.0
    assert metrics.exact_match(" 7.", ["7"]) == 1.0
    assert metrics.exact_match("17", ["7"]) == 0.0
    assert metrics.exact_match("", [""]) == 0.0


def test_summaries_are_compared_line_by_line():
    assert metrics.rouge_l_sum("b c\na", "a\nb c") == 1.0  # the order of lines doesn't matter
    assert metrics.rouge_l("b c\na", "a\nb c") == pytest.approx(2 / 3)
    assert metrics.rouge_l_sum("", "a\nb c") == 0.0
