import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.haystack import NOISE
from longspan.evaluation.tasks.ruler_tracing import VariableTracking


@pytest.mark.parametrize("hops", [1, 4])
def test_chain_order_is_kept(hops):
    task, tokenizer = VariableTracking(hops=hops), tiny_tokenizer()
    for example in task.examples(task.floor(tokenizer) + 400, 3, 0, tokenizer):
        spans = example.meta["spans"]
        statements = [example.context[start:end] for start, end in spans]
        assert spans == sorted(spans)
        assert statements[0] == f"VAR {example.answers[0]} = {example.meta['value']}"
        for before, name, statement in zip(example.answers, example.answers[1:], statements[1:]):
            assert statement == f"VAR {name} = VAR {before}"
        assert len(set(example.answers)) == hops + 1
        assert all(re.fullmatch("[A-Z]{5}", name) for name in example.answers)
        assert example.max_new_tokens == 30
        lines = example.context[example.meta["shots"][0][1]:].split("\n")[2:]
        assert [line for line in lines if line != NOISE] == statements


def test_one_worked_example_precedes():
    example, = VariableTracking().examples(1100, 1, 0, tiny_tokenizer())
    (start, end), = example.meta["shots"]
    shot = example.context[start:end]
    names = re.findall(r"VAR (\w+) =", shot)
    assert len(names) == 5
    assert all(re.fullmatch("[A-Z]{3}", name) for name in names)
    assert shot.rstrip().endswith(" ".join(names))
    assert start == 0
    assert not set(names) & set(example.answers)
