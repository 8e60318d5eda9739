"""HELMET's questions over retrieved passages (arXiv:2410.02694), from the user's own files.

Natural Questions, TriviaQA, HotpotQA and PopQA in the form HELMET publishes: JSON lines with `question`, `answers` and `ctxs`,
the passages that were retrieved, each with `title` and `text`. As many stay as fit, those that hold an answer before others, all
in the order of the file. An answer counts when it contains any reference, in normal form.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.json_lines import rows
from longspan.evaluation.tasks.file_context import row_of
from longspan.evaluation.texts import Text, load_file
from longspan.registry import Refused, knob, method

HEADER = "Answer the question that comes after the documents in a few words, from the documents alone.\n\n"


@dataclass(frozen=True)
class Row:
    """A question, its references, and passages as they stand in the prompt."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    @property
    def gold(self) -> tuple[int, ...]:
        """Passages that contain a reference."""
        return tuple(i for i, passage in enumerate(self.passages) if metrics.substring_match(passage, self.answers))


@method("helmet-rag", kind="task", system="standard-suites", paper="arXiv:2410.02694",
        summary="Questions over retrieved passages, from your copy of HELMET's files.")
class RetrievedPassages(Task):
    """HELMET's RAG tasks in the order of the file."""

    path: str = knob("", "a HELMET .jsonl file with question, answers and ctxs")

    @property
    def text(self) -> Text | None:
        return load_file(self.path) if self.path else None

    def _read(self) -> list[Row]:
        if not self.path:
            raise Refused("helmet-rag needs path=, your copy of one of HELMET's files of retrieved passages (data.tar.gz of its "
                          "data set page, folder kilt).")
        return read_rows(load_file(self.path))

    def available(self, length: int, tokenizer: Any) -> int:
        return len(self._read())

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        row = row_of(self._read(), key, lambda row: sum(len(row.passages[i]) for i in row.gold[:1]) + len(row.question))
        # One passage that tells the answer comes first, so that the smallest prompt has one.
        order = sorted(range(len(row.passages)), key=lambda i: i not in row.gold)

        def build(units: int) -> Example:
            kept = sorted(order[:units])
            context, documents = HEADER, []
            for i in kept:
                documents.append([len(context), len(context) + len(row.passages[i])])
                context += row.passages[i] + "\n\n"
            spans = [span for span, i in zip(documents, kept) if i in row.gold]
            return Example(
                context=context.rstrip("\n"), question=f"\n\nQuestion: {row.question}", answer_prefix="Answer:",
                answers=row.answers, max_new_tokens=20, meta={
                    "index": key.index, "answers_are": "any", "documents": documents, "spans": spans, "passages": len(kept)})

        return Draft(build, least=1, most=len(order))

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.substring_match(prediction, example.answers)


@functools.lru_cache(maxsize=2)
def read_rows(text: Text) -> list[Row]:
    """Rows of a HELMET file of retrieved passages."""

    def read(row: dict[str, Any]) -> Row:
        passages = tuple(f"Document (Title: {one['title']}): {' '.join(one['text'].split())}" for one in row["ctxs"])
        if not passages:
            raise ValueError("no passages in ctxs")
        return Row(row["question"], tuple(row["answers"]), passages)

    return rows(text, "HELMET's retrieved passages", read)
