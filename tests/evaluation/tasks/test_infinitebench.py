import ast
import contextlib
import io
import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.infinitebench import QUERIES, CodeRun, MathCalc, MathFind, NumberString


def test_number_string_doubles_five_digits():
    for example in NumberString().examples(600, 3, 0, tiny_tokenizer()):
        hidden, = example.answers
        assert re.fullmatch("[0-9]{10}", hidden)
        assert len(re.sub(r"(\d)\1+", r"\1", hidden)) <= 5
        assert example.context.count(hidden) == 2
        assert example.max_new_tokens == 12


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_code_returns_the_answer_when_run(layers):
    for example in CodeRun(layers=layers).examples(1000, 3, 0, tiny_tokenizer()):
        code = example.context.split("\n\n", 1)[1]
        call = re.search(r"(func_\d+)\((-?\d+)\)", example.question)
        names: dict = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(ast.parse(code), "example", "exec"), names)
        assert names[call[1]](int(call[2])) == int(example.answers[0])
        assert len(example.meta["spans"]) == layers  # one function a layer on the way
        assert all(example.context[start:end].startswith("def func_") for start, end in example.meta["spans"])
        assert -10 <= int(call[2]) <= 10


def test_find_asks_seven_queries_in_turn():
    found = list(MathFind().examples(600, 7, 0, tiny_tokenizer()))
    assert [example.meta["query"] for example in found] == [[query] for query in QUERIES]
    for example in found:
        numbers = ast.literal_eval(example.context.split("\n\n")[1])
        ranked = sorted(set(numbers))
        right = {"largest number": ranked[-1], "second largest number": ranked[-2],
                 "third largest number": ranked[-3], "smallest number": ranked[0], "second smallest number": ranked[1],
                 "third smallest number": ranked[2], "median": sorted(numbers)[len(numbers) // 2]}
        assert example.answers == (str(right[example.meta["query"][0]]),)
        assert len(numbers) == example.meta["count"] > 40
    assert found[-1].meta["count"] % 2 == 1


def test_calc_lists_intermediate_values():
    task = MathCalc()
    example, = task.examples(800, 1, 0, tiny_tokenizer())
    text = example.context.split("Sum: ")[1]
    value, values = 0, []
    for sign, number in re.findall(r"([+-]?) ?(\d+)", text):
        value += -int(number) if sign == "-" else int(number)
        values.append(str(value))
    assert tuple(values) == example.answers
    assert all(0 <= int(value) < 100 for value in values)
    wrong = ", ".join([*values[:10], "1000", *values[11:]])
    assert task.metric(wrong, example) == pytest.approx(10 / len(values))
    assert example.max_new_tokens > 2 * len(values)
