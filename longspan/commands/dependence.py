"""``longspan dependence``: how far apart cells of tables, or words of a text, still depend on each other."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.registry import Refused
from longspan.terminal import Json, read_text, show

if TYPE_CHECKING:
    from longspan.evaluation.tables import Profile

TABLE_DRAWS = 100
"""Fewest draws of columns over all tables: few of them would show which column a cell stands in."""


def dependence(
    files: Annotated[list[Path], typer.Argument(help="CSV files, profiled together as tables; all others, together as text.")],
    lags: Annotated[int | None, typer.Option(min=1, help="Longest lag; six times the columns for tables and 64 for text, if "
                                             "left out.")] = None,
    bins: Annotated[int, typer.Option(min=1, help="Quantile bins of numbers in tables.")] = 10,
    columns: Annotated[int | None, typer.Option(help="Columns drawn of each table; 5, or those of the narrowest, if left "
                                                "out.")] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of columns for each table; 6, or as many as give 100 in all, if left "
                                              "out.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of draws and of the shuffled control.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure how mutual information falls with distance: in tables it comes back at every multiple of the column count.

    Example: `longspan dependence results.csv prices.csv report.txt`
    """
    tables = [file for file in files if file.suffix.lower() == ".csv"]
    texts = [file for file in files if file.suffix.lower() != ".csv"]
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        found = {"tables": of_tables(tables, lags, bins, columns, draws, seed)} if tables else {}
        found |= {"text": of_texts(texts, lags, seed)} if texts else {}
    for note in noted:
        print(f"longspan: {note.message}", file=sys.stderr)
    if as_json:
        show(plain(found))
        return
    for kind, own in found.items():
        print_profile(kind, own)


def of_tables(files: Sequence[Path], lags: int | None, bins: int, columns: int | None, draws: int | None, seed: int
              ) -> dict[str, Any]:
    """The profile of CSV files together."""
    from longspan.evaluation.tables import Coding, profile_tables, read_csv

    rows = [read_csv(file).rows for file in files]
    m = min(5, *(len(table[0]) for table in rows)) if columns is None else columns
    each = max(6, math.ceil(TABLE_DRAWS / len(rows))) if draws is None else draws
    coding = Coding.fit(rows, bins)
    profile = profile_tables([coding.codes(table) for table in rows], m, coding.size, range(1, lags + 1) if lags else None,
                               each, seed)
    return {"files": len(files), "columns": m, "draws": each, "cells": sum(len(table) for table in rows) * m * each,
            **measured(profile), "peak_ratio": profile.peak_ratio, "persistence": profile.persistence}


def of_texts(files: Sequence[Path], lags: int | None, seed: int) -> dict[str, Any]:
    """The profile of text files together, at lags that double."""
    from longspan.evaluation.tables import decay, profile_sequences, shuffled_control, word_codes
    from longspan.evaluation.tables.dependence import CATEGORIES

    sequences = [word_codes(read_text(file)) for file in files]
    longest = max(len(words) for words in sequences)
    if longest < 2:
        raise Refused(f"{str(files[0])!r}: {longest} words; expected at least 2.")
    furthest = min(64, longest - 1) if lags is None else lags
    each = [1 << i for i in range(furthest.bit_length())]
    profile = profile_sequences(sequences, each, CATEGORIES)
    control = shuffled_control(sequences, each, CATEGORIES, seed=seed)
    fit = decay(profile, control)
    return {"files": len(files), "words": sum(map(len, sequences)), **measured(profile), "shuffled": control[0].tolist(),
            "alpha": fit.alpha, "fitted_lags": list(fit.lags)}


def measured(profile: Profile) -> dict[str, Any]:
    return {"lags": list(profile.lags), "information": list(profile.information), "pairs": list(profile.pairs)}


def plain(value: Any) -> Any:
    """The document with None for what was not measured, which JSON doesn't know."""
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    if isinstance(value, list):
        return [plain(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_profile(kind: str, found: dict[str, Any]) -> None:
    """Mutual information by lag, then what it comes to."""
    if kind == "tables":
        print(f"tables: {found['files']} files, {found['columns']} columns of each drawn {found['draws']} times; I in nats")
    else:
        print(f"text: {found['files']} files, {found['words']:,} words; I in nats, beside it that of shuffled words")
    for i, (lag, value) in enumerate(zip(found["lags"], found["information"])):
        beside = figure(found["shuffled"][i]) if kind == "text" else "same column" if lag % found["columns"] == 0 else ""
        print(f"{lag:6d}  {figure(value)}  {beside}".rstrip())
    if kind == "tables":
        print(f"peak ratio {figure(found['peak_ratio'])}, persistence {figure(found['persistence'])}")
    else:
        where = ", ".join(map(str, found["fitted_lags"])) or "none"
        print(f"alpha {figure(found['alpha'])} (lags above the shuffled control: {where})")


def figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
