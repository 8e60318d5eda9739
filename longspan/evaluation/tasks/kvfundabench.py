"""KVFundaBench (arXiv:2502.01941): what compression does to reasoning, not to retrieval.

Worked examples ("shots") stand before a question; the answer is a chain of steps, a choice, a line of code. Shots are all
that tells the format, so a cache that loses them loses the ability. The published benchmark asks MMLU, CommonsenseQA,
GSM8K, HumanEval and JailBreakV; every task here takes your copy of the file (``file=``) and otherwise asks questions of
its own of the same kind, made from a seed, whose scores say so (``-open``).

This file: what the tasks share; arithmetic (GSM8K), and many questions answered in one long generation (LG-GSM8K).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.kvfundabench_files import read_gsm8k
from longspan.evaluation.texts import Text, load_file
from longspan.registry import Refused, knob, method

PAPER = "arXiv:2502.01941"


@dataclass(frozen=True)
class Item:
    """A question and its answer as a shot shows them: `answer` is the whole text, `final` the part that is judged."""

    question: str
    answer: str
    final: str


@dataclass(frozen=True)
class FewShot(Task):
    """Shots, then a question. A subclass gives `draw` (an item of its own), `read` (the items of a file) and `metric`."""

    shots: int | None = knob(None, "worked examples before the question; as many as the length holds if None", low=0)
    file: str = knob("", "your copy of the published data set, a .jsonl file; questions of our own if left out")

    header: ClassVar[str] = "Answer the last question as the examples do.\n\n"
    asked: ClassVar[str] = "Question: "
    answered: ClassVar[str] = "Answer:"

    @property
    def new_tokens(self) -> int:
        """Tokens that an answer may take."""
        return 64

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends an answer."""
        return ("\n",)

    def draw(self, rng: random.Random) -> Item:
        """A question of our own."""
        raise Refused(f"{self.card.name} needs file=, your copy of the data set as JSON lines; it has no questions of its own.")

    def read(self, text: Text) -> list[Item]:
        """The items of a file, in its order."""
        raise NotImplementedError

    @property
    def text(self) -> Text | None:
        return load_file(self.file) if self.file else None

    @property
    def score_name(self) -> str:
        return self.card.name if self.file else f"{self.card.name}-open"

    def items(self) -> list[Item]:
        """The items of the user's file; none without one."""
        text = self.text
        return self.read(text) if text is not None else []

    def available(self, length: int, tokenizer: Any) -> int | None:
        return len(self.items()) if self.file else None

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        items = self.items()
        question, shot, most = (self._of_file(key, items) if self.file else self._of_our_own(key))
        if self.shots is not None and most is not None and self.shots > most:
            raise Refused(f"{self.card.name}(shots={self.shots}): {self.file!r} has {most} other items; ask for at most {most}.")

        def build(count: int) -> Example:
            context, spans = self._before([shot(i) for i in range(count)])
            return self.example(key, context, spans, question)

        if self.shots is not None:
            return Draft(build, least=self.shots, most=self.shots)
        return Draft(build, least=1 if most is None else min(1, most), most=most)

    def example(self, key: Key, context: str, spans: list[list[int]], item: Item) -> Example:
        """The example that asks for `item` after the shots in `context`."""
        return Example(
            context=context, question=self.asked + item.question, answer_prefix=self.answered, answers=(item.final,),
            max_new_tokens=self.new_tokens, meta={
                "index": key.index, "shots": spans, "answer_text": item.answer, "chat_template": False, "stop": list(self.stop)})

    def _of_our_own(self, key: Key) -> tuple[Item, Callable[[int], Item], None]:
        return self.draw(key.rng("question")), lambda i: self.draw(key.rng(f"shot/{i}")), None

    def _of_file(self, key: Key, items: list[Item]) -> tuple[Item, Callable[[int], Item], int]:
        """The item asked for, in the order of the file, and the others, shuffled, as shots."""
        if key.index < 0:  # probes for the floor: the longest questions
            items = sorted(items, key=lambda item: -len(item.question) - len(item.answer))
        place = (key.index if key.index >= 0 else -1 - key.index) % len(items)
        others = [i for i in range(len(items)) if i != place]
        key.rng("shots").shuffle(others)
        return items[place], lambda i: items[others[i]], len(others)

    def _before(self, shots: list[Item]) -> tuple[str, list[list[int]]]:
        """Header and shots, and the character range of every shot with the blank line after it."""
        text, spans = self.header, []
        for shot in shots:
            start = len(text)
            text += f"{self.asked}{shot.question}\n{self.answered} {shot.answer}\n\n"
            spans.append([start, len(text)])
        return text, spans


# --------------------------------------------------------------------------------------------------------- arithmetic

NAMES = ("Tom", "Ana", "Ben", "Eva", "Max", "Lea", "Sam", "Mia", "Leo", "Ida", "Jon", "Zoe")
THINGS = ("apples", "coins", "books", "shells", "stamps", "pears", "balls", "cards", "pens", "nuts")
FINAL = re.compile(r"FINAL \[(-?\d+)\]")


def word_problem(rng: random.Random) -> Item:
    """Somebody has some things, gets more and gives some away; the answer keeps count in a format of its own."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start, more = rng.randint(3, 19), rng.randint(2, 9)
    less = rng.randint(1, start + more - 1)
    end = start + more - less
    return Item(f"{name} has {start} {thing}, gets {more} more and gives away {less}. How many {thing} does {name} have now?",
                f"start={start}; plus {more} -> {start + more}; minus {less} -> {end}; FINAL [{end}]", str(end))


def final_number(prediction: str) -> str | None:
    """What an answer ends with: the number in ``FINAL [...]``, or the one behind ``####`` as GSM8K writes it."""
    found = FINAL.search(prediction) or re.search(r"#### *(-?[\d,]+)", prediction)
    return found.group(1).replace(",", "") if found else None


@method("kvfunda-arithmetic", kind="task", system="shotkv", paper=PAPER,
        summary="Word problems whose steps follow the worked examples' format; GSM8K from your copy.")
class Arithmetic(FewShot):
    """Few-shot chains of thought. An answer counts when its final number is right: ``FINAL [n]``, or ``#### n`` (GSM8K)."""

    header: ClassVar[str] = "Work through the last question exactly as in the examples.\n\n"

    @property
    def stop(self) -> tuple[str, ...]:
        return ("\n\n",) if self.file else ("\n",)

    @property
    def new_tokens(self) -> int:
        return 256 if self.file else 64

    def draw(self, rng: random.Random) -> Item:
        return word_problem(rng)

    def read(self, text: Text) -> list[Item]:
        return [Item(*row) for row in read_gsm8k(text)]

    def metric(self, prediction: str, example: Example) -> float:
        return float(final_number(prediction) == example.answers[0])


@method("kvfunda-long-generation", kind="task", system="shotkv", paper=PAPER,
        summary="K word problems in one prompt, answered one after another in one long generation (LG-GSM8K).")
class LongGeneration(FewShot):
    """Arithmetic, `K` questions at a time, so that the answer is what fills the cache. The score is the share of questions
    whose own numbered answer ends with the right number."""

    K: int = knob(35, "questions in one prompt", low=1)

    header: ClassVar[str] = "Work through the questions one after another, exactly as in the examples.\n\n"
    asked: ClassVar[str] = "Question 1: "
    answered: ClassVar[str] = "Answer 1:"

    @property
    def new_tokens(self) -> int:
        return self.K * (256 if self.file else 64)

    @property
    def stop(self) -> tuple[str, ...]:
        return (f"Answer {self.K + 1}:",)

    def draw(self, rng: random.Random) -> Item:
        return word_problem(rng)

    def read(self, text: Text) -> list[Item]:
        return [Item(*row) for row in read_gsm8k(text)]

    def available(self, length: int, tokenizer: Any) -> int | None:
        return len(self.items()) // self.K if self.file else None

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        items = self.items()
        if self.file and len(items) <= self.K:
            raise Refused(f"{self.card.name}(K={self.K}): {self.file!r} has {len(items)} items; ask for less than that.")
        return super().draft(key, tokenizer)

    def example(self, key: Key, context: str, spans: list[list[int]], item: Item) -> Example:
        asked = self._questions(key)
        question = "\n".join(f"Question {i}: {one.question}" for i, one in enumerate(asked, 1))
        answer = "\n".join(f"Answer {i}: {one.answer}" for i, one in enumerate(asked, 1))
        return Example(
            context=context, question=question, answer_prefix=self.answered, answers=tuple(one.final for one in asked),
            max_new_tokens=self.new_tokens, meta={
                "index": key.index, "shots": spans, "answer_text": answer.removeprefix(f"{self.answered} "),
                "chat_template": False, "stop": list(self.stop)})

    def _questions(self, key: Key) -> list[Item]:
        if not self.file:
            return [self.draw(key.rng(f"question/{i}")) for i in range(self.K)]
        items = self.items()
        first = max(0, key.index) * self.K
        return [items[(first + i) % len(items)] for i in range(self.K)]

    def _of_file(self, key: Key, items: list[Item]) -> tuple[Item, Callable[[int], Item], int]:
        first = max(0, key.index) * self.K
        asked = {(first + i) % len(items) for i in range(self.K)}
        others = [i for i in range(len(items)) if i not in asked]
        key.rng("shots").shuffle(others)
        return items[min(asked)], lambda i: items[others[i]], len(others)

    def metric(self, prediction: str, example: Example) -> float:
        parts = re.split(r"Answer (\d+):", f"{self.answered}{prediction}")
        found: dict[int, str | None] = {}
        for number, answer in zip(parts[1::2], parts[2::2]):
            found.setdefault(int(number), final_number(answer))  # what is said first counts
        right = sum(found.get(i) == final for i, final in enumerate(example.answers, 1))
        return right / len(example.answers)
