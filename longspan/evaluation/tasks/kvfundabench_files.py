"""Reading the data sets that KVFundaBench asks, from the user's own JSON-lines files.

Each reader gives (question, answer as a shot shows it, the part that is judged) for every row, in the order of the file.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from longspan.evaluation.json_lines import rows
from longspan.evaluation.texts import Text

Row = tuple[str, str, str]
LETTERS = "ABCDEFGHIJ"


def choices(question: str, options: list[str], right: str) -> Row:
    """A question with lettered options below it; the answer is the letter and what it stands for."""
    lettered = "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, options))
    return f"{question}\n{lettered}", f"({right}) {options[LETTERS.index(right)]}", right


@functools.lru_cache(maxsize=4)
def read_gsm8k(text: Text) -> list[Row]:
    """GSM8K: `question`, and `answer` with the steps and ``#### number``; the calculator's notes are left out."""

    def read(row: dict[str, Any]) -> Row:
        steps = re.sub(r"<<[^>]*>>", "", row["answer"]).strip()
        return " ".join(row["question"].split()), steps, steps.split("####")[1].strip().replace(",", "")

    return rows(text, "GSM8K", read)


@functools.lru_cache(maxsize=4)
def read_mmlu(text: Text) -> list[Row]:
    """MMLU: `question`, `choices`, and `answer` as a number from 0 or a letter."""

    def read(row: dict[str, Any]) -> Row:
        right = row["answer"]
        return choices(row["question"], row["choices"], LETTERS[right] if isinstance(right, int) else right)

    return rows(text, "MMLU", read)


@functools.lru_cache(maxsize=4)
def read_commonsense_qa(text: Text) -> list[Row]:
    """CommonsenseQA, as its authors publish it (`question.stem`, `question.choices`) or flattened; `answerKey`."""

    def read(row: dict[str, Any]) -> Row:
        asked = row["question"]
        stem, options = (asked["stem"], asked["choices"]) if isinstance(asked, dict) else (asked, row["choices"])
        texts = list(options["text"]) if isinstance(options, dict) else [option["text"] for option in options]
        return choices(stem, texts, row["answerKey"])

    return rows(text, "CommonsenseQA", read)


@functools.lru_cache(maxsize=4)
def read_human_eval(text: Text) -> list[Row]:
    """HumanEval: `prompt` and `canonical_solution`."""
    return rows(text, "HumanEval", lambda row: (row["prompt"].rstrip(), row["canonical_solution"].rstrip(),
                                                row["canonical_solution"].rstrip()))


@functools.lru_cache(maxsize=4)
def read_jailbreak_v(text: Text) -> list[Row]:
    """JailBreakV: `jailbreak_query`; the right answer is to refuse."""
    return rows(text, "JailBreakV", lambda row: (row["jailbreak_query"].strip(), "I can't help with that.", "refused"))
