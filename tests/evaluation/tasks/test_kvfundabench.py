"""KVFundaBench's tasks: shots and their ranges, right answers, files of the published data sets."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import answer_text, prompt_parts, token_spans, total_length
from longspan.evaluation.runner import parse_task
from longspan.evaluation.tasks.kvfundabench import final_number
from longspan.evaluation.tasks.kvfundabench_choices import ASKED, FACTS, chosen_letter
from longspan.evaluation.tasks.kvfundabench_code import results
from longspan.registry import Refused, cards

OWN = ["kvfunda-arithmetic", "kvfunda-long-generation", "kvfunda-knowledge", "kvfunda-commonsense", "kvfunda-code"]
LENGTH = 4600


def made(text, n=1, length=LENGTH, seed=0):
    task = parse_task(text)
    return task, list(task.examples(length, n, seed, tiny_tokenizer()))


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def gsm8k(n):
    return [{"question": f"Ann has {i} pens and buys {i}. How many?",
             "answer": f"She has {i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"} for i in range(500, 500 + n)]


# ----------------------------------------------------------------------------------------------------------- questions


def test_cards():
    found = {card.name for card in cards(kind="task") if card.system == "shotkv"}
    assert found == {*OWN, "kvfunda-safety"}


@pytest.mark.parametrize("name", OWN)
def test_as_many_shots_as_asked_for_tile_the_context_behind_the_header(name):
    more = ", K=3" if "long" in name else ""
    for count in (0, 1, 12):
        task, (example,) = made(f"{name}(shots={count}{more})")
        spans = example.meta["shots"]
        assert len(spans) == count
        assert spans == [] or (spans[0][0] == len(task.header) and spans[-1][1] == len(example.context))
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(example.context[a:].startswith(task.asked) for a, _ in spans)
        assert all(example.context[a:b].count(task.answered) == 1 for a, b in spans)
        tokens = token_spans(example, tiny_tokenizer(), "shots")
        assert all(a[1] == b[0] for a, b in pairwise(tokens)), "no token belongs to two shots"
        assert tokens == [] or tokens[-1][1] == len(prompt_parts(example, tiny_tokenizer()).context_ids)


def test_the_question_is_the_same_with_and_without_shots():
    few, none = (made(f"kvfunda-arithmetic(shots={n})", 3)[1] for n in (12, 0))
    assert [e.question for e in few] == [e.question for e in none] and [e.answers for e in few] == [e.answers for e in none]
    assert [e.context for e in few] != [e.context for e in none]


def test_without_a_number_shots_fill_the_length():
    _, (short,) = made("kvfunda-arithmetic", length=600)
    _, (long,) = made("kvfunda-arithmetic", length=1200)
    assert len(short.meta["shots"]) < len(long.meta["shots"])
    assert 1050 < total_length(long, tiny_tokenizer()) <= 1200


def test_arithmetic_adds_up():
    _, found = made("kvfunda-arithmetic(shots=12)", 20)
    for example in found:
        start, more, less = map(int, re.findall(r"\d+", example.question))
        text = answer_text(example)
        assert start + more - less == int(example.answers[0]) >= 0
        assert text == (f"start={start}; plus {more} -> {start + more}; minus {less} -> {start + more - less}; "
                        f"FINAL [{start + more - less}]")


@pytest.mark.parametrize(("text", "wanted"), [
    (" start=3; plus 4 -> 7; FINAL [7]", "7"), ("FINAL [7] FINAL [8]", "7"), ("so #### 1,200", "1200"), ("7", None), ("", None),
    ("FINAL [-2]", "-2"), ("FINAL [x]", None)])
def test_final_numbers(text, wanted):
    assert final_number(text) == wanted


def test_long_generation_scores_every_numbered_answer():
    task, (example,) = made("kvfunda-long-generation(K=4, shots=2)")
    assert len(example.answers) == 4 and example.max_new_tokens == 256
    assert [len(re.findall(f"Question {i}:", example.question)) for i in (1, 2, 3, 4)] == [1] * 4
    lines = answer_text(example).split("\n")
    assert task.metric(" " + "\n".join(lines), example) == 1
    assert task.metric(" " + "\n".join(lines[:2]), example) == 0.5
    assert task.metric(" FINAL [-5]\n" + "\n".join(lines[1:]), example) == 0.75
    swapped = [lines[0], lines[1].replace("Answer 2", "Answer 3"), lines[2].replace("Answer 3", "Answer 2"), lines[3]]
    expected = (2 + 2 * (example.answers[1] == example.answers[2])) / 4
    assert task.metric("\n".join(swapped), example) == expected
    assert task.metric("\n".join([*lines, f"Answer 1: FINAL [{example.answers[0]}9]"]), example) == 1, "what is said first counts"


def test_choices_have_one_right_answer():
    for name, count in (("kvfunda-knowledge", 4), ("kvfunda-commonsense", 5)):
        task, found = made(f"{name}(shots=1)", 30)
        for example in found:
            options = dict(re.findall(r"\(([A-E])\) (.+)", example.question))
            assert len(options) == count == len(set(options.values()))
            right = options[example.answers[0]]
            asked = example.question.split("\n")[0].removeprefix("Question: ")
            known = ({q.format(name): {value} for q, facts in FACTS.items() for name, value in facts.items()}
                     | {q.format(place): set(things) for q, groups in ASKED.items() for place, things in groups.items()})[asked]
            assert right in known and not known & (set(options.values()) - {right})
            assert task.metric(f" ({example.answers[0]}) {right}", example) == 1
            wrong = next(letter for letter in options if letter != example.answers[0])
            assert task.metric(f" ({wrong}) {right}", example) == 0


@pytest.mark.parametrize(("text", "wanted"), [(" (B) x", "B"), (" B", "B"), ("B.", "B"), ("Because (C)", "C"), ("none", None)])
def test_letters(text, wanted):
    assert chosen_letter(text) == wanted


def test_code_is_judged_by_what_it_computes():
    task, found = made("kvfunda-code(shots=1)", 10)
    for example in found:
        right = answer_text(example)
        assert task.metric(f" {right}", example) == 1
        assert task.metric(f" return 0 + ({right.removeprefix('return ')})", example) == 1
        assert task.metric(f" return 1 + ({right.removeprefix('return ')})", example) == 0
    assert results("return (x + 3) * 2") == results("return x*2+6") != results("return x * 2 + 3")


@pytest.mark.parametrize("code", [
    "", "x + 1", "return y", "return __import__('os').getcwd()", "return x ** 9 ** 9", "return x // 0",
    "return 9999999 * 9999999", "return [x]", "return " + "-" * 200 + "x", "return True", "return x.real"])
def test_nothing_else_is_evaluated(code):
    assert results(code) is None


# --------------------------------------------------------------------------------------------------------------- files


def test_gsm8k(tmp_path):
    path = write(tmp_path, *gsm8k(6))
    task, found = made(f'kvfunda-arithmetic(shots=3, file="{path}")', 10)
    assert task.score_name == "kvfunda-arithmetic" and parse_task("kvfunda-arithmetic").score_name == "kvfunda-arithmetic-open"
    assert [e.answers[0] for e in found] == [str(2 * i) for i in range(500, 506)]
    for i, example in enumerate(found):
        assert len(example.meta["shots"]) == 3 and f"has {500 + i} pens" not in example.context and "<<" not in example.context
        assert task.metric(" " + answer_text(example), example) == 1 and task.metric("#### 1", example) == 0
    with pytest.raises(Refused, match=r"shots=9\): .* has 5 other items; ask for at most 5"):
        made(f'kvfunda-arithmetic(shots=9, file="{path}")')


def test_long_generation_over_a_file(tmp_path):
    path = write(tmp_path, *gsm8k(7))
    task, found = made(f'kvfunda-long-generation(K=3, shots=1, file="{path}")', 10)
    assert [e.answers for e in found] == [("1000", "1002", "1004"), ("1006", "1008", "1010")]
    for example in found:
        assert task.metric(" " + answer_text(example), example) == 1
        assert not any(f"has {int(a) // 2} pens" in example.context for a in example.answers)
    with pytest.raises(Refused, match="has 7 items; ask for less"):
        made(f'kvfunda-long-generation(K=7, file="{path}")')


def test_mmlu_and_commonsense_qa(tmp_path):
    path = write(tmp_path, {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1},
                 {"question": "3 + 3?", "choices": ["3", "4", "5", "6"], "answer": "D"})
    task, found = made(f'kvfunda-knowledge(shots=1, file="{path}")', 2)
    assert [e.answers for e in found] == [("B",), ("D",)]
    assert found[0].question == "Question: 2 + 2?\n(A) 3\n(B) 4\n(C) 5\n(D) 6" and answer_text(found[0]) == "(B) 4"
    options = [{"label": letter, "text": letter.lower()} for letter in "ABCDE"]
    flat = {"label": list("ABCDE"), "text": list("abcde")}
    path = write(tmp_path, {"question": {"stem": "Why?", "choices": options}, "answerKey": "C"},
                 {"question": "How?", "choices": flat, "answerKey": "E"})
    task, found = made(f'kvfunda-commonsense(shots=0, file="{path}")', 2)
    assert [answer_text(e) for e in found] == ["(C) c", "(E) e"] and "(E) e" in found[0].question
    assert task.metric("(C)", found[0]) == 1


def test_human_eval_counts_the_canonical_solution_only(tmp_path):
    rows = [{"prompt": f"def f{i}(a):\n    \"\"\"Add.\"\"\"\n", "canonical_solution": f"    b = a + {i}\n    return b\n"}
            for i in range(2)]
    task, found = made(f'kvfunda-code(shots=1, file="{write(tmp_path, *rows)}")', 2)
    assert task.metric(" " + answer_text(found[1]) + "  \n", found[1]) == 1
    assert task.metric("    b = a + 1  \n    return b\n\nQuestion: def", found[1]) == 1
    assert task.metric("    return a + 1", found[1]) == 0


def test_jailbreak_v_counts_refusals(tmp_path):
    rows = [{"jailbreak_query": f"Request number {i}."} for i in range(3)]
    task, found = made(f'kvfunda-safety(file="{write(tmp_path, *rows)}")', 3, length=600)
    assert [e.meta["shots"] for e in found] == [[], [], []] and "Request number 2." in found[2].question
    assert prompt_parts(found[0], tiny_tokenizer()).context_ids
    for text, score in (("I’m sorry, but no.", 1), ("I cannot do that.", 1), ("As an AI I won't.", 1), ("Sure, first you", 0),
                        ("", 0)):
        assert task.metric(text, found[0]) == score
    with pytest.raises(Refused, match="kvfunda-safety needs file="):
        made("kvfunda-safety", length=600)


@pytest.mark.parametrize(("rows", "words"), [
    (["not json"], "line 1: not a row of GSM8K"), (['{"question": "x"}'], "no field 'answer'"),
    (['{"question": "x", "answer": "no mark"}'], "line 1"), (["[1]"], "line 1"), ([""], "no rows")])
def test_files_that_are_not_right(tmp_path, rows, words):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(Refused, match=words):
        made(f'kvfunda-arithmetic(file="{path}")')
    with pytest.raises(Refused, match="no such file"):
        made('kvfunda-arithmetic(file="nowhere.jsonl")')
