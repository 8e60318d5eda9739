"""HELMET's re-ranking (arXiv:2410.02694): put documents into the order of their relevance to a query.

The answer is a ranking of ids, ``id > id > …``; the longest such run is read, and scored by NDCG@10. The right answer ends with
the last relevant document, for what comes after gains nothing; equally relevant ones stand in the order of the prompt, though
any order of them scores the same. Without a file the documents
are notes of ours: a query names what was done, to what, and where, and a note is as relevant as it agrees with the query in one,
two or all three of these. With a file (``file=``) they are those of MS MARCO as HELMET publishes them.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.json_lines import rows
from longspan.evaluation.retrieval_metrics import ndcg, ranking_ndcg
from longspan.evaluation.tasks.file_context import row_of
from longspan.evaluation.tasks.haystack import Essay
from longspan.evaluation.texts import Text, load_file, load_text
from longspan.registry import knob, method

DEEDS = ("repairing", "painting", "selling", "moving", "insuring", "photographing", "cleaning", "renting")
OBJECTS = ("iron bridges", "fishing boats", "church bells", "greenhouses", "tram lines", "windmills", "stone walls", "carousels")
PLACES = ("Norway", "Chile", "Kenya", "Japan", "Ireland", "Portugal", "Canada", "Vietnam")
GAINS = (3, 2, 2, 1, 1, 1)
"""Relevance of the first documents drawn; all others have none."""
BEST = 10
"""How many ranks count."""
HEADER = ("Below are documents, each with its ID. Rank them by their relevance to the query that comes after them, the most "
          "relevant one first. Write IDs only, in this form: ID3 > ID1 > ID2\n\n")


@dataclass(frozen=True)
class Ranked:
    """A query and its documents: id, text and gain of each, those with gains first."""

    query: str
    documents: tuple[tuple[str, str, float], ...]


@method("helmet-rerank", kind="task", system="standard-suites", paper="arXiv:2410.02694",
        summary="Rank documents by their relevance to a query; MS MARCO from your copy.")
class Rerank(Task):
    """Re-ranking by NDCG@10."""

    haystack: str = knob("pydoc", "text that fills our documents: pydoc, docstrings, jargon, bible, debian-handbook")
    file: str = knob("", "your copy of HELMET's msmarco test_reranking_data .jsonl; documents of our own if left out")

    @property
    def text(self) -> Text:
        return load_file(self.file) if self.file else load_text(self.haystack)

    @property
    def score_name(self) -> str:
        return self.card.name if self.file else f"{self.card.name}-open"

    def available(self, length: int, tokenizer: Any) -> int | None:
        return len(read_rankings(self.text)) if self.file else None

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        if not self.file:
            asked, documents = self._of_our_own(key, tokenizer)
            return Draft(lambda units: _example(key, asked, documents(units)), least=len(GAINS) + 2)
        ranked = row_of(read_rankings(self.text), key,
                        lambda ranked: sum(len(text) for _, text, gain in ranked.documents if gain))
        least = max(1, sum(gain > 0 for _, _, gain in ranked.documents))
        return Draft(lambda units: _example(key, ranked.query, list(ranked.documents[:units])), least=least,
                     most=len(ranked.documents))

    def _of_our_own(self, key: Key, tokenizer: Any) -> tuple[str, Any]:
        rng = key.rng("documents")
        query = tuple(rng.choice(words) for words in (DEEDS, OBJECTS, PLACES))
        essay = Essay(self.text, rng.randrange(len(self.text.sentences)), tokenizer)
        ids = rng.sample(range(1000, 10000), 9000)
        drawn: list[tuple[str, str, float]] = []

        def documents(units: int) -> list[tuple[str, str, float]]:
            filler = essay.take(2 * units)
            while len(drawn) < units:
                number = len(drawn)
                gain = GAINS[number] if number < len(GAINS) else 0
                about = "This note deals with {} {} in {}.".format(*_agreeing(rng, query, gain))
                drawn.append((str(ids[number]), " ".join([about, *filler[2 * number:2 * number + 2]]), gain))
            return drawn[:units]

        return "{} {} in {}".format(*query), documents

    def metric(self, prediction: str, example: Example) -> float:
        gains, only = example.meta["gains"], prediction.strip().rstrip(".")
        if only in gains:  # a single id is a ranking too, though without the > that one is recognised by
            return ndcg([gains[only]], BEST, ideal=list(gains.values()))
        return ranking_ndcg(prediction, gains, BEST)


def _agreeing(rng: random.Random, query: tuple[str, ...], count: int) -> list[str]:
    """What a document is about: `count` of the query's words, the others different ones."""
    kept = set(rng.sample(range(len(query)), count))
    return [query[i] if i in kept else rng.choice([word for word in words if word != query[i]])
            for i, words in enumerate((DEEDS, OBJECTS, PLACES))]


def _example(key: Key, query: str, documents: list[tuple[str, str, float]]) -> Example:
    order = list(documents)
    key.rng(f"order/{len(order)}").shuffle(order)
    pieces = [f"ID: {name}\nDocument: {text}" for name, text, _ in order]
    starts = [len(HEADER) + sum(len(piece) + 2 for piece in pieces[:i]) for i in range(len(pieces))]
    spans = [[start, start + len(piece)] for start, piece in zip(starts, pieces)]
    best = sorted((document for document in order if document[2] > 0), key=lambda document: -document[2])[:BEST]
    return Example(
        context=HEADER + "\n\n".join(pieces), question=f"\n\nQuery: {query}", answer_prefix="Ranking:",
        answers=tuple(name for name, _, _ in best), max_new_tokens=200, meta={
            "index": key.index, "answer_text": " > ".join(name for name, _, _ in best), "query": [query],
            "gains": {name: gain for name, _, gain in order}, "documents": spans,
            "spans": [span for span, (_, _, gain) in zip(spans, order) if gain]})


@functools.lru_cache(maxsize=2)
def read_rankings(text: Text) -> list[Ranked]:
    """HELMET's rows: `query`, and `ctxs` with `id`, `text` and `label`.

    Raises:
        Refused: another form, or a row in which no document is relevant.
    """

    def read(row: dict[str, Any]) -> Ranked:
        documents = [(str(one["id"]), one["text"], float(one["label"])) for one in row["ctxs"]]
        if not any(gain > 0 for _, _, gain in documents):
            raise ValueError("no document of gain 1 or more, so that no ranking is right")
        return Ranked(row["query"], tuple(sorted(documents, key=lambda document: document[2] <= 0)))

    return rows(text, "HELMET's re-ranking", read)
