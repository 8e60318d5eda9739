import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks import ruler_niah
from longspan.evaluation.tasks.haystack import NOISE, RULER_DEPTHS
from longspan.registry import get

assert ruler_niah  # importing it registers the tasks
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for ([\w-]+) is: ([\w-]+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
#            name        haystack  keys values queries value
TABLE = {
    "single-1": ("noise", 1, 1, 1, "numbers"), "single-2": ("essay", 1, 1, 1, "numbers"),
    "single-3": ("essay", 1, 1, 1, "uuids"), "multikey-1": ("essay", 4, 1, 1, "numbers"),
    "multikey-2": ("needles", 1, 1, 1, "numbers"), "multikey-3": ("needles", 1, 1, 1, "uuids"),
    "multivalue": ("essay", 1, 4, 1, "numbers"), "multiquery": ("essay", 4, 1, 4, "numbers"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_suite(name):
    haystack, keys, values, queries, kind = TABLE[name]
    task, tokenizer = get(f"ruler-niah-{name}")(), tiny_tokenizer()
    for example in task.examples(max(1200, task.floor(tokenizer)), 2, 0, tokenizer):
        found = NEEDLE.findall(example.context)
        assert {k for k, _, _ in found} == {kind}
        assert len(found) == len(set(found))  # every needle occurs once
        assert example.max_new_tokens == 128
        assert len(example.answers) == values * queries == len(example.meta["spans"])
        asked = [(key, value) for _, key, value in found if key in example.meta["query"]]
        assert sorted(value for _, value in asked) == sorted(example.answers)
        assert len({key for key, _ in asked}) == queries
        needles = [example.context[start:end] for start, end in example.meta["spans"]]
        assert all(NEEDLE.fullmatch(needle) for needle in needles)
        form = UUID if kind == "uuids" else "[1-9][0-9]{6}"
        assert all(re.fullmatch(form, value) for value in example.answers)
        assert len(found) == keys * values or haystack == "needles"
        if haystack == "noise":
            lines = example.context.split("\n")[1:]
            assert set(lines) - set(needles) == {NOISE}
        if haystack == "needles":
            assert all(NEEDLE.fullmatch(line) for line in example.context.split("\n")[1:])
        if haystack == "essay":
            assert set(example.meta["depths"]) <= set(RULER_DEPTHS)
            assert task.text.name == "pydoc"
        else:
            assert task.text is None


def test_wording_is_singular_for_one_value():
    tokenizer = tiny_tokenizer()
    one, = get("ruler-niah-single-1")().examples(700, 1, 0, tokenizer)
    many, = get("ruler-niah-multiquery")().examples(1100, 1, 0, tokenizer)
    assert one.context.startswith("A special magic number is hidden")
    assert one.answer_prefix.endswith("mentioned in the text is")
    assert many.context.startswith("Some special magic numbers are hidden")
    assert ", and " in many.question
    assert many.answer_prefix.endswith("mentioned in the text are")


def test_half_of_the_values_scores_half():
    task = get("ruler-niah-multivalue")()
    example, = task.examples(1100, 1, 0, tiny_tokenizer())
    assert task.metric(" and ".join(example.answers[:2]), example) == 0.5


def test_scores_on_own_text_are_named_open():
    assert get("ruler-niah-single-1")().score_name == "ruler-niah-single-1"
    assert get("ruler-niah-single-2")().score_name == "ruler-niah-single-2-open"
