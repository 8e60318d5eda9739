"""Reading LongMemEval's own files: longmemeval_s.json, longmemeval_m.json, longmemeval_oracle.json."""

from __future__ import annotations

import functools
import json
from typing import Any

from longspan.evaluation.longmemeval.history import Asked, Session, Turn
from longspan.evaluation.longmemeval.judge import PREFERENCE
from longspan.evaluation.texts import Text
from longspan.registry import Refused


@functools.lru_cache(maxsize=2)
def read_histories(text: Text) -> list[Asked]:
    """Every question of a file with its whole history, oldest session first.

    Questions about preferences are left out: their answer is a rubric, which only a model can judge.

    Raises:
        Refused: the file isn't of LongMemEval's form, or nothing is left.
    """
    try:
        rows = json.loads(text.text)
        found = [_asked(row) for row in rows if row["question_type"] != PREFERENCE]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"no field {error.args[0]!r}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise Refused(f"{text.source!r}: not LongMemEval's form ({problem}); expected its JSON as published, such as "
                      "longmemeval_s.json.") from None
    if not found:
        raise Refused(f"{text.source!r}: no question that can be judged without a model; expected LongMemEval's JSON, such as "
                      "longmemeval_s.json.")
    return found


def _asked(row: dict[str, Any]) -> Asked:
    evidence = set(row["answer_session_ids"])
    sessions = [_session(*parts, evidence) for parts in
                zip(row["haystack_session_ids"], row["haystack_dates"], row["haystack_sessions"], strict=True)]
    sessions.sort(key=lambda session: session.date)  # the oracle file isn't in order
    return Asked(row["question_id"], row["question_type"], row["question"], (str(row["answer"]),), row["question_date"],
                 tuple(sessions))


def _session(name: str, date: str, turns: list[dict[str, Any]], evidence: set[str]) -> Session:
    # Where no turn is marked the whole session is evidence.
    marked = any(turn.get("has_answer") for turn in turns)
    return Session(name, date, tuple(
        Turn(turn["role"], turn["content"], name in evidence and bool(turn.get("has_answer") or not marked)) for turn in turns))
