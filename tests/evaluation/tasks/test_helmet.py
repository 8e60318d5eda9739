import json
import re
from collections import Counter

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import answer_text, total_length
from longspan.evaluation.tasks.helmet_icl import KINDS, ManyShot
from longspan.evaluation.tasks.helmet_rag import RetrievedPassages
from longspan.evaluation.tasks.helmet_rerank import GAINS, Rerank
from longspan.evaluation.tasks.json_kv import JsonKeyValue
from longspan.registry import Refused


@pytest.fixture()
def write(tmp_path):
    def make(*rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return str(tmp_path / "rows.jsonl")

    return make


# -------------------------------------------------------------------------------------------------------------- json-kv


def test_two_pairs_are_shown_before_the_key():
    task, tokenizer = JsonKeyValue(), tiny_tokenizer()
    for example in task.examples(task.floor(tokenizer) + 300, 3, 0, tokenizer):
        pairs = json.loads(example.context[example.context.index("{"):])
        shots = re.findall(r"Key: (\S+)\nCorresponding value: (\S+)\n", example.question)
        key, = example.meta["query"]
        assert len(shots) == 2 and all(pairs[name] == value for name, value in shots)
        assert key not in dict(shots)
        assert example.question.endswith(f"Key: {key}")
        assert (pairs[key],) == example.answers
        assert task.metric(f"It is {pairs[key].upper()}!", example) == 1.0
        assert task.metric(shots[0][1], example) == 0.0


# -------------------------------------------------------------------------------------------------------------- re-rank


def test_documents_agree_with_the_query_as_much_as_their_gain_says():
    task, tokenizer = Rerank(), tiny_tokenizer()
    for example in task.examples(task.floor(tokenizer) + 700, 3, 0, tokenizer):
        deed, *things, _, place = example.question.split("Query: ")[1].split()
        documents = dict(re.findall(r"ID: (\d+)\nDocument: This note deals with (.*?)\. ", example.context))
        assert len(documents) == len(example.meta["gains"]) == len(example.meta["documents"]) > len(GAINS)
        for name, about in documents.items():
            agreeing = (about.startswith(deed)) + (" ".join(things) in about) + about.endswith(place)
            assert agreeing == example.meta["gains"][name]
        assert sorted(example.meta["gains"].values(), reverse=True)[:len(GAINS)] == list(GAINS)
        assert task.metric(answer_text(example), example) == 1.0
        ranked = [example.meta["gains"][name] for name in answer_text(example).split(" > ")]
        assert ranked == list(GAINS)  # the answer ends with the last relevant document
        order = [name for name in documents if example.meta["gains"][name] == 1]
        assert list(example.answers[-3:]) == order  # ties stand as in the prompt
        backwards = " > ".join(reversed(answer_text(example).split(" > ")))
        assert 0 < task.metric(backwards, example) < 1
    assert task.score_name == "helmet-rerank-open"


def test_rankings_of_a_file(write):
    documents = [{"id": f"d{i}", "text": f"text {i} " + "words " * 20, "label": int(i == 5) * 3} for i in range(12)]
    row = {"query": "q", "ctxs": documents}
    task, tokenizer = Rerank(file=write(row)), tiny_tokenizer()
    example, = task.examples(600, 3, 0, tokenizer)
    assert total_length(example, tokenizer) <= 600
    assert "d5" in example.meta["gains"] and len(example.meta["gains"]) < 12
    assert answer_text(example) == "d5"
    assert task.metric(answer_text(example), example) == task.metric(" d5.\n", example) == 1.0  # one id is a ranking too
    assert task.metric("d1", example) == task.metric("none", example) == task.metric("", example) == 0.0
    assert task.metric("d5 > d1", example) == 1.0
    assert task.score_name == "helmet-rerank"
    with pytest.raises(Refused, match="no field 'ctxs'"):
        list(Rerank(file=write({"query": "q"})).examples(600, 1, 0, tokenizer))


def test_more_relevant_documents_than_ranks_that_count(write):
    documents = [{"id": f"d{i}", "text": f"text {i}", "label": 1} for i in range(14)]
    task, tokenizer = Rerank(file=write({"query": "q", "ctxs": documents})), tiny_tokenizer()
    example, = task.examples(1500, 1, 0, tokenizer)
    assert len(example.answers) == 10
    assert task.metric(answer_text(example), example) == 1.0


def test_a_file_without_relevant_documents_is_refused(write):
    with pytest.raises(Refused, match="no document of gain"):
        list(Rerank(file=write({"query": "q", "ctxs": [{"id": "a", "text": "t", "label": 0}]})).examples(
            600, 1, 0, tiny_tokenizer()))


# ------------------------------------------------------------------------------------------------------------ many-shot


def labelled(example):
    return [re.fullmatch(r"(.*)\nlabel: (\d+)\n\n", example.context[start:end], re.DOTALL).groups()
            for start, end in example.meta["shots"]]


@pytest.mark.parametrize("classes", [2, 6, 12])
def test_shots_are_balanced_and_labels_drawn_anew(classes):
    task, tokenizer = ManyShot(classes=classes), tiny_tokenizer()
    found = list(task.examples(task.floor(tokenizer) + 500, 5, 0, tokenizer))
    for example in found:
        shots = labelled(example)
        counts = Counter(label for _, label in shots)
        assert set(counts) == {str(i) for i in range(classes)}
        assert max(counts.values()) - min(counts.values()) <= 1
        assert example.question not in [said for said, _ in shots]
        assert task.metric(f" {example.answers[0]}\nlabel: 99", example) == 1.0
        assert task.metric(f"label: {example.answers[0]}", example) == 1.0
        assert task.metric(f"1{example.answers[0]}", example) == 0.0
    assert len({example.answers for example in found}) > 1


def kind_of(said):
    """The kind of request a sentence is, from its wording."""
    words = {kind: [re.sub(r"\\{\w+\\}", ".+", re.escape(form)) for form in forms] for kind, forms in KINDS.items()}
    kind, = (kind for kind, forms in words.items() if any(re.fullmatch(form, said) for form in forms))
    return kind


def test_labels_mean_one_class_each():
    task, tokenizer = ManyShot(), tiny_tokenizer()
    for example in task.examples(task.floor(tokenizer) + 500, 3, 0, tokenizer):
        meant = {label: {kind_of(said) for said, other in labelled(example) if other == label} for _, label in labelled(example)}
        assert all(len(kinds) == 1 for kinds in meant.values())
        assert meant[example.answers[0]] == {kind_of(example.question)}


def test_classes_of_a_file(write):
    rows = [{"text": f"{kind} text {i}", "coarse_label": kind} for kind in ("A", "B", "C") for i in range(9 - ord(kind) % 3)]
    task, tokenizer = ManyShot(file=write(*rows), label="coarse_label"), tiny_tokenizer()
    found = list(task.examples(2000, 99, 0, tokenizer))
    assert len(found) == len(rows)
    assert {example.question for example in found} == {row["text"] for row in rows}
    for example in found:
        shots = labelled(example)
        assert len(set(Counter(label for _, label in shots).values())) == 1  # the smallest class tells how many
        meant = {said[0]: label for said, label in shots}
        assert example.answers == (meant[example.question[0]],)
        assert example.question not in [said for said, _ in shots]
    assert task.score_name == "helmet-icl"


def test_files_with_too_few_texts_are_refused(write):
    tokenizer = tiny_tokenizer()
    with pytest.raises(Refused, match="one text only of class 'B'"):
        rows = [{"text": "x", "label": "A"}, {"text": "y", "label": "A"}, {"text": "z", "label": "B"}]
        list(ManyShot(file=write(*rows)).examples(2000, 3, 0, tokenizer))
    with pytest.raises(Refused, match="all rows are of class 'A'"):
        list(ManyShot(file=write({"text": "x", "label": "A"})).examples(2000, 3, 0, tokenizer))
    with pytest.raises(Refused, match="no field 'label'"):
        list(ManyShot(file=write({"text": "x"})).examples(2000, 3, 0, tokenizer))


# ------------------------------------------------------------------------------------------------------------------ RAG


def test_passages_with_the_answer_stay(write):
    passages = [{"title": f"T{i}", "text": f"Passage {i} " + "words " * 20 + ("tells of Ada." if i in (7, 9) else "")}
                for i in range(12)]
    task, tokenizer = RetrievedPassages(path=write({"question": "Who?", "answers": ["ADA"], "ctxs": passages})), tiny_tokenizer()
    example, = task.examples(400, 2, 0, tokenizer)
    assert total_length(example, tokenizer) <= 400
    assert 2 <= example.meta["passages"] < 12
    assert "(Title: T7)" in example.context and "(Title: T9)" in example.context
    titles = [int(t) for t in re.findall(r"Title: T(\d+)", example.context)]
    assert titles == sorted(titles)
    assert len(example.meta["spans"]) == 2
    assert task.metric("It was ada!", example) == 1.0
    assert task.metric("", example) == 0.0
    with pytest.raises(Refused, match="helmet-rag needs path="):
        list(RetrievedPassages().examples(400, 1, 0, tokenizer))
    with pytest.raises(Refused, match="no passages in ctxs"):
        list(RetrievedPassages(path=write({"question": "q", "answers": [], "ctxs": []})).examples(400, 1, 0, tokenizer))
