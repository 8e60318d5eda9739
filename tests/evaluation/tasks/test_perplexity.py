import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import answer_ids, prompt_parts
from longspan.evaluation.tasks.perplexity import Perplexity, _by_offsets, _by_words
from longspan.evaluation.texts import make_text
from longspan.registry import Refused


@pytest.fixture()
def file(tmp_path):
    text = " ".join(f"Sentence number {i} says something about item {i * 7 % 13}." for i in range(300))
    (tmp_path / "book.txt").write_text(text)
    return str(tmp_path / "book.txt"), text


def test_targets_of_all_windows_tile_the_text(file):
    path, text = file
    found = list(Perplexity(path=path, stride=100).examples(300, 10**6, 0, tiny_tokenizer()))
    found.sort(key=lambda example: example.meta["position"])
    joined = "".join(example.meta["target"] for example in found)
    assert found[0].context + joined == text[:len(found[0].context + joined)]
    assert found[0].meta["at_start"] and not found[1].meta["at_start"]
    assert len(joined) > 0.9 * (len(text) - len(found[0].context))
    assert sum(example.meta["words"] for example in found) == len(joined.split())
    for example in found:
        assert text.count(example.context + example.meta["target"]) == 1


def test_target_takes_about_the_stride(file):
    tokenizer = tiny_tokenizer()
    for example in Perplexity(path=file[0], stride=100).examples(300, 5, 0, tokenizer):
        assert abs(len(answer_ids(example, tokenizer)) - 100) < 12
        assert prompt_parts(example, tokenizer).question_ids == []
        assert example.max_new_tokens == 0
        assert example.answers == ()


def test_order_depends_on_the_seed_and_each_window_comes_once(file):
    first, second = ([example.meta["position"] for example in
                      Perplexity(path=file[0], stride=100).examples(300, 10**6, seed, tiny_tokenizer())]
                     for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == sorted(set(first))


def test_streaming_scores_all_but_the_first_window(file):
    tokenizer = tiny_tokenizer()
    for example in Perplexity(mode="streaming", window=80, stride=20, path=file[0]).examples(400, 3, 0, tokenizer):
        assert abs(len(answer_ids(example, tokenizer)) - 319) < 12
        assert abs(len(prompt_parts(example, tokenizer).context_ids) - 80) < 12
        assert example.meta["mode"] == "streaming"
        assert example.meta["stride"] == 20


def test_metric_is_the_share_of_words_continued(file):
    example, = Perplexity(path=file[0]).examples(200, 1, 0, tiny_tokenizer())
    words = example.meta["target"].split()
    assert Perplexity().metric(" ".join(words[:10]), example) == pytest.approx(10 / len(words))
    assert Perplexity().metric("x " + " ".join(words), example) == 0.0


def test_refusals(file):
    with pytest.raises(Refused, match="at most"):
        list(Perplexity(path=file[0]).examples(100_000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="sliding"):
        Perplexity(window=10)
    with pytest.raises(Refused, match="at least 132"):
        list(Perplexity(path=file[0], stride=100).examples(100, 1, 0, tiny_tokenizer()))


def test_words_are_counted_the_same_with_and_without_offsets():
    text = make_text("t", "here", "Some words,  and\n\nsome more (of them).")
    assert _by_offsets(text, tiny_tokenizer()) == _by_words(text, tiny_tokenizer())
