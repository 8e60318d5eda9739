"""A chat history: dated sessions of turns, what is asked about them, and how they are written into a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Turn:
    """Something said by "user" or "assistant"; `evidence` if the answer needs it."""

    role: str
    content: str
    evidence: bool = False


@dataclass(frozen=True)
class Session:
    """A conversation with its id and when it began, as written in the prompt."""

    id: str
    date: str
    turns: tuple[Turn, ...]

    @property
    def evidence(self) -> bool:
        return any(turn.evidence for turn in self.turns)


@dataclass(frozen=True)
class Asked:
    """A question, when it is asked, what answers it, and the sessions that hold the evidence, oldest first."""

    id: str
    type: str
    question: str
    answers: tuple[str, ...]
    date: str
    sessions: tuple[Session, ...]

    @property
    def abstain(self) -> bool:
        """Whether the right answer is that the history doesn't tell."""
        return self.id.endswith("_abs")


def written(date: datetime) -> str:
    """A date as LongMemEval writes it, ``2023/05/20 (Sat) 02:21``; days of the week in English whatever the locale."""
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[date.weekday()]
    return f"{date:%Y/%m/%d} ({day}) {date:%H:%M}"


def shown(sessions: list[Session], shift: int = 0) -> tuple[str, dict[str, list[list[int]]]]:
    """Sessions as text, and the character ranges in it of sessions ("documents"), "turns" and turns with evidence ("spans").

    `shift` moves the ranges for a header that will be put in front.
    """
    text = ""
    ranges: dict[str, list[list[int]]] = {"documents": [], "turns": [], "spans": []}
    for session in sessions:
        text += "\n\n" if text else ""
        begin = shift + len(text)
        text += f"Session of {session.date}"
        for turn in session.turns:
            text += "\n"
            start = shift + len(text)
            text += f"{turn.role}: {turn.content}"
            ranges["turns"].append([start, shift + len(text)])
            if turn.evidence:
                ranges["spans"].append([start, shift + len(text)])
        ranges["documents"].append([begin, shift + len(text)])
    return text, ranges
