import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import answer_text
from longspan.evaluation.tasks.longbench_cite import LongBenchCite


def made(n=4, length=1400, **knobs):
    task = LongBenchCite(**knobs)
    return task, list(task.examples(length, n, 0, tiny_tokenizer()))


def sentences(example):
    return re.findall(r"<C(\d+)>(.*?)(?= <C\d+>|$)", example.context.split("The document:\n\n")[1], re.DOTALL)


def test_sentences_are_numbered_and_the_evidence_tells_the_answers():
    for example in made()[1]:
        found = sentences(example)
        assert [int(number) for number, _ in found] == list(range(example.meta["sentences"]))
        evidence = [found[number][1] for number in example.meta["evidence"]]
        assert [example.context[start:end] for start, end in example.meta["spans"]] == evidence
        name = re.search(r"When was (.+?) opened", example.question)[1]
        assert all(name.lower() in sentence.lower() for sentence in evidence)
        assert sum(name.lower() in sentence.lower() for _, sentence in found) == 3
        for value in example.answers:
            assert sum(value in sentence for sentence in evidence) == 1


def test_citations_and_correctness_are_scored_apart():
    cite, (example, *_) = made(1)
    correct = LongBenchCite(score="correctness")
    gold = answer_text(example)
    assert cite.metric(gold, example) == correct.metric(gold, example) == 1.0
    uncited = re.sub("<cite>.*?</cite>", "", gold)
    assert (cite.metric(uncited, example), correct.metric(uncited, example)) == (0.0, 1.0)
    first = gold.split("</statement>")[0] + "</statement>"
    assert cite.metric(first, example) == pytest.approx(2 * (1 / 3) / (1 + 1 / 3))
    everything = f"<statement>{example.answers[0]}<cite>[0-9999]</cite></statement>"
    assert cite.metric(everything, example) == pytest.approx(2 * 3 / (3 + example.meta["sentences"]))
    assert cite.score_name == "longbench-cite-open"


def test_no_other_building_shares_a_value():
    for example in made(6)[1]:
        text = example.context
        assert all(text.count(f" {value}") + text.count(f">{value}") == 1 for value in example.answers)
        assert made(1, others=0)[1][0].meta["sentences"] > 4
