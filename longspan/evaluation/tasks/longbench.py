"""LongBench v1 (arXiv:2308.14508) over the user's own files.

Twenty-one tasks, one JSON-lines file each, with fields `input`, `context`, `answers`, `all_classes`, `length`. A prompt
that is too long keeps its first and its last half. The tasks' instructions are worded by us; where the context, the
question and the cue for the answer stand is as published, and so are the metrics.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.file_context import cut_to_fit, file_in, row_of
from longspan.evaluation.texts import Text, load_file
from longspan.registry import Refused, knob, method, nearest


@dataclass(frozen=True)
class Subset:
    """One of the tasks: its metric, its generation allowance, and the prompt around context and input.

    `chat` says whether the chat template is used, `first_line` whether the answer is cut at its first newline.
    """

    metric: str
    new_tokens: int
    before: str
    after: str
    chat: bool = True
    first_line: bool = False


SHORTLY = "Answer in as few words as you can and explain nothing."
PASSAGES = ("Answer the question from the passages given. Give the answer only.\n\nThe passages:\n",
            "\n\nAnswer the question from the passages above. Give the answer only.\n\nQuestion: {input}\nAnswer:")

SUBSETS: dict[str, Subset] = {
    "narrativeqa": Subset("f1", 128, f"Here is a story or a film script, then a question. {SHORTLY}\n\nStory: ",
                          f"\n\nNow answer from the story. {SHORTLY}\n\nQuestion: {{input}}\n\nAnswer:"),
    "qasper": Subset("f1", 128, f"Here is a scientific article, then a question. {SHORTLY}\n\nArticle: ",
                     f"\n\nNow answer from the article. {SHORTLY} Say yes or no where the question asks for it, and "
                     "\"unanswerable\" if the article doesn't tell.\n\nQuestion: {input}\n\nAnswer:"),
    "multifieldqa_en": Subset("f1", 64, "Read the text below and answer briefly.\n\n",
                              "\n\nNow answer from the text above. Give the answer only.\n\n"
                              "Question: {input}\nAnswer:"),
    "multifieldqa_zh": Subset("f1_zh", 64, "请阅读下面的文字，然后用中文简短作答。\n\n",
                              "\n\n请根据上面的文字作答，只写答案。\n\n问题：{input}\n回答："),
    "hotpotqa": Subset("f1", 32, *PASSAGES),
    "2wikimqa": Subset("f1", 32, *PASSAGES),
    "musique": Subset("f1", 32, *PASSAGES),
    "dureader": Subset("rouge_zh", 128, "请根据给出的文章回答问题。\n\n文章：",
                       "\n\n请根据上面的文章作答。\n\n问题：{input}\n回答："),
    "gov_report": Subset("rouge", 512, "Here is a government agency's report. Summarise it on one page.\n\nReport:\n",
                         "\n\nNow write the one-page summary of the report.\n\nSummary:"),
    "qmsum": Subset("rouge", 512, "Here is the transcript of a meeting, then a query. Answer it in a few sentences."
                    "\n\nTranscript:\n",
                    "\n\nNow answer the query from the transcript above.\n\nQuery: {input}\nAnswer:"),
    "multi_news": Subset("rouge", 512, "Here are several news articles. Summarise them all on one page.\n\nNews:\n",
                         "\n\nNow write the one-page summary of all articles.\n\nSummary:"),
    "vcsum": Subset("rouge_zh", 512, "下面是一次会议的记录，请读后写一段总结。\n会议记录：\n", "\n\n会议总结："),
    "trec": Subset("classification", 64, "Say of which type the question is. Some examples come first.\n\n",
                   "\n{input}", chat=False, first_line=True),
    "triviaqa": Subset("f1", 32, "Answer the question from the passage. Give the answer only. "
                       "Some examples come first.\n\n", "\n\n{input}", chat=False, first_line=True),
    "samsum": Subset("rouge", 128, "Summarise the dialogue in a few short sentences. Some examples come first.\n\n",
                     "\n\n{input}", chat=False, first_line=True),
    "lsht": Subset("classification", 64, "请判断新闻的类别，先看一些例子。\n\n", "\n{input}", chat=False,
                   first_line=True),
    "passage_count": Subset("count", 32, "Below are paragraphs, some of them more than once. Read them and find out "
                            "how many different ones there are.\n\n",
                            "\n\nHow many different paragraphs are there? Give the number only, such as 1, 2 or 3."
                            "\n\nThe final answer is: "),
    "passage_retrieval_en": Subset("retrieval", 32, "Below are 30 paragraphs, then the abstract of one of them. "
                                   "Say which paragraph it sums up.\n\n",
                                   "\n\nThe abstract:\n\n{input}\n\nGive the number of the paragraph, such as "
                                   "\"Paragraph 1\" or \"Paragraph 2\".\n\nThe answer is: "),
    "passage_retrieval_zh": Subset("retrieval", 32, "下面是若干段落和其中一段的摘要，请指出摘要属于哪一段。\n\n",
                                   "\n\n摘要：\n\n{input}\n\n请写出段落编号，如“段落1”“段落2”。\n\n答案是："),
    "lcc": Subset("code_sim", 64, "Complete the code below.\n", "Next line of code:\n", chat=False),
    "repobench-p": Subset("code_sim", 64, "Complete the code below.\n", "{input}Next line of code:\n", chat=False),
}


@method("longbench", kind="task", system="standard-suites", paper="arXiv:2308.14508",
        summary="One of LongBench v1's 21 tasks, from your copy of its files.")
class LongBench(Task):
    """LongBench v1, and LongBench-E (names ending in `_e`), in the order of the file."""

    path: str = knob("", "a LongBench .jsonl file, or the folder that holds them")
    name: str = knob("", "which task, such as hotpotqa or hotpotqa_e; told by the file if left out")
    upstream: bool = knob(False, "score exactly as published: classification's skipped classes, the package rouge")

    @property
    def text(self) -> Text | None:
        return load_file(str(self._file())) if self.path else None

    def _file(self) -> Path:
        return file_in("longbench", self.path, self.name, "your copy of LongBench v1's data folder (data.zip of its data set "
                       "page) or one of its .jsonl files")

    def _rows(self) -> tuple[str, list[dict[str, Any]]]:
        rows = read_rows(load_file(str(self._file())))
        name = (self.name or rows[0].get("dataset") or self._file().stem).removesuffix("_e")
        if name not in SUBSETS:
            raise Refused(f"longbench({self._file().name}): {nearest(name, SUBSETS, 'name')}")
        return name, rows

    def available(self, length: int, tokenizer: Any) -> int:
        return len(self._rows()[1])

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        name, rows = self._rows()
        subset = SUBSETS[name]
        row = row_of(rows, key, lambda row: len(row["input"]))
        question = subset.after.replace("{input}", row["input"])

        def make(context: str, truncated: bool) -> Example:
            return Example(
                context=context, question=question,
                answer_prefix="", answers=tuple(row["answers"]), max_new_tokens=subset.new_tokens,
                meta={"index": key.index, "answers_are": "any", "subset": name, "chat_template": subset.chat,
                      "classes": list(row.get("all_classes") or ()), "truncated": truncated,
                      "bucket": bucket(row.get("length", 0)), "stop": ["\n"] if name == "samsum" else []})

        return cut_to_fit(subset.before + row["context"], question, tokenizer, make)

    def metric(self, prediction: str, example: Example) -> float:
        subset = SUBSETS[example.meta["subset"]]
        if subset.first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return metrics.best(self._scorer(subset.metric, example), prediction, example.answers)

    def _scorer(self, name: str, example: Example) -> Callable[[str, str], float]:
        if name == "classification":
            return functools.partial(metrics.classification, classes=example.meta["classes"], upstream=self.upstream)
        if name == "code_sim":
            return functools.partial(metrics.code_sim, upstream=self.upstream)
        if name in ("rouge", "rouge_zh") and self.upstream:
            return functools.partial(metrics.rouge_l_upstream, chinese=name == "rouge_zh")
        return {"f1": metrics.f1, "f1_zh": metrics.f1_zh, "rouge": metrics.rouge_l, "rouge_zh": metrics.rouge_l_zh,
                "count": metrics.count, "retrieval": metrics.retrieval}[name]


def bucket(words: int) -> str:
    """LongBench-E's bucket of a context of that many words."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


@functools.lru_cache(maxsize=2)
def read_rows(text: Text) -> list[dict[str, Any]]:
    """Rows of a LongBench file.

    Raises:
        Refused: not JSON lines, a field is missing, or there are no rows.
    """
    rows = []
    for number, line in enumerate(text.text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            missing = {"input", "context", "answers"} - set(row)
        except (ValueError, TypeError):
            raise Refused(f"{text.source!r} line {number}: not a JSON object; expected LongBench's .jsonl.") from None
        if missing:
            raise Refused(f"{text.source!r} line {number}: no field {sorted(missing)[0]!r}; expected LongBench v1's "
                          "input, context and answers.")
        rows.append(row)
    if not rows:
        raise Refused(f"{text.source!r}: no rows; expected LongBench's .jsonl.")
    return rows
