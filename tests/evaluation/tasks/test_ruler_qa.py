import json
import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import answer_text, total_length
from longspan.evaluation.tasks.ruler_qa import RulerQA
from longspan.registry import Refused


def squad():
    articles = []
    for a in range(12):
        paragraphs = []
        for p in range(4):
            qas = [{"question": f"What is the colour of thing {a}.{p}?", "is_impossible": False,
                    "answers": [{"text": f"shade {a}{p}"}, {"text": f"the shade {a}{p}"}, {"text": f"shade {a}{p}"}]},
                   {"question": "Impossible?", "is_impossible": True, "answers": []}]
            paragraphs.append({"context": f"Article {a} paragraph {p}: thing {a}.{p} has shade {a}{p}. " + "More. " * 9,
                               "qas": qas})
        articles.append({"paragraphs": paragraphs})
    return {"data": articles}


def hotpot():
    return [{"question": f"Question {i}?", "answer": f"answer {i}",
             "context": [[f"Title {i}-{j}", [f"Fact {j}. ", f"answer {i}. "]] for j in range(3)]} for i in range(10)]


@pytest.fixture()
def write(tmp_path):
    def make(data):
        (tmp_path / "qa.json").write_text(json.dumps(data))
        return str(tmp_path / "qa.json")

    return make


def test_squad_documents_are_gold_near_and_random(write):
    task, tokenizer = RulerQA(path=write(squad())), tiny_tokenizer()
    found = list(task.examples(700, 5, 0, tokenizer))
    assert len({example.question for example in found}) == 5
    for example in found:
        assert total_length(example, tokenizer) <= 700
        numbers = re.findall(r"Document (\d+):\n", example.context)
        assert numbers == [str(i) for i in range(1, len(numbers) + 1)]
        (start, end), = example.meta["spans"]
        assert [start, end] in example.meta["documents"]
        article, paragraph = re.search(r"thing (\d+)\.(\d+)", example.question).groups()
        assert f"thing {article}.{paragraph} has" in example.context[start:end]
        assert example.context.count(f"Article {article} ") == 4  # the article's other paragraphs come first
        assert len(numbers) > 5
        assert example.answers == (f"shade {article}{paragraph}", f"the shade {article}{paragraph}")
        assert answer_text(example) == example.answers[0]
        assert task.metric(f"It is {example.answers[0].upper()}.", example) == 1.0
        assert task.metric("", example) == 0.0


def test_hotpot_keeps_all_documents_of_the_question(write):
    task = RulerQA(path=write(hotpot()))
    for example in task.examples(500, 3, 0, tiny_tokenizer()):
        number = re.search(r"Question (\d+)\?", example.question).group(1)
        for i in range(3):
            assert f"Title {number}-{i}\nFact {i}. answer {number}." in example.context
        assert len(example.meta["spans"]) == 3
        assert len(example.meta["documents"]) > 3


def test_order_depends_on_the_seed_only(write):
    task = RulerQA(path=write(squad()))
    questions = [[e.question for e in task.examples(length, 6, seed, tiny_tokenizer())]
                 for length, seed in ((600, 0), (800, 0), (600, 1))]
    assert questions[0] == questions[1] != questions[2]


def test_refusals(write, tmp_path):
    with pytest.raises(Refused, match="needs path="):
        list(RulerQA().examples(1000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="no such file"):
        list(RulerQA(path=str(tmp_path / "none.json")).examples(1000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="neither SQuAD nor HotpotQA"):
        list(RulerQA(path=write({"rows": []})).examples(1000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="don't fill it"):
        list(RulerQA(path=write(squad())).examples(20_000, 1, 0, tiny_tokenizer()))
