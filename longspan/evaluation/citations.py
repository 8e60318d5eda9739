"""Answers with citations, and how good the citations are (LongBench-Cite, arXiv:2409.02897).

A document's sentences are numbered from 0. An answer is a row of statements, each with the ranges of sentences it rests on::

    <statement>The bridge was opened in 1874.<cite>[12-12][40-41]</cite></statement>

Recall asks of each statement whether what it cites supports it (1, .5 or 0), and of one that cites nothing whether it needed
to; precision asks of each citation whether it is relevant. A judge answers these, a chat model in the paper: `chat_judge` makes
one of any function from text to text, with instructions worded by us. Where the sentences that hold the evidence are known, as in
generated documents, `against_evidence` scores without a judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

MOST_STATEMENTS = 40
"""Statements of an answer that are judged; later ones are passed over."""

STATEMENT = re.compile(r"<statement>(.*?)</statement>", re.DOTALL)
CITE = re.compile(r"<cite>(.*?)</cite>", re.DOTALL)
RANGE = re.compile(r"\[(\d+)(?:\s*-\s*(\d+))?\]")


@dataclass(frozen=True)
class Statement:
    """A statement and its citations: first and last sentence of each, both included."""

    text: str
    citations: tuple[tuple[int, int], ...]


def parse(answer: str) -> list[Statement]:
    """The statements of an answer; text outside of them is none. Ranges that run backwards are no citations."""
    found = []
    for inside in STATEMENT.findall(answer):
        ranges = [(int(a), int(b or a)) for cite in CITE.findall(inside) for a, b in RANGE.findall(cite)]
        found.append(Statement(CITE.sub("", inside).strip(), tuple((a, b) for a, b in ranges if a <= b)))
    return found


def without_citations(answer: str) -> str:
    """The answer as a reader sees it: no tags, no citations."""
    return re.sub(r"</?statement>", "", CITE.sub("", answer)).strip()


def snippet(sentences: Sequence[str], citation: tuple[int, int]) -> str:
    """The sentences a citation names, those that exist."""
    first, last = citation
    return " ".join(sentences[first:last + 1]).strip()


# -------------------------------------------------------------------------------------------------------- with a judge


@dataclass(frozen=True)
class Judge:
    """Three judgements, as functions.

    `support(question, statement, snippets)`: 1, .5 or 0; `relevant(question, statement, snippet)`: 1 or 0;
    `needs_citation(question, answer, statement)`: 1 or 0.
    """

    support: Callable[[str, str, str], float]
    relevant: Callable[[str, str, str], float]
    needs_citation: Callable[[str, str, str], float]


@dataclass(frozen=True)
class CitationScores:
    """Recall, precision and F1 of an answer's citations, 0 to 1; mean tokens a citation; how many of both there were."""

    recall: float
    precision: float
    f1: float
    citation_length: float
    statements: int
    citations: int


def citation_scores(answer: str, sentences: Sequence[str], question: str, judge: Judge,
                    count_tokens: Callable[[str], int] = lambda text: len(text.split()),
                    most: int = MOST_STATEMENTS) -> CitationScores:
    """LongBench-Cite's scores of one answer.

    Args:
        sentences: the document's, in the order of their numbers.
        count_tokens: tokens of a snippet, for the citation length; words if not given.
        most: statements judged.
    """
    statements = parse(answer)[:most]
    plain = without_citations(answer)
    recalls, precisions, lengths = [], [], []
    for statement in statements:
        snippets = [snippet(sentences, citation) for citation in statement.citations]
        if snippets:
            cited = "\n\n".join(snippets).strip()
            # What cites sentences that don't exist is supported by nothing.
            recalls.append(judge.support(question, statement.text, cited) if cited else 0.0)
        else:
            recalls.append(1.0 - judge.needs_citation(question, plain, statement.text))
        precisions += [judge.relevant(question, statement.text, text) if text else 0.0 for text in snippets]
        lengths += [count_tokens(text) for text in snippets]
    recall, precision, length = (fmean(values) if values else 0.0 for values in (recalls, precisions, lengths))
    return CitationScores(recall, precision, harmonic(recall, precision), length, len(statements), len(precisions))


def harmonic(recall: float, precision: float) -> float:
    """F1; 0 if both are."""
    return 2 * recall * precision / (recall + precision) if recall + precision else 0.0


SUPPORT = ("Is the statement supported by the snippet? Reply [[full]] if most of it is, [[partial]] if more than half of it "
           "is and the rest isn't there or contradicts, [[none]] otherwise. Use nothing but the snippet.")
RELEVANT = ("Does the snippet hold a key point of the statement? Reply [[yes]] or [[no]]. Use nothing but the snippet.")
NEEDS = ("Is the sentence of the response a statement of fact taken from the document, and no introduction, transition, summary "
         "or conclusion of what was said before? Reply [[yes]] or [[no]].")


def chat_judge(ask: Callable[[str], str], tries: int = 5) -> Judge:
    """A judge that asks a chat model.

    Args:
        ask: a prompt to a reply, such as a call of an OpenAI-compatible endpoint.
        tries: how often it is asked until the reply names a rating.

    Raises:
        ValueError: (by the judge) no reply named a rating.
    """

    def rate(instruction: str, ratings: dict[str, float], **parts: str) -> float:
        prompt = "\n\n".join([instruction, *(f"<{name}>\n{text}\n</{name}>" for name, text in parts.items())])
        reply = ""
        for _ in range(tries):
            reply = ask(prompt)
            found = re.search(r"\[\[\s*(\w+)\s*\]\]", reply)
            if found and found.group(1).lower() in ratings:
                return ratings[found.group(1).lower()]
        raise ValueError(f"the judge replied {reply[:80]!r}; expected one of "
                         f"{', '.join(f'[[{name}]]' for name in ratings)}.")

    yes = {"yes": 1.0, "no": 0.0}
    return Judge(
        support=lambda question, statement, cited: rate(SUPPORT, {"full": 1.0, "partial": 0.5, "none": 0.0},
                                                        question=question, statement=statement, snippet=cited),
        relevant=lambda question, statement, cited: rate(RELEVANT, yes, question=question, statement=statement, snippet=cited),
        needs_citation=lambda question, answer, sentence: rate(NEEDS, yes, question=question, response=answer,
                                                               sentence=sentence))


SCALES = {"qa": lambda rating: (rating - 1) / 2, "summary": lambda rating: (rating - 1) / 4,
          "few-shot": lambda rating: rating / 10}
"""A judge's rating of correctness as 0 to 1: answers are rated 1 to 3, summaries 1 to 5, by example 1 to 10."""


def correctness(rating: float, scale: str) -> float:
    """A rating on one of the `SCALES` as 0 to 1."""
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r}: expected one of {', '.join(SCALES)}.")
    return SCALES[scale](rating)


# ----------------------------------------------------------------------------------------------------- without a judge


def against_evidence(answer: str, evidence: Collection[int], tokens_of: Sequence[int] = (),
                     most: int = MOST_STATEMENTS) -> CitationScores:
    """Scores where the sentences that hold the evidence are known.

    Recall is the share of them that some statement cites, precision the share of the cited sentences that are among them, each
    sentence counted once; so citing everything isn't precise.

    Args:
        evidence: numbers of the sentences, at least one.
        tokens_of: tokens of each sentence of the document, for the citation length; a sentence counts one if not given.
    """
    if not evidence:
        raise ValueError("citations against no evidence; expected at least one sentence.")
    statements = parse(answer)[:most]
    ranges = [citation for statement in statements for citation in statement.citations]
    last = len(tokens_of) - 1 if tokens_of else None
    clipped = [range(first, (end if last is None else min(end, last)) + 1) for first, end in ranges]
    cited = _distinct(clipped)
    right = sum(any(number in part for part in clipped) for number in set(evidence))
    recall, precision = right / len(set(evidence)), right / cited if cited else 0.0
    lengths = [sum(tokens_of[part.start:part.stop]) if tokens_of else len(part) for part in clipped]
    return CitationScores(recall, precision, harmonic(recall, precision), fmean(lengths) if lengths else 0.0, len(statements),
                          len(ranges))


def _distinct(ranges: Sequence[range]) -> int:
    """How many numbers some range holds; written so that a range with a huge end costs nothing."""
    total, reached = 0, -1
    for part in sorted(ranges, key=lambda r: (r.start, r.stop)):
        total += max(0, part.stop - max(part.start, reached + 1))
        reached = max(reached, part.stop - 1)
    return total
