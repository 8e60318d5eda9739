"""The task that asks which of two segments came first."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.temporal_order import TemporalOrder
from longspan.evaluation.texts import make_text
from longspan.registry import Refused


def examples(n, length=1500, **knobs):
    return list(TemporalOrder(**knobs).examples(length, n, 0, tiny_tokenizer()))


def shown(example):
    return re.search(r"Segment A: (.*)\n\nSegment B: (.*)\n\nWhich", example.question).groups()


def test_both_orders_come_as_examples_and_answers_are_balanced():
    found = examples(16)
    assert Counter(e.answers[0] for e in found[:8]) == Counter(e.answers[0] for e in found[8:]) == {"A": 4, "B": 4}
    for first in (0, 1, 2, 3, 8, 9, 10, 11):
        one, two = found[first], found[first + 4]
        assert one.meta["pair"] == two.meta["pair"] and one.context == two.context and shown(one) == shown(two)[::-1]
        assert one.answers != two.answers
    assert len({e.meta["pair"] for e in found}) == 8


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_answer_is_the_segment_that_came_first(shuffle):
    for e in examples(8, shuffle=shuffle):
        a, b = shown(e)
        assert e.context.count(a) == e.context.count(b) == 1
        assert e.answers[0] == ("A" if e.context.index(a) < e.context.index(b) else "B")
        assert [e.context[s:t] for s, t in e.meta["spans"]] == ([a, b] if e.answers[0] == "A" else [b, a])
        assert len(a.split()) == len(b.split()) == 20
        assert e.meta["spans"][1][0] >= e.meta["spans"][0][1]


def test_distances_take_turns():
    found = [e for e in examples(16) if e.meta["index"] % 8 < 4]
    distances = [e.meta["distance"] for e in found]
    assert [e.meta["bin"] for e in found] == list(range(8)) and distances == sorted(distances)
    assert distances[-1] > 0.5 and distances[0] < 0.15


def test_the_first_label_that_stands_alone_counts():
    task, (example, *_) = TemporalOrder(), examples(1)
    assert example.answers == ("A",)
    for said, score in ((" A", 1.0), (" A.", 1.0), ("Segment A, not B", 1.0), (" B", 0.0), (" Apples", 0.0), ("", 0.0)):
        assert task.metric(said, example) == score


def test_segments_shorter_than_three_words_are_refused():
    with pytest.raises(Refused, match="at least 3"):
        TemporalOrder(words=2)


def test_a_text_without_sentences_is_refused(monkeypatch):
    words = " ".join(f"word{i}" for i in range(2000))
    monkeypatch.setattr(TemporalOrder, "text", make_text("words", "here", words))
    with pytest.raises(Refused, match="hold no two segments of 20 words"):
        examples(1)
