"""Whether an answer is right, without a model that judges.

LongMemEval asks a chat model, with one instruction a type. What those instructions allow is checked by rules here: the answer is
contained; a number of days may be off by one in temporal reasoning; in knowledge update the updated value suffices, whatever
else is said; a count over several sessions has to be the only number named; a question that the history doesn't answer wants a
sentence that says so. `judge_prompt` words the same for a model, `judged_by` asks any function from text to text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from statistics import fmean

from longspan.evaluation.metrics import contains

TEMPORAL, UPDATE, PREFERENCE = "temporal-reasoning", "knowledge-update", "single-session-preference"
SEVERAL = "multi-session"

UNKNOWN = (
    "don't know", "do not know", "not know", "no information", "not enough information", "isn't enough information",
    "insufficient information", "not mentioned", "didn't mention", "did not mention", "never mentioned", "haven't mentioned",
    "have not mentioned", "no mention", "not said", "didn't say", "did not say", "never said", "doesn't say", "does not say",
    "doesn't tell", "does not tell", "didn't tell", "did not tell", "never told", "haven't told", "have not told", "no record",
    "not recorded", "can't answer", "cannot answer", "can't be answered", "cannot be answered", "can't tell", "cannot tell",
    "can't determine", "cannot determine", "cannot be determined", "unable to answer", "not provided", "not specified",
    "not available", "not discussed", "unanswerable", "unknown", "not sure", "unsure", "not certain", "uncertain", "no idea",
)
"""Phrases of which one shows that an answer abstains."""

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
          "december")
QUANTITY = re.compile(r"(\d+)\s*(day|week|month|year)s?\b", re.IGNORECASE)


def judge(kind: str, prediction: str, answers: Sequence[str], abstain: bool = False) -> float:
    """1 if `prediction` is right.

    Args:
        kind: the question's type.
        answers: alternatives, of which one suffices.
        abstain: the right answer is that the history doesn't tell.
    """
    if abstain:
        return float(abstains(prediction))
    if kind == TEMPORAL:
        return float(any(_right_in_time(prediction, answer) for answer in answers))
    if kind == SEVERAL and (counts := {count for answer in answers if (count := _count(answer)) is not None}):
        return float(_only_count(prediction, counts))
    return max((contains(prediction, answer) for answer in answers), default=0.0)


def abstains(prediction: str) -> bool:
    """Whether an answer says that it isn't known."""
    said = " ".join(prediction.lower().replace("’", "'").split())
    return any(phrase in said for phrase in UNKNOWN)


def _right_in_time(prediction: str, answer: str) -> bool:
    """A number of days, weeks, months or years, or a date, may be off by one; anything else must be contained."""
    if right := QUANTITY.search(answer):
        found = first_quantity(prediction, right.group(2))
        return found is not None and abs(found - int(right.group(1))) <= 1
    if (wanted := first_date(answer)) and (told := first_date(prediction, wanted.year)):
        return abs((told - wanted).days) <= 1
    return contains(prediction, answer) == 1.0


def _in_digits(text: str) -> str:
    """The text with number words up to twelve written in digits, and lower case."""
    words = rf"(?<![\w-])({'|'.join(NUMBER_WORDS)})(?![\w-])"
    return re.sub(words, lambda m: str(NUMBER_WORDS.index(m[0])), text.lower())


def _count(answer: str) -> str | None:
    """The digits of an answer that is a whole number and nothing else."""
    plain = _in_digits(answer.strip())
    return plain if plain.isdecimal() else None


def _only_count(prediction: str, counts: set[str]) -> bool:
    """Whether one of `counts` is the only number named, and isn't denied; "the last one" and the like name none."""
    told = re.sub(r"\b(the|last|first|this|that|each|every|another|other|no|any|which) one\b", r"\1", prediction.lower())
    plain = _in_digits(told.replace("’", "'"))
    named = {number.replace(",", "") for number in re.findall(r"\d+(?:[.,]\d+)*", plain)}
    return len(named) == 1 and named <= counts and not re.search(r"(\bnot|n't) (\w+ )?\d", plain)


def first_quantity(text: str, unit: str) -> int | None:
    """The first number of `unit` in a text, else its first number at all; words up to twelve are numbers too."""
    plain = re.sub(r"\b(" + "|".join(NUMBER_WORDS) + r")\b", lambda m: str(NUMBER_WORDS.index(m[0].lower())), text,
                   flags=re.IGNORECASE)
    found = re.search(rf"(\d+)\s*{unit}", plain, re.IGNORECASE) or re.search(r"(\d+)", plain)
    return int(found.group(1)) if found else None


def first_date(text: str, year: int | None = None) -> date | None:
    """The first date of a text: 2024/03/05, 2024-03-05, 5 March 2024, March 5th, 2024; `year` is taken where it has none."""
    plain = text.lower()
    if found := re.search(r"\b(\d{4})[/-](\d{1,2})[/-](\d{1,2})\b", plain):
        return _date(*map(int, found.groups()))
    month = rf"({'|'.join(name[:3] for name in MONTHS)})[a-z]*\.?"
    for pattern, order in ((rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {month},?(?: (\d{{4}}))?", (2, 1)),
                           (rf"\b{month} (\d{{1,2}})(?:st|nd|rd|th)?\b,?(?: (\d{{4}}))?", (1, 2))):
        if found := re.search(pattern, plain):
            number = next(i for i, name in enumerate(MONTHS, 1) if name.startswith(found.group(order[0])))
            told = found.group(3) or year
            return _date(int(told), number, int(found.group(order[1]))) if told else None
    return None


def _date(year: int, month: int, day: int) -> date | None:
    try:
        return date(year, month, day)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------ with a model

JUDGES: dict[str, str] = {
    "abstention": "The chat history doesn't answer this question. Does the response say so?",
    TEMPORAL: "Does the response give the right answer? A number of days, weeks or months that is off by one is right.",
    UPDATE: "Does the response give the updated answer? It may name an earlier one as well.",
    PREFERENCE: "The expected answer describes what the user would want. Does the response use what the user told?",
    "": "Does the response give the expected answer, or one that means the same? A part of it is not enough.",
}
"""What a judging model is asked, by type; "" for all others."""


def judge_prompt(kind: str, question: str, answer: str, response: str, abstain: bool = False) -> str:
    """The question to a judging model, to be answered yes or no."""
    asked = JUDGES["abstention"] if abstain else JUDGES.get(kind, JUDGES[""])
    return (f"{asked} Say yes or no only.\n\nQuestion: {question}\nExpected answer: {answer}\nResponse: {response}\n\n"
            "Yes or no?")


def judged_by(ask: Callable[[str], str], kind: str, question: str, answer: str, response: str, abstain: bool = False) -> float:
    """1 if the judge's reply to `judge_prompt` says yes."""
    return float("yes" in ask(judge_prompt(kind, question, answer, response, abstain)).lower())


def accuracies(scored: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Accuracy by type, "abstention", "task-averaged" (mean over the types) and "overall".

    Args:
        scored: question id, type and score of each answer. Questions to abstain from count in their type too.
    """
    by_type: dict[str, list[float]] = defaultdict(list)
    every, abstained = [], []
    for name, kind, score in scored:
        every.append(score)
        by_type[kind].append(score)
        if name.endswith("_abs"):
            abstained.append(score)
    if not every:
        return {}
    found = {kind: fmean(scores) for kind, scores in sorted(by_type.items())}
    return {**found, **({"abstention": fmean(abstained)} if abstained else {}), "task-averaged": fmean(found.values()),
            "overall": fmean(every)}
