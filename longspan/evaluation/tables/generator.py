"""The pipeline: tables, a question, its answer by SQL, verification, and a text of the length asked for.

Tables and questions are drawn until one is fit, its needed rows have room, and the text comes within 2% of its length; each try
has dice of its own. The gold answer is what SQL gives over the tables as they are shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, encode_continuation, total_length
from longspan.evaluation.tables.contexts import FEW, Costs, Supply, choose, supply
from longspan.evaluation.tables.executors import Result, run, select
from longspan.evaluation.tables.pool import Database, Source, Value
from longspan.evaluation.tables.queries import FAMILIES, Query, cells_needed, sql
from longspan.evaluation.tables.questions import draw
from longspan.evaluation.tables.serialise import serialise
from longspan.evaluation.tables.verification import doubted, rounded, unfit
from longspan.evaluation.tables.wording import LANGUAGES, words
from longspan.registry import Refused

WITHIN = 0.02
"""How much shorter than asked for a prompt may be, as a share."""
TRIES, LOOKS, QUESTIONS, CORRECTIONS = 60, 24, 6, 4
"""Draws of tables for one example; those among which one has to leave room; draws of a question; counts of the whole text."""
QUESTION_ROOM = 150
"""About what question, heading and chat template take, in tokens."""
ANSWER_ROOM = 96
"""Tokens of an answer without reasoning."""
PREFIX = "Answer:"
Rows = Mapping[str, Sequence[int]]
"""Row numbers by table."""


class TooLong(Refused):
    """What the answer needs doesn't fit the length."""


@dataclass(frozen=True)
class Wishes:
    """What questions are asked for; see the knobs of the task."""

    family: str = "mixed"
    serialisation: str = "markdown"
    language: str = "en"
    tables: int | None = None
    cells: int | None = None
    reasoning: int = 0

    def family_of(self, index: int) -> str:
        """Of the question of this number: families take turns where they are mixed."""
        return FAMILIES[index % len(FAMILIES)] if self.family == "mixed" else self.family

    @property
    def room(self) -> int:
        """Tokens of the answer."""
        return self.reasoning or ANSWER_ROOM


@dataclass(frozen=True)
class Candidate:
    """A question over tables that hold more rows than fit."""

    supply: Supply
    query: Query
    result: Result
    order: tuple[str, ...]
    """In which the tables are shown."""
    wishes: Wishes
    index: int

    @property
    def database(self) -> Database:
        return self.supply.database

    @cached_property
    def question(self) -> str:
        return "\n" + words(self.query, self.database, self.wishes.language)

    @cached_property
    def lines(self) -> dict[str, tuple[str, list[str]]]:
        return {table.name: serialise(table, self.wishes.serialisation) for table in self.database.tables}

    @cached_property
    def least(self) -> dict[str, set[int]]:
        """Rows that are shown in any case: those the answer needs, and a few of each table."""
        needed = self.result.needed
        found = {}
        for table in self.database.tables:
            own = set(needed.get(table.name, ()))
            spare = (i for i in range(len(table.rows)) if i not in own)
            found[table.name] = own | {i for i, _ in zip(spare, range(FEW - len(own)))}
        return found

    def wanted(self, rng: Random) -> list[tuple[str, int]]:
        """The other rows in the order in which they are taken: rows asked about, up to the cells wanted, then those that fill."""
        scanned = cells_needed(self.query, self.database)
        scale = min(1.0, self.supply.cells / scanned) if len(self.order) > len(self.query.tables) else 1.0
        first, last, beyond = list[tuple[str, int]](), list[tuple[str, int]](), list[tuple[str, int]]()
        for table in self.database.tables:
            rows = [(table.name, i) for i in range(len(table.rows)) if i not in self.least[table.name]]
            rng.shuffle(rows)
            if table.name not in self.query.tables:
                last += rows
                continue
            asked = max(0, round(scale * len(table.rows)) - len(self.least[table.name]))
            first += rows[:asked]
            beyond += rows[asked:]
        rng.shuffle(first)
        rng.shuffle(last)
        return first + last + beyond

    # -- as text

    def shown(self, rows: Rows) -> Database:
        """The tables as they are shown."""
        tables = (self.database.table(name) for name in self.order)
        return Database(tuple(table.of(table.rows[i] for i in rows[table.name]) for table in tables), self.database.links)

    def example(self, rows: Rows) -> Example:
        """The question over these rows, which must hold those needed."""
        language = LANGUAGES[self.wishes.language]
        text, spans, tables = language.intro, list[list[int]](), list[list[int]]()
        for name in self.order:
            head, lines = self.lines[name]
            start, needed = len(text), self.result.needed.get(name, ())
            pieces, at = [head], start + len(head)
            for i in rows[name]:
                if i in needed:
                    spans.append([at, at + len(lines[i]) - 1])
                pieces.append(lines[i])
                at += len(lines[i])
            text += "".join(pieces)
            tables.append([start, len(text) - 1])
            text += "\n"
        return self._example(text, spans, tables, self.shown(rows))

    def _example(self, text: str, spans: list[list[int]], tables: list[list[int]], shown: Database) -> Example:
        statement = sql(self.query)
        gold = rounded(select(shown, statement), self.query.decimals)
        listed = json.dumps(gold, ensure_ascii=False)
        at_once = not self.wishes.reasoning
        depths = [(a + b) / 2 / len(text) for a, b in spans]
        stop = [] if any("]" in str(value) for value in gold) else ["]"]
        meta = {"index": self.index, "family": self.query.family, "sql": statement, "gold": gold, "ordered": self.query.ordered,
                "decimals": self.query.decimals, "cells_needed": cells_needed(self.query, shown), "tables": len(shown.tables),
                "spans": spans, "documents": tables, "depths": depths, "depth": sum(depths) / len(depths) if depths else 0.0,
                "answer_text": listed if at_once else f"Answer: {listed}"}
        return Example(text.removesuffix("\n"), self.question, PREFIX if at_once else "", tuple(map(str, gold)), self.wishes.room,
                       meta | ({"stop": stop} if at_once else {}))


def candidates(key: Key, sources: Sequence[Source], wishes: Wishes, tokenizer: Any, preferred: int = 0) -> Iterator[Candidate]:
    """Fit questions, one draw of tables after the other."""
    family, costs = wishes.family_of(key.index), Costs(tokenizer, wishes.serialisation)
    room = max(0, key.length - wishes.room - QUESTION_ROOM)
    for number in range(TRIES):
        rng = key.rng(f"tables/{number}")
        found = supply(sources, family == "association", rng, costs, room, preferred=preferred, tables=wishes.tables,
                       cells=wishes.cells)
        for _ in range(QUESTIONS):
            query = draw(found.database, family, found.asked, rng)
            if query is None:
                continue
            result = run(found.database, query)
            if not unfit(query, result) and _has_room(result.values, wishes, tokenizer):
                order = [table.name for table in found.database.tables]
                yield Candidate(found, query, result, tuple(rng.sample(order, len(order))), wishes, key.index)
                break


def _has_room(values: list[Value], wishes: Wishes, tokenizer: Any) -> bool:
    return len(encode_continuation(tokenizer, json.dumps(values, ensure_ascii=False))) <= ANSWER_ROOM * 0.9


def draft(key: Key, sources: Sequence[Source], wishes: Wishes, tokenizer: Any, preferred: int = 0) -> Draft:
    """The example of a key: with no unit what it needs at least, with one unit all that fits.

    Raises:
        Refused: as `supply`; the tables give no question of this family.
    """
    queue = candidates(key, sources, wishes, tokenizer, preferred)
    waiting: list[Candidate] = []
    smallest: tuple[int, Example] | None = None
    for look, candidate in enumerate(islice(queue, LOOKS)):
        example = candidate.example(_sorted(candidate.least))
        length = total_length(example, tokenizer)
        if smallest is None or length < smallest[0]:
            smallest = (length, example)
        if _leaves_room(length, key.length):
            waiting.append(candidate)
            break
        if look >= LOOKS // 6 and smallest[0] > 2 * key.length:
            break  # far below what any question needs
    if smallest is None:
        raise Refused(f"{TRIES} draws of tables gave no {wishes.family_of(key.index)} question with a clear answer of ten values "
                      "at most; expected larger tables, or another family.")
    least = smallest[1]
    if not waiting:
        return Draft(lambda units: least, least=0, most=1)

    def rest() -> Iterator[Candidate]:
        yield from waiting
        yield from queue

    made: list[Example] = []

    def build(units: int) -> Example:
        if units and not made:
            made.append(filled(rest(), key, tokenizer).example)
        return made[0] if units else least

    return Draft(build, least=0, most=1)


def _leaves_room(length: int, wanted: int) -> bool:
    """Whether there is room for rows to choose from: `Task.floor` counts on as much."""
    return length + length // 20 + 4 <= wanted


@dataclass(frozen=True)
class Filled:
    """A question over the rows that are shown, and the tokens that prompt and answer take."""

    candidate: Candidate
    rows: Rows
    example: Example
    length: int


def filled(queue: Iterator[Candidate], key: Key, tokenizer: Any) -> Filled:
    """The first candidate that fits the length and stands verification.

    Raises:
        Refused: none does.
    """
    nearest = 0
    for number, candidate in enumerate(queue):
        rng = key.rng(f"rows/{number}")
        try:
            made = fill(candidate, key.length, tokenizer, rng)
        except TooLong:
            continue
        nearest = max(nearest, made.length)
        if made.length >= (1 - WITHIN) * key.length and not doubted(candidate.shown(made.rows), candidate.query, rng):
            return made
    raise Refused(f"tablelong at length {key.length}: the tables that were drawn fill {nearest} tokens, expected at least "
                  f"{math.ceil((1 - WITHIN) * key.length)}; ask for another length, or allow more tables.")


def fill(candidate: Candidate, length: int, tokenizer: Any, rng: Random) -> Filled:
    """Rows for a prompt of `length` tokens, answer included; the nearest below where none comes within `WITHIN`.

    Raises:
        TooLong: the rows that the answer needs take more; says both numbers.
    """
    example = candidate.example(_sorted(candidate.least))
    least = total_length(example, tokenizer)
    if least > length:
        raise TooLong(f"a target of {length} tokens: the rows that the answer needs take {least} with their tables and the "
                      f"question; expected at least {least}.")
    optional = candidate.wanted(rng)
    costs = Costs(tokenizer, candidate.wishes.serialisation).lines([candidate.lines[name][1][i] for name, i in optional])
    slack, budget = int(WITHIN * length / 2), length - least
    best = Filled(candidate, _sorted(candidate.least), example, least)
    for _ in range(CORRECTIONS):
        taken = choose(costs, budget, slack)
        rows = _sorted(_with(candidate.least, [optional[i] for i in taken]))
        example = candidate.example(rows)
        found = total_length(example, tokenizer)
        if best.length < found <= length:
            best = Filled(candidate, rows, example, found)
        if length - 2 * slack <= found <= length:
            break
        budget = length - least - (found - least - sum(costs[i] for i in taken))
    return best


def _with(rows: Mapping[str, set[int]], more: Sequence[tuple[str, int]]) -> dict[str, set[int]]:
    found = {name: set(own) for name, own in rows.items()}
    for name, i in more:
        found[name].add(i)
    return found


def _sorted(rows: Mapping[str, set[int]]) -> dict[str, list[int]]:
    return {name: sorted(own) for name, own in rows.items()}
