import json

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import answer_text, total_length
from longspan.evaluation.tasks.infinitebench_files import SUBSETS, InfiniteBench, chosen_option, names_function
from longspan.registry import Refused

OPTIONS = ["run_fast", "walk", "swim", "fly"]


@pytest.fixture()
def write(tmp_path):
    def make(name, **changes):
        row = {"id": 0, "context": "Once upon a time. " * 300, "input": "Who did it?", "answer": ["walk"], "options": [],
               **changes}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        return str(tmp_path / f"{name}.jsonl")

    return make


@pytest.mark.parametrize("name,right,wrong,options", [
    ("longbook_qa_eng", "The walk!", "run", []), ("longbook_qa_chn", "walk", "", []), ("longbook_sum_eng", "walk", "run", []),
    ("longbook_choice_eng", "B", "A", OPTIONS), ("longdialogue_qa_eng", "It is: walk.", "run", []),
    ("code_debug", "B. walk", "A. run", OPTIONS),
])
def test_each_task(write, name, right, wrong, options):
    answer = "WALK" if name == "longdialogue_qa_eng" else "walk"
    length = 600 + SUBSETS[name].new_tokens
    task, tokenizer = InfiniteBench(path=write(name, options=options, answer=[answer])), tiny_tokenizer()
    example, = task.examples(length, 5, 0, tokenizer)
    assert total_length(example, tokenizer) <= length
    assert example.meta["truncated"] and example.max_new_tokens == SUBSETS[name].new_tokens
    assert task.metric(f" {answer_text(example)}", example) == 1.0
    assert task.metric(right, example) == 1.0
    assert task.metric(wrong, example) == 0.0
    assert task.metric("", example) == 0.0
    if options:
        assert "A. run_fast\nB. walk" in example.question


@pytest.mark.parametrize("said,letter", [("C", "C"), ("C. swim", "C"), ("The answer is: C", "C"), ("My answer is C.", "C"),
                                         ("I think it must be D", "D"), ("The answer is: nothing, D", None), ("E", None),
                                         ("", None)])
def test_option_letters(said, letter):
    assert chosen_option(said) == letter


@pytest.mark.parametrize("said,right", [("B. walk", 1), ("B: ", 1), ("B", 0), ("The answer is: B", 1), ("The answer is: walk", 1),
                                        ("The answer is: A, not B.", 0), ("is: Option B", 1), ("", 0)])
def test_functions_with_errors(said, right):
    assert names_function(said, "B", "walk") == right


def test_refusals(write, tmp_path):
    tokenizer = tiny_tokenizer()
    with pytest.raises(Refused, match="infinitebench needs path="):
        list(InfiniteBench().examples(700, 1, 0, tokenizer))
    with pytest.raises(Refused, match="did you mean 'longbook_qa_eng'"):
        list(InfiniteBench(path=write("longbook_qa_en")).examples(700, 1, 0, tokenizer))
    with pytest.raises(Refused, match="'walk' is none of its options"):
        list(InfiniteBench(path=write("code_debug", options=["a", "b"])).examples(700, 1, 0, tokenizer))
    with pytest.raises(Refused, match="no field 'input'"):
        (tmp_path / "code_debug.jsonl").write_text('{"answer": "x", "context": "y"}\n')
        list(InfiniteBench(path=str(tmp_path), name="code_debug").examples(700, 1, 0, tokenizer))
