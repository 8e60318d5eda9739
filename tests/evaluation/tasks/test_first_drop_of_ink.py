import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.base import token_spans
from longspan.evaluation.ink import hard_count
from longspan.evaluation.ink.town import JOBS
from longspan.registry import Refused

LENGTH = 900


def examples(text, n=3, length=LENGTH, seed=0):
    return list(parse_task(text).examples(length, n, seed, tiny_tokenizer()))


def documents(example):
    return [example.context[a:b] for a, b in example.meta["documents"]]


def test_shares_are_paired_and_differ_in_the_swapped_documents():
    for clean, some, full in zip(*(examples(f"first-drop-of-ink(p={p})") for p in (0.0, 0.1, 1.0))):
        n = clean.meta["distractors"]
        assert n == some.meta["distractors"] == full.meta["distractors"] >= 20
        assert (clean.question, clean.answers) == (some.question, some.answers) == (full.question, full.answers)
        for other, p in ((some, 0.1), (full, 1.0)):
            swapped = sum(a != b for a, b in zip(documents(clean), documents(other)))
            assert swapped == hard_count(p, n) == other.meta["hard"] and other.meta["share"] == swapped / n


def test_gold_is_a_document_and_the_job_nowhere_else():
    for example in examples("first-drop-of-ink(p=0.5)", 6):
        gold = documents(example)[example.meta["kinds"].index("gold")]
        (start, end), = example.meta["spans"]
        assert example.context[start:end] == gold == f"{example.answer_prefix} {example.answers[0]} in the town."
        assert [example.answers[0] in text for text in documents(example)].count(True) == 1
        assert example.answers[0] in JOBS and example.answer_prefix.split(" works")[0] in example.question


def test_documents_are_spans_of_tokens():
    example, = examples("first-drop-of-ink", 1)
    spans = token_spans(example, tiny_tokenizer(), "documents")
    assert len(spans) == example.meta["distractors"] + 1 and all(a < b for a, b in spans)


def test_weak_documents_may_be_sentences_of_a_manual():
    task = parse_task("first-drop-of-ink(p=0.2, weak=random)")
    example, = task.examples(LENGTH, 1, 0, tiny_tokenizer())
    assert task.text is not None and task.text.source and "weak" in example.meta["kinds"]
    assert parse_task("first-drop-of-ink").text is None


def test_answer_counts_wherever_it_is_written():
    task = parse_task("first-drop-of-ink")
    example, = examples("first-drop-of-ink", 1)
    wrong = next(job for job in JOBS if job != example.answers[0])
    assert task.metric(f" {example.answers[0]} in the town.", example) == 1.0 and task.metric(f" {wrong}", example) == 0.0
    assert task.score_name == "first-drop-of-ink-open"


@pytest.mark.parametrize("text,said", [("first-drop-of-ink(p=1.2)", "at most 1"), ("first-drop-of-ink(p=-0.1)", "at least 0"),
                                       ("first-drop-of-ink(hard=shared)", "did you mean 'shared-name'")])
def test_knobs_out_of_range_are_refused(text, said):
    with pytest.raises(Refused, match=said):
        parse_task(text)


def test_a_pool_too_small_for_the_length_is_refused():
    with pytest.raises(Refused, match="holds 600 documents, which fill less"):
        examples("first-drop-of-ink", 1, 40_000)
