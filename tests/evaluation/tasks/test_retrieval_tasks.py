import json
import re

from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.haystack import NOISE
from longspan.evaluation.tasks.kv_retrieval import KeyValueRetrieval
from longspan.evaluation.tasks.passkey import Passkey


def test_passkey_is_stated_twice_in_one_line():
    for example in Passkey().examples(600, 4, 0, tiny_tokenizer()):
        hidden, = example.answers
        assert re.fullmatch("[0-9]{5}", hidden)
        assert example.context.count(hidden) == 2
        (start, end), = example.meta["spans"]
        assert example.context[start:end].count(hidden) == 2
        lines = example.context[example.context.index("\n\n") + 2:].split("\n")
        place = next(i for i, line in enumerate(lines) if line != NOISE)
        assert set(lines) - {lines[place]} == {NOISE}
        assert abs(place / len(lines) - example.meta["depth"]) <= 1 / len(lines)
        assert example.max_new_tokens == 6


def test_longer_keys():
    example, = Passkey(digits=12).examples(600, 1, 0, tiny_tokenizer())
    assert len(example.answers[0]) == 12
    assert example.max_new_tokens == 13


def test_pairs_are_a_json_object():
    for example in KeyValueRetrieval().examples(1500, 3, 0, tiny_tokenizer()):
        pairs = json.loads(example.context[example.context.index("{"):])
        key, = example.meta["query"]
        assert (pairs[key],) == example.answers
        assert len(set(pairs.values()) | set(pairs)) == 2 * len(pairs)
        (start, end), = example.meta["spans"]
        assert json.loads("{" + example.context[start:end] + "}") == {key: pairs[key]}
        assert list(pairs).index(key) == int(example.meta["depth"] * len(pairs))
        assert example.answer_prefix == f'"{key}": "'
