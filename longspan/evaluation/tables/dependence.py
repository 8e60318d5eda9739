"""How statistical dependence falls with distance: text decays, tables recur at every multiple of the column count.

1. Cells become codes by rules that know no table: numbers fall into quantile bins of the whole corpus, all else is hashed
   (`Coding`); so are words (`word_codes`).
2. A table flattened row by row is a sequence of cells in which lag k m joins two cells of one of its m columns.
3. I(d) is the plug-in mutual information of the counts of (s_i, s_(i+d)) pooled over many sequences, Miller-Madow corrected
   (`information`, `profile_sequences`).
4. Columns are drawn anew for each table (`profile_tables`). Without that, pooling measures knowledge of which column a cell
   stands in, and all lags look alike.
5. A table's profile is told by its peak ratio and persistence, a text's by the exponent of C d^(-alpha) (`decay`).

Time is O(cells x lags), memory O(codes^2).
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from longspan.evaluation.tables.pool import FEWEST_ROWS, Value, type_of
from longspan.registry import Refused

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]
Rows = Sequence[Sequence[Value]]
Shuffle = Callable[[Codes, np.random.Generator], Codes]

BINS, CATEGORIES = 10, 64
"""Of numbers, and of everything else."""
FEWEST_PAIRS = 100
"""With fewer, a lag says nothing."""
CONTROLS, STANDARD_ERRORS = 20, 3.0
"""Shuffles that the text's control is made of, and how far above them a lag counts."""


# --------------------------------------------------------------------------------------------------------- the estimator


@dataclass(frozen=True)
class Profile:
    """I(d) in nats at some lags, NaN where there were fewer than 100 pairs."""

    lags: tuple[int, ...]
    information: tuple[float, ...]
    pairs: tuple[int, ...]
    period: int | None = None
    """The column count m of tables; None for text."""

    @property
    def peaks(self) -> list[float]:
        """I at the multiples of m, the nearest first."""
        return [value for lag, value in self._measured() if self.period and lag % self.period == 0]

    @property
    def others(self) -> list[float]:
        """I at all other lags."""
        return [value for lag, value in self._measured() if not self.period or lag % self.period]

    @property
    def peak_ratio(self) -> float:
        """Mean I(k m) / mean I(other). NaN without peaks or other lags (m = 1 has none); infinite where the others, corrected
        for bias, are 0 or less."""
        if not self.peaks or not self.others:
            return math.nan
        other = float(np.mean(self.others))
        return float(np.mean(self.peaks)) / other if other > 0 else math.inf

    @property
    def persistence(self) -> float:
        """Mean of the last two peaks / mean of the first two; the last / the first where there are two or three. NaN for one."""
        n = min(2, len(self.peaks) // 2)
        return float(np.mean(self.peaks[-n:]) / np.mean(self.peaks[:n])) if n else math.nan

    def _measured(self) -> list[tuple[int, float]]:
        return [(lag, value) for lag, value in zip(self.lags, self.information) if not math.isnan(value)]


def information(counts: NDArray[np.integer] | Floats) -> float:
    """Plug-in mutual information of a table of joint counts (K_a, K_b), in nats, Miller-Madow corrected: plus
    (K_a + K_b - K_ab - 1) / (2 N), where the K are the occupied categories. It may fall below 0.

    Raises:
        Refused: no count at all.
    """
    n = counts.sum()
    if not n > 0:
        raise Refused("mutual information of no pairs; expected at least one.")
    rows, columns = counts.sum(1), counts.sum(0)
    plug_in = entr(rows / n).sum() + entr(columns / n).sum() - entr(counts / n).sum()
    occupied = np.count_nonzero(rows) + np.count_nonzero(columns) - np.count_nonzero(counts)
    return float(plug_in + (occupied - 1) / (2 * n))


def profile_sequences(sequences: Iterable[Codes], lags: Sequence[int], size: int, period: int | None = None) -> Profile:
    """I at each lag, pooled over sequences; no pair crosses from one into the next.

    Args:
        sequences: (n,) codes in [0, size) each, of any lengths.
        lags: distances in cells or words.
        size: of the vocabulary of codes.
        period: the column count, where sequences are flattened tables.

    Raises:
        Refused: no sequence, no lag, an empty vocabulary, a code outside it, a lag below 1 or not below the longest length, a
            period below 1.
    """
    parts = [np.asarray(part, dtype=np.int64) for part in sequences]
    longest = max((len(part) for part in parts), default=0)
    if size < 1:
        raise Refused(f"a vocabulary of {size} codes; expected at least 1.")
    if not longest:
        raise Refused("no cells or words; expected at least one sequence that isn't empty.")
    if period is not None and period < 1:
        raise Refused(f"m = {period} columns; expected at least 1.")
    if not lags:
        raise Refused("no lags; expected at least one.")
    for lag in lags:
        if not 1 <= lag < longest:
            raise Refused(f"lag {lag}: expected at least 1 and less than the length, {longest}.")
    codes = np.concatenate(parts)
    if codes.min() < 0 or codes.max() >= size:
        raise Refused(f"code {codes.min() if codes.min() < 0 else codes.max()}: expected 0 to {size - 1}.")
    left = np.concatenate([np.arange(len(part) - 1, -1, -1) for part in parts])  # cells that follow within the sequence
    found, pairs = [], []
    for lag in lags:
        at = np.flatnonzero(left >= lag)
        pairs.append(len(at))
        if len(at) < FEWEST_PAIRS:
            found.append(math.nan)
            continue
        joint = np.bincount(codes[at] * size + codes[at + lag], minlength=size * size)
        found.append(information(joint.reshape(size, size)))
    if few := [lag for lag, n in zip(lags, pairs) if n < FEWEST_PAIRS]:
        warnings.warn(f"fewer than {FEWEST_PAIRS} pairs at lag {', '.join(map(str, few))}: no dependence is given there.",
                      stacklevel=2)
    return Profile(tuple(lags), tuple(found), tuple(pairs), period)


# ----------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Coding:
    """Cells as codes: the quantile bin of a number, then the hash of everything else (an empty cell too)."""

    edges: tuple[float, ...]
    """Between the bins."""
    categories: int = CATEGORIES

    def __post_init__(self) -> None:
        if self.categories < 1:
            raise Refused(f"{self.categories} categories for strings: expected at least 1.")

    @classmethod
    def fit(cls, tables: Iterable[Rows], bins: int = BINS, categories: int = CATEGORIES) -> Coding:
        """The bins of a corpus: as many of its numbers in each, as far as ties allow."""
        if bins < 1:
            raise Refused(f"{bins} bins for numbers: expected at least 1.")
        numbers = [n for table in tables for row in table for cell in row if (n := number(cell)) is not None]
        quantiles = np.linspace(0, 1, bins + 1)[1:-1]
        return cls(tuple(np.quantile(numbers, quantiles).tolist()) if numbers else (0.0,) * (bins - 1), categories)

    @property
    def size(self) -> int:
        return len(self.edges) + 1 + self.categories

    def codes(self, table: Rows) -> Codes:
        """A table's codes, (rows, columns).

        Raises:
            Refused: fewer than two rows, no column, a row of another length.
        """
        rows = [[self.code(cell) for cell in row] for row in table]
        for i, row in enumerate(rows, 1):
            if len(row) != len(rows[0]):
                raise Refused(f"row {i} has {len(row)} cells; expected {len(rows[0])}, as in the first.")
        return _grid(np.array(rows, dtype=np.int64))

    def code(self, cell: Value) -> int:
        found = number(cell)
        if found is not None:
            return int(np.searchsorted(self.edges, found, side="right"))
        return len(self.edges) + 1 + hashed("" if cell is None else str(cell), self.categories)


def number(cell: Value) -> float | None:
    """A cell's number, also where text writes it as the pool reads numbers; else None."""
    if isinstance(cell, str):
        return _written(cell)
    return None if cell is None or not math.isfinite(cell) else float(cell)


@lru_cache(maxsize=1 << 16)
def _written(cell: str) -> float | None:
    return float(cell) if type_of([cell.strip()]) in ("integer", "real") else None


@lru_cache(maxsize=1 << 16)
def hashed(text: str, categories: int) -> int:
    """A text's category, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % categories


def _grid(table: Codes) -> Codes:
    if table.ndim != 2 or not table.shape[1]:
        raise Refused(f"a table of shape {table.shape}: expected rows and columns.")
    if len(table) < FEWEST_ROWS:
        raise Refused(f"a table of {len(table)} rows; expected at least {FEWEST_ROWS}.")
    return table


def profile_tables(tables: Sequence[Codes], m: int, size: int, lags: Sequence[int] | None = None, draws: int = 6,
                     seed: int = 0, shuffle: Shuffle | None = None) -> Profile:
    """The profile of a corpus of tables: of each, `m` columns are drawn in random order, `draws` times.

    Args:
        tables: codes, (rows, columns) each, with at least `m` columns.
        m: columns drawn.
        size: of the vocabulary of codes.
        lags: 1 to 6 m if left out, no further than the last row of the longest table.
        draws: of columns, for each table.
        seed: of the draws.
        shuffle: what is done to a drawn table before it is flattened (`shuffle_rows`, `shuffle_cells`).

    Raises:
        Refused: no table, m or draws below 1, a table of fewer than two rows or m columns; and as `profile_sequences`.
    """
    if m < 1:
        raise Refused(f"m = {m} columns; expected at least 1.")
    if draws < 1:
        raise Refused(f"{draws} draws of columns; expected at least 1.")
    if not tables:
        raise Refused("no tables; expected at least one.")
    if (narrowest := min(_grid(table).shape[1] for table in tables)) < m:
        raise Refused(f"m = {m} columns of a table that has {narrowest}; expected at most {narrowest}.")
    rng = np.random.default_rng(seed)
    drawn = [table[:, rng.permutation(table.shape[1])[:m]] for table in tables for _ in range(draws)]
    if shuffle is not None:
        drawn = [shuffle(table, rng) for table in drawn]
    longest = max(len(table) for table in tables)
    return profile_sequences([table.ravel() for table in drawn], lags or range(1, min(6, longest - 1) * m + 1), size, m)


def shuffle_rows(table: Codes, rng: np.random.Generator) -> Codes:
    """Rows in random order: where rows are independent this changes no I(k m) in expectation; sorted ones lose what near
    rows share."""
    return rng.permutation(table, axis=0)


def shuffle_cells(table: Codes, rng: np.random.Generator) -> Codes:
    """The cells of each row in random order: flattens the profile."""
    return rng.permuted(table, axis=1)


def same_column(k: int, alpha: float) -> float:
    """I(k m) where each column of each table follows its own draw of Dirichlet(alpha 1_k); I is 0 at other lags.

    Two cells of a column agree with probability s = (alpha + 1) / (k alpha + 1), and
    I = s log(k s) + (1 - s) log(k (1 - s) / (k - 1)).
    """
    if k < 2 or not alpha > 0:
        raise Refused(f"{k} values with alpha {alpha}: expected at least 2, and alpha above 0.")
    s = (alpha + 1) / (k * alpha + 1)
    return s * math.log(k * s) + (1 - s) * math.log(k * (1 - s) / (k - 1))


# ------------------------------------------------------------------------------------------------------------------- text


class Decay(NamedTuple):
    """I(d) = scale d^(-alpha) above the control's mean, fitted over `lags`; NaN where fewer than two lags stand out."""

    alpha: float
    scale: float
    lags: tuple[int, ...]


def word_codes(text: str, categories: int = CATEGORIES) -> Codes:
    """The words of a text, in lower case, as hashed categories, (words,)."""
    if categories < 1:
        raise Refused(f"{categories} categories for words: expected at least 1.")
    return np.array([hashed(word, categories) for word in re.findall(r"\w+", text.lower())], dtype=np.int64)


def shuffled_control(sequences: Sequence[Codes], lags: Sequence[int], size: int, shuffles: int = CONTROLS, seed: int = 0
                     ) -> tuple[Floats, Floats]:
    """Mean and standard error of I at each lag where nothing depends on anything: the same codes in random order."""
    if shuffles < 2:
        raise Refused(f"{shuffles} shuffles: expected at least 2, for a standard error.")
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few pairs: the measurement itself warns once
        found = np.array([profile_sequences([rng.permutation(part) for part in sequences], lags, size).information
                          for _ in range(shuffles)])
    return found.mean(0), found.std(0, ddof=1)


def decay(profile: Profile, control: tuple[Floats, Floats]) -> Decay:
    """The exponent, by a straight line through log I over log d at the lags more than 3 standard errors above the control.

    The control's mean, what Miller and Madow's correction leaves of the bias, is taken off first: in a short text it is most of
    I, and being the same at all lags it would flatten the line.
    """
    above = np.array(profile.information) - control[0]
    used = [(lag, value) for lag, value, error in zip(profile.lags, above, control[1]) if value > STANDARD_ERRORS * error]
    if len(used) < 2:
        return Decay(math.nan, math.nan, tuple(lag for lag, _ in used))
    lags, values = zip(*used)
    slope, height = np.polyfit(np.log(lags), np.log(values), 1)
    return Decay(-float(slope), math.exp(float(height)), lags)
