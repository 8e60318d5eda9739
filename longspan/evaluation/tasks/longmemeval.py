"""LongMemEval (arXiv:2410.10813): what a chat assistant remembers of sessions that lie months back.

A history of dated sessions stands before a question about one or several of them. Six types are asked in turn: what the user
said, what the assistant said, what the user likes, something scattered over sessions, something about time, something that
changed; and now and then a thing that never came up, where the right answer is to say so.

Without a file the sessions are ours. Each has one exchange of everyday talk, which is evidence in some and of no use in the
others, among one or two about sentences of a text; all begin at times drawn alike. With a file (``file=``, such as
longmemeval_s.json) each question has its own history, of which as many sessions stay as fit the length, those with the evidence
always. Answers are judged by rules, so scores are named ``-open``.
"""

from __future__ import annotations

import random
from typing import Any

from longspan.evaluation import longmemeval
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.longmemeval.chatter import chat
from longspan.evaluation.longmemeval.history import Session, Turn, written
from longspan.evaluation.longmemeval.questions import moment
from longspan.evaluation.tasks.file_context import row_of
from longspan.evaluation.tasks.haystack import Essay
from longspan.evaluation.texts import Text, load_file, load_text
from longspan.registry import knob, method

HEADER = "Below are earlier sessions of a chat between a user and an assistant, the oldest first.\n\n"
FILLER = ("Can you put this in other words?", "Please note this down for me.", "What do you make of this?",
          "I came across this today.", "Is this correct?")
REPLIES = ("Here is what I would add:", "In short:", "It goes together with this:", "Put differently:", "As far as I know:")
EXCHANGES = (1, 2)
"""How many exchanges about the text a session can have beside the everyday one."""


@method("longmemeval", kind="task", system="standard-suites", paper="arXiv:2410.10813",
        summary="Answer questions about dated chat sessions: six types, and knowing what was never said.")
class LongMemEval(Task):
    """LongMemEval with sessions of our own, or over your copy of its files; judged without a model.

    The answer has to be contained in what is said. In temporal reasoning a number of days, weeks, months or years, and the
    day of a date, may be off by one. A count over several sessions has to be the only number named. Where the history doesn't
    tell, saying so is right.
    """

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
            sessions = _sessions(key, asked.sessions, essay.take(2 * units))
            return self._example(key, asked, sorted(sessions, key=lambda session: session.date))

        least = sum(_exchanges(_rng(key, number)) for number in range(len(asked.sessions)))
        return Draft(build, least=least, estimate=lambda units: essay.tokens(2 * units) + 50 * units)

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


def _sessions(key: Key, evidence: tuple[Session, ...], sentences: list[str]) -> list[Session]:
    """Those with evidence and as many others as there are sentences for, two an exchange; all put together alike.

    Session i is drawn from the key and i alone, so that it is the same in a longer history; only the last may be cut.
    """
    found: list[Session] = []
    while sentences or len(found) < len(evidence):
        number = len(found)
        rng = _rng(key, number)
        count = 2 * _exchanges(rng)
        when, everyday = written(moment(rng)), chat(rng)
        session = Session(f"filler_{number + 1}", when, (Turn("user", everyday[0]), Turn("assistant", everyday[1])))
        found.append(_among(evidence[number] if number < len(evidence) else session, sentences[:count], rng))
        sentences = sentences[count:]
    return found


def _rng(key: Key, number: int) -> random.Random:
    return key.rng(f"session/{number}")


def _exchanges(rng: random.Random) -> int:
    """How many exchanges about the text a session has: the first thing drawn for it."""
    return rng.choice(EXCHANGES)


def _among(session: Session, sentences: list[str], rng: random.Random) -> Session:
    """A session with its exchange put before, between or after exchanges about sentences."""
    exchanges = [(Turn("user", f"{rng.choice(FILLER)} {said}"), Turn("assistant", f"{rng.choice(REPLIES)} {answered}"))
                 for said, answered in zip(sentences[::2], sentences[1::2])]
    exchanges.insert(rng.randrange(len(exchanges) + 1), (session.turns[0], session.turns[1]))
    return Session(session.id, session.date, tuple(turn for exchange in exchanges for turn in exchange))


def _evidence_size(asked: longmemeval.Asked) -> int:
    return sum(len(turn.content) for session in asked.sessions if session.evidence for turn in session.turns)
