"""Segments, pairs, prompts: what is asked about the order of a text."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import prompt_parts
from longspan.evaluation.order import Pair, find_segments, label_ids, locate, prepare, sample_pairs, shuffled, suffix
from longspan.evaluation.order.prompts import INSTRUCTION, LABELS, PREFIX, QUESTION, example, exchange, orders
from longspan.evaluation.order.segments import Segment, bin_edges
from longspan.evaluation.texts import load_text
from longspan.registry import Refused


def text(sentences=120, start=40):
    return " ".join(load_text("pydoc").sentences[start : start + sentences])


def test_segments_start_sentences_and_occur_once():
    t = text()
    found = find_segments(t, 8)
    assert len(found) > 20
    for s in found:
        assert t[s.first : s.last] == s.text and t.count(s.text) == 1 and len(s.text.split()) == 8
        assert s.first == 0 or t[: s.first].rstrip().rstrip("\"')]”’")[-1] in ".!?"
        assert (s.start, s.end) == (s.first, s.last)


def test_repeated_segments_are_left_out():
    t = "One two three four five. Six seven eight nine ten. One two three four five. Ten nine eight seven six."
    assert [s.text for s in find_segments(t, 5)] == ["Six seven eight nine ten.", "Ten nine eight seven six."]


def test_pairs_fill_eight_log_spaced_bins_equally():
    t = text(400)
    pairs = sample_pairs(find_segments(t, 8), len(t), 80, random.Random(1))
    assert set(Counter(p.bin for p in pairs).values()) == {10} and len(pairs) == 80
    assert len({(p.earlier.start, p.later.start) for p in pairs}) == 80
    edges = bin_edges(find_segments(t, 8), len(t))
    ratios = [b / a for a, b in pairwise(edges)]
    assert max(ratios) / min(ratios) == pytest.approx(1)
    for p in pairs:
        assert edges[p.bin] * (1 - 1e-6) <= p.distance <= edges[p.bin + 1] * (1 + 1e-6)
        assert p.later.start >= p.earlier.end and p.times[1] - p.times[0] == pytest.approx(p.distance)


def test_every_pair_of_a_bin_is_as_likely():
    places = [Segment(str(i), 10 * i, 10 * i + 5, 10 * i, 10 * i + 5) for i in range(6)]
    drawn = Counter((p.earlier.start, p.later.start) for seed in range(600)
                    for p in sample_pairs(places, 60, 1, random.Random(seed), bins=1))
    assert len(drawn) == 15 and min(drawn.values()) > 20 and max(drawn.values()) < 65


def test_bad_segments_are_refused():
    with pytest.raises(Refused, match="not found in the text"):
        locate("a b c", "d")
    with pytest.raises(Refused, match="more than once"):
        locate("a b a b", "a b")
    with pytest.raises(Refused, match="39 words: expected at least 4 segments of 10"):
        find_segments(" ".join(["word"] * 39), 10)
    one, two = Segment("a", 0, 9, 0, 9), Segment("b", 5, 14, 5, 14)
    with pytest.raises(Refused, match="overlap"):
        Pair(one, two, 100)
    with pytest.raises(Refused, match="distance above 0"):
        Pair(one, one, 100)
    with pytest.raises(Refused, match="all of which overlap"):
        sample_pairs([one, two], 100)


def test_blocks_are_shuffled_whole():
    given = [str(i) for i in range(20)]
    found = shuffled(given, 4, random.Random(0))
    assert sorted(found) == sorted(given) and found != given
    assert all(int(found[4 * b + i]) == int(found[4 * b]) + i for b in range(5) for i in range(4))


def test_exchanging_twice_is_the_identity():
    t = text()
    pair = sample_pairs(find_segments(t, 8), len(t), 8)[3]
    first, second = orders(pair)
    assert exchange(first) == second and exchange(exchange(first)) == first


def test_positions_are_tokens_of_the_text_as_it_is_read():
    tokenizer, t = tiny_tokenizer(), text(60)
    ready = prepare(tokenizer, t)
    assert ready.ids == prompt_parts(example(t, "x", "y"), tokenizer).context_ids
    for s in find_segments(t, 8, ready.starts)[:12]:
        assert 0 <= s.start < s.end <= ready.n
        shown = tokenizer.decode(ready.ids[ready.offset + s.start : ready.offset + s.end])
        assert s.text in shown and len(shown) <= len(s.text) + 8
    empty = prepare(tokenizer, "")
    assert empty.n == 0 and tokenizer.decode(empty.ids).endswith(INSTRUCTION)


@pytest.mark.parametrize("first_is_a", [True, False])
def test_the_copies_are_found_in_the_question(first_is_a):
    tokenizer, t = tiny_tokenizer(), text(60)
    a, b = find_segments(t, 8)[2], find_segments(t, 8)[9]
    asked = suffix(tokenizer, (a.text, b.text, first_is_a))
    assert asked.first_is_a is first_is_a
    for s, (first, end) in zip((a, b), asked.spans):
        shown = tokenizer.decode(asked.ids[first:end])
        assert s.text in shown and len(shown) <= len(s.text) + 8
    whole = tokenizer.decode(asked.ids)
    assert QUESTION.format(a="A", b="B", first=a.text, second=b.text) in whole and whole.endswith(PREFIX)


def test_labels_are_single_tokens_or_others_are_offered():
    tokenizer = tiny_tokenizer()
    found = label_ids(tokenizer, ("1", "2"))
    assert [tokenizer.decode([i]).strip() for i in found] == ["1", "2"]
    with pytest.raises(Refused, match="single tokens for this tokenizer; expected labels that are, such as labels="):
        label_ids(tokenizer, LABELS)  # this small vocabulary has no " A"
    with pytest.raises(Refused, match="two different single tokens"):
        label_ids(tokenizer, ("1", "1"))


def test_a_text_of_one_token_is_refused():
    with pytest.raises(Refused, match="a text of 1 token"):
        prepare(tiny_tokenizer(), "a")
