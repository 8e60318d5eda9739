"""LongMemEval (arXiv:2410.10813): what a chat assistant remembers of sessions that lie months back.

A history of dated sessions stands before a question about one or several of them. Six types are asked in turn: what the user
said, what the assistant said, what the user likes, something scattered over sessions, something about time, something that
changed; and now and then a thing that never came up, where the right answer is to say so.

Without a file the sessions are ours; filler sessions talk about sentences of a text. With a file (``file=``, such as
longmemeval_s.json) each question has its own history, of which as many sessions stay as fit the length, those with the evidence
always. Answers are judged by rules, so scores are named ``-open``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from longspan.evaluation import longmemeval
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.longmemeval.history import written
from longspan.evaluation.longmemeval.questions import DAYS, START
from longspan.evaluation.tasks.file_context import row_of
from longspan.evaluation.tasks.haystack import Essay
from longspan.evaluation.texts import Text, load_file, load_text
from longspan.registry import knob, method

HEADER = "Below are earlier sessions of a chat between a user and an assistant, the oldest first.\n\n"
FILLER = ("Can you put this in other words?", "Please note this down for me.", "What do you make of this?",
          "I came across this today.", "Is this correct?")
REPLIES = ("Here is what I would add:", "In short:", "It goes together with this:", "Put differently:", "As far as I know:")
EXCHANGES = 3
"""Exchanges of a filler session."""


@method("longmemeval", kind="task", system="standard-suites", paper="arXiv:2410.10813",
        summary="Answer questions about dated chat sessions: six types, and knowing what was never said.")
class LongMemEval(Task):
    """LongMemEval with sessions of our own, or over your copy of its files; judged without a model."""

    type: str = knob("all", "which type of question; all in turn if left out", choices=("all", *longmemeval.KINDS))
    haystack: str = knob("pydoc", "text that filler sessions talk about: pydoc, docstrings, jargon, bible, debian-handbook")
    file: str = knob("", "your copy of longmemeval_s.json, _m or _oracle; sessions of our own if left out")

    own_text = True

    @property
    def text(self) -> Text:
        return load_file(self.file) if self.file else load_text(self.haystack)

    def available(self, length: int, tokenizer: Any) -> int | None:
        return len(self._asked()) if self.file else None

    def _asked(self) -> list[longmemeval.Asked]:
        """Questions of the file that are of the type wanted."""
        found = longmemeval.read_histories(self.text)
        if self.type == "all":
            return found
        if self.type == longmemeval.ABSTENTION:
            return [asked for asked in found if asked.abstain]
        return [asked for asked in found if asked.type == self.type]

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        return self._of_file(key) if self.file else self._of_our_own(key, tokenizer)

    # ---------------------------------------------------------------------------------------------- sessions of our own

    def _of_our_own(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("question")
        kinds = list(longmemeval.KINDS)
        asked = longmemeval.ask(kinds[key.index % len(kinds)] if self.type == "all" else self.type, rng)
        essay = Essay(self.text, rng.randrange(len(self.text.sentences)), tokenizer)

        def build(units: int) -> Example:
            sessions = sorted([*asked.sessions, *_filler(key, essay.take(2 * units))], key=lambda session: session.date)
            return self._example(key, asked, sessions)

        return Draft(build, least=1, estimate=lambda units: essay.tokens(2 * units) + 24 * units)

    # -------------------------------------------------------------------------------------------------- the user's file

    def _of_file(self, key: Key) -> Draft:
        asked = row_of(self._asked(), key, _evidence_size)
        # Evidence comes first, then other sessions in an order of their own; an abstention has only others.
        evidence = [i for i, session in enumerate(asked.sessions) if session.evidence]
        others = [i for i, session in enumerate(asked.sessions) if not session.evidence]
        key.rng("sessions").shuffle(others)
        order = evidence + others

        def build(units: int) -> Example:
            return self._example(key, asked, [asked.sessions[i] for i in sorted(order[:units])])

        return Draft(build, least=max(1, len(evidence)), most=len(order))

    # ----------------------------------------------------------------------------------------------------------- shared

    def _example(self, key: Key, asked: longmemeval.Asked, sessions: list[longmemeval.Session]) -> Example:
        body, ranges = longmemeval.shown(sessions, len(HEADER))
        places = [i for i, session in enumerate(sessions) if session.evidence]
        depth = {"depth": sum(places) / len(places) / len(sessions)} if places else {}
        return Example(
            context=HEADER + body,
            question=(f"\n\nToday is {asked.date}. Answer from the sessions above in a few words; say that you don't know if "
                      f"they don't tell.\n\nQuestion: {asked.question}"),
            answer_prefix="Answer:", answers=asked.answers, max_new_tokens=64, meta={
                "index": key.index, "answers_are": "any", "question_id": asked.id, "type": asked.type, "abstain": asked.abstain,
                "query": [asked.question], "session_ids": [session.id for session in sessions],
                "evidence_ids": [sessions[i].id for i in places], **ranges, **depth})

    def metric(self, prediction: str, example: Example) -> float:
        return longmemeval.judge(example.meta["type"], prediction, example.answers, example.meta["abstain"])


def _filler(key: Key, sentences: list[str]) -> list[longmemeval.Session]:
    """Sessions about sentences, two an exchange, evenly over the whole time."""
    exchanges = [sentences[i:i + 2] for i in range(0, len(sentences), 2)]
    groups = [exchanges[i:i + EXCHANGES] for i in range(0, len(exchanges), EXCHANGES)]
    rng = key.rng("filler")
    sessions = []
    for number, group in enumerate(groups, 1):
        turns: list[longmemeval.Turn] = []
        for said, answered in group:
            turns += [longmemeval.Turn("user", f"{rng.choice(FILLER)} {said}"),
                      longmemeval.Turn("assistant", f"{rng.choice(REPLIES)} {answered}")]
        when = START + timedelta(days=DAYS * number / (len(groups) + 1))
        sessions.append(longmemeval.Session(f"filler_{number}", written(when), tuple(turns)))
    return sessions


def _evidence_size(asked: longmemeval.Asked) -> int:
    return sum(len(turn.content) for session in asked.sessions if session.evidence for turn in session.turns)
