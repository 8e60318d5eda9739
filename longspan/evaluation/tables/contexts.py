"""Which tables a context shows, and how many rows of each, so that it is as long as asked for.

A seed table is drawn, the tables that the question joins, those that the seed's foreign keys reach, then unrelated ones. More
rows are drawn than fit. Rows that the answer needs are shown; of the others so many that the text fills its length. What a row
takes is counted by its own tokens, and corrected by a count of the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from longspan.evaluation.base import tokenizer_memory
from longspan.evaluation.tables.pool import Database, Link, Source, Table, reached
from longspan.evaluation.tables.serialise import serialise
from longspan.registry import Refused

MOST_TABLES = 30
FEW = 2
"""Rows that every table shows at least, where it has them."""
LEAST_ASKED = 5
"""Rows that are drawn at least of a table that is asked about."""
SPARE = 1.2
"""Times the rows that fit, so that there is a choice."""
SHARES: Mapping[int, tuple[float, ...]] = {1: (1.0,), 2: (0.6, 0.4), 3: (0.5, 0.3, 0.2)}
"""Of the rows of joined tables, the seed first."""
USUAL_ROWS = 24


@dataclass(frozen=True)
class Costs:
    """Tokens of a table's lines in one serialisation."""

    tokenizer: Any
    form: str

    def of(self, table: Table) -> tuple[int, list[int]]:
        """Of its head, and of each row."""
        head, rows = serialise(table, self.form)
        first, *rest = self.lines([head + "\n", *rows])
        return first, rest

    def lines(self, lines: Sequence[str]) -> list[int]:
        """Of each line by itself."""
        if not lines:
            return []
        if getattr(self.tokenizer, "is_fast", False):
            return [len(ids) for ids in self.tokenizer(list(lines), add_special_tokens=False)["input_ids"]]
        return [len(self.tokenizer.encode(line, add_special_tokens=False)) for line in lines]

    def usual(self, source: Source) -> tuple[int, float]:
        """Of the head and of a row on average, from a few rows."""
        known, key = tokenizer_memory(self.tokenizer), ("table rows", self.form, source.identity)
        if key not in known:
            head, rows = self.of(source.take(USUAL_ROWS, Random(0), {}))
            known[key] = head, sum(rows) / max(1, len(rows))
        return known[key]


@dataclass(frozen=True)
class Supply:
    """Tables with more rows than fit: those asked about, and all the others, which only fill; and about how many cells the
    question should need."""

    database: Database
    asked: tuple[str, ...]
    cells: int


def supply(sources: Sequence[Source], association: bool, rng: Random, costs: Costs, room: int, *, preferred: int = 0,
           tables: int | None = None, cells: int | None = None) -> Supply:
    """Draw the tables of a context.

    Args:
        sources: all that there are; the first `preferred` of them are asked about, all if 0.
        association: whether the question joins tables.
        room: tokens for tables.
        tables: how many to show; drawn from what has room if left out.
        cells: about how many the question should need; drawn on a logarithmic scale if left out.

    Raises:
        Refused: no source, or none with a link for a question that joins.
    """
    if not sources:
        raise Refused("a question without a table; expected at least one.")
    asked = _asked(sources[:preferred] if preferred else sources, association, rng, tables)
    others = _others(sources, asked, preferred, rng)
    usual = {source.name: costs.usual(source) for source in sources}
    if tables is None:
        tables = _how_many(len(asked) + (cells is not None or _runs_out(asked, usual, room)), asked, usual, room, rng)
    shown = [*asked, *others[: max(0, tables - len(asked))]]
    counts, cells = _counts(asked, shown, usual, room, rng, cells)
    drawn: dict[str, Table] = {}
    for source in _parents_first(shown):
        drawn[source.name] = source.take(counts[source.name], rng, drawn)
    links = tuple(link for source in shown for link in source.links if link.parent in drawn)
    return Supply(Database(tuple(drawn[source.name] for source in shown), links), tuple(s.name for s in asked), cells)


def _asked(sources: Sequence[Source], association: bool, rng: Random, tables: int | None) -> list[Source]:
    """The seed, and the tables it is joined with: one or two that foreign keys lead to."""
    by_name = {source.name: source for source in sources}
    if not association:
        return [rng.choice(list(sources))]
    seeds = [source for source in sources if any(link.parent in by_name for link in source.links)]
    if not seeds:
        raise Refused(f"association over {', '.join(by_name)}: no column of one is a key of another; expected tables that share "
                      "a key column of one name, or family=retrieval.")
    found = [rng.choice(seeds)]
    for _ in range(min(2 if rng.random() < 0.4 else 1, (tables or MOST_TABLES) - 1)):
        left = by_name.keys() - {source.name for source in found}
        following = [link.parent for source in found for link in source.links if link.parent in left]
        found += [by_name[rng.choice(following)]] if following else []
    return found


def _others(sources: Sequence[Source], asked: Sequence[Source], preferred: int, rng: Random) -> list[Source]:
    """All other tables: what the seed's keys reach, then the preferred ones, then the rest, drawn."""
    names = [source.name for source in asked]
    links: list[Link] = [link for source in sources for link in source.links]
    near = [name for name in reached(links, names[0]) if name not in names]
    by_name = {source.name: source for source in sources}
    first, last = ([s for s in part if s.name not in (*names, *near)] for part in (sources[:preferred], sources[preferred:]))
    return [*(by_name[name] for name in near), *rng.sample(first, len(first)), *rng.sample(last, len(last))]


def _runs_out(asked: Sequence[Source], usual: Mapping[str, tuple[int, float]], room: int) -> bool:
    """Whether the tables asked about are too short to fill the room alone."""
    if any(source.most is None for source in asked):
        return False
    return sum(usual[s.name][0] + (s.most or 0) * usual[s.name][1] for s in asked) < SPARE * room


def _how_many(least: int, asked: Sequence[Source], usual: Mapping[str, tuple[int, float]], room: int, rng: Random) -> int:
    """A number of tables, on a logarithmic scale, that leaves half the room for rows."""
    head = sum(usual[source.name][0] for source in asked) / len(asked)
    row = sum(usual[source.name][1] for source in asked) / len(asked)
    most = max(least, min(MOST_TABLES, int(0.5 * room / (head + (FEW + 1) * row))))
    return log_uniform(least, most, rng)


def log_uniform(low: int, high: int, rng: Random) -> int:
    """A whole number from low to high whose logarithm is spread evenly."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _counts(asked: Sequence[Source], shown: Sequence[Source], usual: Mapping[str, tuple[int, float]], room: int, rng: Random,
            cells: int | None) -> tuple[dict[str, int], int]:
    """How many rows to draw of each table, and about how many cells the question should need."""
    free = max(0.0, room - sum(usual[source.name][0] + FEW * usual[source.name][1] for source in shown))
    fillers = [source for source in shown if source not in asked]
    shares = SHARES[len(asked)]
    row = sum(share * usual[source.name][1] for share, source in zip(shares, asked))
    fits = int(free / row)
    if cells is None:
        cells = log_uniform(2 * LEAST_ASKED, max(2 * LEAST_ASKED, 2 * fits), rng)
    total = min(fits, cells) if fillers else int(SPARE * fits) + FEW
    counts = {source.name: max(LEAST_ASKED, int(share * total)) for share, source in zip(shares, asked)}
    weights = [rng.expovariate(1.0) for _ in fillers]
    for weight, source in zip(weights, fillers):
        counts[source.name] = FEW + math.ceil(SPARE * free * weight / sum(weights) / usual[source.name][1])
    return counts, cells


def _parents_first(sources: Sequence[Source]) -> list[Source]:
    """In an order in which keys are there before they are referred to, where there is one."""
    left, found = list(sources), list[Source]()
    while left:
        waiting = {source.name for source in left}
        ready = [s for s in left if not any(k.parent in waiting and k.parent != s.name for k in s.links)] or left[:1]
        found += ready
        left = [source for source in left if source not in ready]
    return found


# ------------------------------------------------------------------------------------------------------ rows for a length


def choose(costs: Sequence[int], budget: int, slack: int) -> list[int]:
    """Which of some rows to take, the first ones first, so that they cost `budget` at most and `slack` less at the worst.

    What doesn't fit is passed over. If too much is left then, a row is exchanged for a costlier one until it isn't, or
    until no exchange helps.
    """
    taken, left = set[int](), budget
    for i, cost in enumerate(costs):
        if cost <= left:
            taken.add(i)
            left -= cost
    while left > slack:
        cheap = {costs[i]: i for i in sorted(taken)}
        dear = {costs[i]: i for i in range(len(costs)) if i not in taken}
        gains = [(d - c, c, d) for c in cheap for d in dear if 0 < d - c <= left]
        if not gains:
            break
        gain, c, d = max(gains)
        taken.remove(cheap[c])
        taken.add(dear[d])
        left -= gain
    return sorted(taken)
