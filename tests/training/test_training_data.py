"""Batches are functions of their number; splits don't mix; the tasks ask what they say."""

import dataclasses

import pytest
import torch

from longspan.registry import Refused
from longspan.training import IGNORE, SYNTHETIC, Bytes, Copy, Recall, TextBatches, TokenizerFile, read_text


def same(a, b):
    return torch.equal(a.ids, b.ids) and torch.equal(a.labels, b.labels)


SOURCES = {
    "text": TextBatches(torch.arange(500) % 256, 20, 3),
    "copy": Copy.fit(20, 3),
    "recall": Recall.fit(20, 3),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_batch_is_a_function_of_number_seed_and_split(source):
    assert same(source(3), source(3)) and source(3).ids.shape == (3, 20)
    assert not same(source(3), source(4))
    assert not same(source(3), dataclasses.replace(source, seed=1)(3))
    assert not same(source(3), dataclasses.replace(source, split="held-out")(3))


def test_text_windows_are_aligned_and_splits_apart():
    tokens = torch.arange(1000)
    train, test = TextBatches(tokens, 16, 8), TextBatches(tokens, 16, 8, split="held-out")
    for index in range(20):
        assert torch.equal(train(index).labels, train(index).ids + 1)
        assert train(index).labels.max() < 900 <= test(index).ids.min()
    starts = torch.cat([train(i).ids[:, 0] for i in range(400)])
    assert starts.min() < 20 and starts.max() > 860


def test_texts_too_short_are_refused():
    with pytest.raises(Refused, match="the held-out part of the text has 10 tokens"):
        TextBatches(torch.arange(100), 16, 1, split="held-out")
    with pytest.raises(Refused, match="did you mean 'train'"):
        TextBatches(torch.arange(100), 4, 1, split="trian")


def test_copy_labels_are_the_first_half():
    task = Copy(symbols=9, length=5, batch=4)
    batch = task(0)
    assert torch.equal(batch.labels[:, 5:], batch.ids[:, :5]) and (batch.labels[:, :5] == IGNORE).all()
    assert (batch.ids[:, 5] == 9).all() and torch.equal(batch.ids[:, 6:], batch.ids[:, :4])
    assert task.vocab_size == 10


def test_recall_answers_are_the_values_told():
    task = Recall(pairs=5, queries=3, keys=8, values=7, batch=6)
    batch = task(2)
    assert batch.ids.max() < task.vocab_size == 15
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist()):
        told = dict(zip(ids[:10:2], ids[1:10:2]))
        assert len(told) == 5
        asked = [t for t, label in enumerate(labels) if label != IGNORE]
        assert asked == [10, 12, 14] and len({ids[t] for t in asked}) == 3
        assert all(labels[t] == told[ids[t]] == ids[t + 1] for t in asked)


def test_recall_refuses_what_cannot_be_asked():
    with pytest.raises(Refused, match="queries=6; expected 1 up to the 5 pairs"):
        Recall(pairs=5, queries=6, keys=8, values=7, batch=1)
    with pytest.raises(Refused, match="pairs=9; expected 1 up to the 8 keys"):
        Recall(pairs=9, queries=1, keys=8, values=7, batch=1)
    for task in SYNTHETIC.values():
        with pytest.raises(Refused, match="context=3"):
            task.fit(3, 1)


def test_installed_texts_are_there():
    topics = read_text("topics")
    assert len(topics) > 200_000 and "statement" in topics and topics == read_text("topics")


def test_standard_library_source_leaves_tests_out():
    source = read_text("stdlib")
    assert len(source) > 2_000_000 and "class OrderedDict" in source and source == read_text("stdlib")


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_text("never")
    assert read_text(tmp_path) == "first\nsecond" and read_text(tmp_path / "b.txt") == "second"
    with pytest.raises(Refused, match="did you mean 'topics'"):
        read_text("topcs")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(Refused, match="no text there"):
        read_text(tmp_path / "empty.txt")


def test_bytes_round_trip():
    text = "naïve 日本\n"
    ids = Bytes().encode(text)
    assert ids.dtype == torch.uint8 and Bytes().decode(ids.tolist()) == text
    assert Bytes().decode([255]) == "\ufffd" and len(Bytes().encode("")) == 0


def test_tokenizer_files(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    reader = TokenizerFile(tmp_path / "tokenizer.json")
    assert reader.encode("b a c") == [1, 0, 2] and reader.vocab_size == 3 and reader.decode([0, 1]) == "a b"
    with pytest.raises(Refused, match="no such file"):
        TokenizerFile(tmp_path / "missing.json")
