"""The tasks of InfiniteBench (arXiv:2402.13718) that can't be generated: books, scripts and code, from the user's own files.

One JSON-lines file a task, such as ``longbook_qa_eng.jsonl``, with fields `context`, `input`, `answer` and `options`. A context
that is too long loses its middle. Instructions are worded by us, scores are as published.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.json_lines import rows
from longspan.evaluation.tasks.file_context import cut_to_fit, file_in, row_of
from longspan.evaluation.texts import Text, load_file
from longspan.registry import Refused, knob, method, nearest

LETTERS = "ABCD"


@dataclass(frozen=True)
class Row:
    """A context, what is asked about it, right answers, and options where there are any."""

    context: str
    input: str
    answers: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True)
class Subset:
    """A task: generation allowance, the prompt around the context, and its score of (prediction, row's answers and options)."""

    new_tokens: int
    before: str
    after: str
    score: Callable[[str, tuple[str, ...], tuple[str, ...]], float]


def chosen_option(prediction: str) -> str | None:
    """The option letter an answer names: its first character, what follows an announcement, else the first letter alone."""
    if prediction[:1] and prediction[0] in LETTERS:
        return prediction[0]
    text = " ".join(re.sub("[\n\"'.,?!{}]", " ", prediction).split())
    for announced in ("answer is:", "answer:", "answer is", "option is"):
        _, found, rest = text.partition(announced)
        if found:
            return rest[1:2] if rest[1:2] in tuple(LETTERS) else None
    return next((word for word in text.split() if word in tuple(LETTERS)), None)


def names_function(prediction: str, letter: str, name: str) -> float:
    """1 if the answer begins with the letter and a point or colon, or announces the letter or the function's name."""
    if prediction[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = " ".join(re.sub("[\n`'\"*-]|[Oo]ption", " ", prediction.strip()).split())
    for announced in ("answer is:", "is:", "answer:"):
        _, found, rest = text.partition(announced)
        if found:
            return float(rest[1:].startswith((letter, name)))
    return 0.0


def _letter(answers: tuple[str, ...], options: tuple[str, ...]) -> str:
    return LETTERS[options.index(answers[0])]


def _choice(prediction: str, answers: tuple[str, ...], options: tuple[str, ...]) -> float:
    return float(chosen_option(prediction) == _letter(answers, options))


def _debug(prediction: str, answers: tuple[str, ...], options: tuple[str, ...]) -> float:
    return names_function(prediction, _letter(answers, options), answers[0])


def _name(prediction: str, answers: tuple[str, ...], options: tuple[str, ...]) -> float:
    words = re.sub("[\n:\"'.,?!{}]", " ", prediction).upper().split()
    return float(answers[0] in words)


def _best(metric: Callable[[str, str], float]) -> Callable[[str, tuple[str, ...], tuple[str, ...]], float]:
    return lambda prediction, answers, options: metrics.best(metric, prediction, answers)


OPTIONS = "\n\nOnly one of these is right:\n{options}\n\nAnswer with its letter.\n\n"
SUBSETS: dict[str, Subset] = {
    "longbook_qa_eng": Subset(40, "Read the book below and answer a question in a few words.\n\n",
                              "\n\nQuestion: {input}\nAnswer:", _best(metrics.f1)),
    "longbook_qa_chn": Subset(40, "请读下面的书，简短回答问题。\n\n", "\n\n问题：{input}\n回答：", _best(metrics.f1_characters)),
    "longbook_sum_eng": Subset(1200, "Sum up the book below.\n\n", "\n\nThe summary of the book:", _best(metrics.rouge_l_sum)),
    "longbook_choice_eng": Subset(40, "Read the book below and answer a question.\n\n",
                                  "\n\nQuestion: {input}" + OPTIONS + "The letter of the right answer is", _choice),
    "longdialogue_qa_eng": Subset(40, "Below is a scene in which one person's name is replaced by $$MASK$$.\n\n",
                                  "\n\nThe name behind $$MASK$$ is", _name),
    "code_debug": Subset(5, "In the code below one function has an obvious error made on purpose.\n\n",
                         "\n\nWhich function has it?" + OPTIONS + "The right option is:", _debug),
}


@method("infinitebench", kind="task", system="standard-suites", paper="arXiv:2402.13718",
        summary="One of InfiniteBench's tasks over books, scripts and code, from your copy of its files.")
class InfiniteBench(Task):
    """InfiniteBench in the order of the file; its other tasks are generated: passkey, number-string, kv-retrieval, …"""

    path: str = knob("", "an InfiniteBench .jsonl file, or the folder that holds them")
    name: str = knob("", "which task, such as longbook_qa_eng; told by the file's name if left out")

    @property
    def text(self) -> Text | None:
        return load_file(str(self._file())) if self.path else None

    def _file(self) -> Path:
        return file_in("infinitebench", self.path, self.name, "your copy of an InfiniteBench .jsonl file, or the folder that "
                       "holds them (its data set page has one file a task)")

    def _read(self) -> tuple[str, list[Row]]:
        name = self.name or self._file().stem
        if name not in SUBSETS:
            raise Refused(f"infinitebench({self._file().name}): {nearest(name, SUBSETS, 'name')}")
        return name, read_rows(load_file(str(self._file())))

    def available(self, length: int, tokenizer: Any) -> int:
        return len(self._read()[1])

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        name, found = self._read()
        subset = SUBSETS[name]
        row = row_of(found, key, lambda row: len(row.input) + sum(map(len, row.options)))
        if "{options}" in subset.after and row.answers[0] not in row.options:
            raise Refused(f"infinitebench({self._file().name}): the answer {row.answers[0]!r} is none of its options "
                          f"{', '.join(row.options) or '(none)'}; expected one of them.")
        lettered = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row.options))
        question = subset.after.replace("{options}", lettered).replace("{input}", row.input)
        written = row.answers[0]
        if "{options}" in subset.after:
            written = f"{_letter(row.answers, row.options)}. {written}"

        def make(context: str, truncated: bool) -> Example:
            return Example(
                context=context, question=question, answer_prefix="", answers=row.answers, max_new_tokens=subset.new_tokens,
                meta={"index": key.index, "answers_are": "any", "answer_text": written, "subset": name, "truncated": truncated,
                      "options": list(row.options)})

        return cut_to_fit(subset.before + row.context, question, tokenizer, make)

    def metric(self, prediction: str, example: Example) -> float:
        # What is generated begins with the space that parts it from the prompt.
        return SUBSETS[example.meta["subset"]].score(prediction.lstrip(" "), example.answers, tuple(example.meta["options"]))


@functools.lru_cache(maxsize=2)
def read_rows(text: Text) -> list[Row]:
    """Rows of an InfiniteBench file; an answer that stands alone is a list of one."""

    def read(row: dict[str, Any]) -> Row:
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        return Row(row["context"], row["input"], tuple(map(str, answers)), tuple(row.get("options") or ()))

    return rows(text, "InfiniteBench", read)
