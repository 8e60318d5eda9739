"""LV-Eval (arXiv:2402.05136) over the user's own files.

Eleven sets at five lengths, one JSON-lines file each, such as ``hotpotwikiqa_mixup_16k.jsonl``, with fields `input`, `context`,
`answers`, `answer_keywords`. Contexts hold facts made to confuse, and keywords are replaced, so that what a model knows already
doesn't help. Scores are in `longspan.evaluation.lveval_metrics`; instructions are worded by us.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.evaluation import lveval_metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.json_lines import rows
from longspan.evaluation.tasks.file_context import cut_to_fit, file_in, row_of
from longspan.evaluation.texts import Text, load_file
from longspan.registry import knob, method

BEFORE = {"en": "Answer the question from the passages given; only some of them are about it. Give the answer only.\n\nArticle: ",
          "zh": "请根据下面的文章回答问题，问题只与其中一部分有关，只写答案。\n\n文章："}
AFTER = {"en": "\n\nNow answer from the passages above. Give the answer only.\n\nQuestion: {input}\nAnswer:",
         "zh": "\n\n请根据上面的文章作答，只写答案。\n\n问题：{input}\n回答："}


@dataclass(frozen=True)
class Row:
    """A question with its context, references, and the keywords of the answer."""

    input: str
    context: str
    answers: tuple[str, ...]
    keywords: str


@method("lv-eval", kind="task", system="standard-suites", paper="arXiv:2402.05136",
        summary="One of LV-Eval's eleven sets, from your copy of its files.")
class LVEval(Task):
    """LV-Eval in the order of the file; only the first reference counts, as published."""

    path: str = knob("", "an LV-Eval .jsonl file, or the folder that holds them")
    name: str = knob("", "which set, such as factrecall_en_16k; told by the file's name if left out")

    @property
    def text(self) -> Text | None:
        return load_file(str(self._file())) if self.path else None

    def _file(self) -> Path:
        return file_in("lv-eval", self.path, self.name, "your copy of an LV-Eval .jsonl file, or the folder that holds them (the "
                       "data set page of LV-Eval has one archive a set)")

    def _set(self) -> str:
        return lveval_metrics.base_name(self.name or self._file().stem)

    def available(self, length: int, tokenizer: Any) -> int:
        return len(read_rows(load_file(str(self._file()))))

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        name = self._set()
        row = row_of(read_rows(load_file(str(self._file()))), key, lambda row: len(row.input))
        language = lveval_metrics.SETS[name][1]
        question = AFTER[language].replace("{input}", row.input)

        def make(context: str, truncated: bool) -> Example:
            return Example(
                context=context, question=question, answer_prefix="", answers=row.answers,
                max_new_tokens=16 if name.startswith("factrecall") else 64,
                meta={"index": key.index, "answers_are": "any", "subset": name, "keywords": row.keywords, "truncated": truncated})

        return cut_to_fit(BEFORE[language] + row.context, question, tokenizer, make)

    def metric(self, prediction: str, example: Example) -> float:
        return lveval_metrics.score(example.meta["subset"], prediction, example.answers, example.meta["keywords"])


@functools.lru_cache(maxsize=2)
def read_rows(text: Text) -> list[Row]:
    """Rows of an LV-Eval file; `answer_keywords` may be missing."""
    return rows(text, "LV-Eval", lambda row: Row(row["input"], row["context"], tuple(row["answers"]),
                                                 row.get("answer_keywords") or ""))
