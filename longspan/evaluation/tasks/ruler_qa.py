"""RULER's question answering (arXiv:2404.06654) over the user's own SQuAD or HotpotQA file.

The documents that answer a question stand, shuffled, among others of the same article and among random ones, each under
`Document i:`. An answer counts when it contains any of the references.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.texts import Text, load_file
from longspan.registry import Refused, knob, method

INSTRUCTION = "Answer the question from the documents given. Give the answer only, without any other words."
HEADER = INSTRUCTION + "\n\nThe documents:\n\n"


@dataclass(frozen=True)
class Question:
    """A question, its references, and indices of documents: those that answer it and those of the same article."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@method("ruler-qa", kind="task", system="standard-suites", paper="arXiv:2404.06654",
        summary="Answer questions of your SQuAD or HotpotQA file from its documents among others.")
class RulerQA(Task):
    """RULER qa_1 (SQuAD) and qa_2 (HotpotQA): the file's own JSON, as its authors publish it."""

    path: str = knob("", "SQuAD 2.0 or HotpotQA (distractor) file in JSON, such as dev-v2.0.json")

    @property
    def text(self) -> Text | None:
        return load_file(self.path) if self.path else None

    def available(self, length: int, tokenizer: Any) -> int:
        return len(self._read()[0])

    def _read(self) -> tuple[list[Question], list[str]]:
        if not self.path:
            raise Refused("ruler-qa needs path=, your copy of SQuAD 2.0 (dev-v2.0.json, from the SQuAD web site) or "
                          "HotpotQA (hotpot_dev_distractor_v1.json, from the HotpotQA web site).")
        return read_questions(load_file(self.path))

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        questions, documents = self._read()
        if key.index < 0:  # probes for the floor: the questions with the longest documents
            asked = _longest(self.path, self.probes)[(-1 - key.index) % len(questions)]
        else:
            order = list(range(len(questions)))
            random.Random(f"{key.task}/{key.seed}").shuffle(order)
            asked = questions[order[key.index]]
        rng = key.rng("documents")
        chosen = [*asked.gold, *rng.sample(asked.near, len(asked.near))]
        others = sorted(set(range(len(documents))) - set(chosen))
        chosen += rng.sample(others, min(len(others), key.length // 8 + 16))  # documents have more than eight tokens

        def build(units: int) -> Example:
            shown = chosen[:units]
            key.rng(f"order/{units}").shuffle(shown)
            body, spans = _listed([documents[i] for i in shown], len(HEADER))
            places = [shown.index(i) for i in asked.gold]
            return Example(
                context=HEADER + body, question=f"\n\n{INSTRUCTION}\n\nQuestion: {asked.question}",
                answer_prefix="Answer:", answers=asked.answers, max_new_tokens=32,
                meta={"index": key.index, "answers_are": "any", "documents": spans,
                      "spans": [spans[i] for i in sorted(places)], "depth": sum(places) / len(places) / len(shown)})

        return Draft(build, least=len(asked.gold), most=len(chosen), exhausted=(
            f"the {len(documents)} documents of {self.path!r} don't fill it; ask for a smaller length."))

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.match_part(metrics.clean(prediction), example.answers)


def _listed(documents: list[str], shift: int) -> tuple[str, list[list[int]]]:
    pieces, spans, at = [], [], shift
    for number, document in enumerate(documents, 1):
        pieces.append(f"Document {number}:\n{document}")
        spans.append([at, at + len(pieces[-1])])
        at += len(pieces[-1]) + 2
    return "\n\n".join(pieces), spans


@functools.lru_cache(maxsize=2)
def read_questions(text: Text) -> tuple[list[Question], list[str]]:
    """Questions and documents of a SQuAD or HotpotQA file.

    Raises:
        Refused: the file is neither.
    """
    try:
        data = json.loads(text.text)
        found = _squad(data["data"]) if isinstance(data, dict) else _hotpot(data)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{text.source!r}: neither SQuAD nor HotpotQA ({type(error).__name__}: {error}); expected the "
                      "JSON file as published, such as dev-v2.0.json.") from None
    if not found[0]:
        raise Refused(f"{text.source!r}: no question in it has an answer; expected a file with answers.")
    return found


def _squad(articles: list[Any]) -> tuple[list[Question], list[str]]:
    documents = sorted({p["context"] for article in articles for p in article["paragraphs"]})
    index = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in articles:
        article_ids = dict.fromkeys(index[p["context"]] for p in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            gold = index[paragraph["context"]]
            near = tuple(i for i in article_ids if i != gold)
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(a["text"] for a in asked["answers"]))
                if answers and not asked.get("is_impossible", False):
                    questions.append(Question(asked["question"], answers, (gold,), near))
    return questions, documents


def _hotpot(rows: list[Any]) -> tuple[list[Question], list[str]]:
    shown = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in rows]
    documents = sorted({document for row in shown for document in row})
    index = {document: i for i, document in enumerate(documents)}
    questions = [Question(row["question"], (row["answer"],), tuple(dict.fromkeys(index[d] for d in texts)), ())
                 for row, texts in zip(rows, shown)]
    return questions, documents


@functools.lru_cache(maxsize=4)
def _longest(path: str, count: int) -> list[Question]:
    questions, documents = read_questions(load_file(path))
    size = {i: len(document) for i, document in enumerate(documents)}
    return sorted(questions, key=lambda q: (-sum(size[i] for i in q.gold), q.question))[:count]
