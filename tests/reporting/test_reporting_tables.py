from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from longspan.reporting.tables import (
    COLUMNS,
    cells,
    human_bytes,
    human_seconds,
    mark,
    markdown_table,
    oracle_table,
    ranked,
    standing,
    summary_table,
)

Line = dict[str, Any]


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (23_040_000, "22.0 MiB"),
        (64 * 2**20, "64.0 MiB"), (150 * 2**20, "150 MiB"), (2**30 - 1, "1.00 GiB"), (-2048, "-2.00 KiB"), (None, "–"),
    ],
)  # fmt: skip
def test_human_bytes(n: float | None, text: str) -> None:
    assert human_bytes(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [(0.0021, "2.1 ms"), (0.25, "250 ms"), (0.9996, "1.00 s"), (1.234, "1.23 s"), (56.78, "56.8 s"), (300, "300 s")],
)
def test_human_seconds(s: float, text: str) -> None:
    assert human_seconds(s) == text


def versus(difference: float | None, p_holm: float | None) -> Line:
    return {"vs_full": {"accuracy_difference": difference, "p_value": 0.01, "p_holm": p_holm}}


def test_marks_follow_the_corrected_p_value() -> None:
    assert mark(versus(-0.4, 0.01)) == "▼"
    assert mark(versus(0.4, 0.01)) == "▲"
    assert mark(versus(-0.4, 0.2)) == "·"
    assert mark(versus(None, None)) == ""
    assert mark({}) == ""


def test_marks_say_who_may_be_the_best_and_nothing_where_that_is_unknown() -> None:
    line = {"standing": {"accuracy": "best", "answer_nll": "may-be-best"}}
    assert (standing(line, "accuracy"), standing(line, "answer_nll")) == ("★", "≈")
    assert standing({"standing": {"accuracy": "worse", "answer_nll": None}}, "accuracy") == ""
    assert standing({}, "accuracy") == "" and ranked([{}, line]) and not ranked([{}])


def test_a_table_explains_its_marks_only_where_it_has_some(summary: list[Line]) -> None:
    found = {line["recipe"]: dict(zip(COLUMNS, cells(line))) for line in summary if line["task"] == "niah"}
    assert "★" not in found["full"]["accuracy"] and "≈" not in found["full"]["answer NLL"]
    for line in summary:
        assert ("≈" in cells(line)[4]) == ((line.get("standing") or {}).get("accuracy") == "may-be-best")
    assert any("≈" in texts["accuracy"] for texts in found.values())
    assert "≈ not told from the best" in str(summary_table(summary).caption)
    bare = [{name: value for name, value in line.items() if name != "standing"} for line in summary]
    assert "≈" not in str(summary_table(bare).caption) and not {"≈", "★"} & set(markdown_table(bare))


def test_cells_of_a_line(summary: list[Line]) -> None:
    line = next(found for found in summary if found["recipe"] == "snapkv(budget=0.2)")
    texts = dict(zip(COLUMNS, cells(line)))
    lo, hi = line["ci95"]
    assert texts["accuracy"].rstrip(" ≈★") == f"{100 * line['accuracy']:.0f}% [{100 * lo:.0f}, {100 * hi:.0f}]"
    assert texts["cache"] == human_bytes(line["cache_bytes"]) and texts["of full"] == "20%"
    assert texts["length"] == "1,000"
    missing = line | {"accuracy": None, "ci95": [None, None], "answer_nll": None, "cache_bytes": None, "vs_full": None}
    missing |= {"ttft_s": None, "tokens_per_s": None, "standing": None}
    assert set(cells(missing)[4:]) == {"–"}


@pytest.mark.parametrize("width", [80, 150])
def test_terminal_table_says_everything_in_80_columns(summary: list[Line], width: int) -> None:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(summary_table(summary, "SmolLM2"))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    # Nothing was cut off: the numbers of every line stand there whole.
    for line in summary:
        shown = dict(zip(COLUMNS, cells(line)))
        for column in ("accuracy", "answer NLL", "cache", "first token", "tokens/s"):
            assert shown[column] in text
    assert "…" not in text
    assert text.count("ruler-vt") == 2 and "before-question" in text.replace("\n", " ")


def test_brackets_in_names_are_no_markup(summary: list[Line]) -> None:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(summary_table([summary[0] | {"recipe": "odd[bold]x[/bold]"}]))
    assert "odd[bold]x[/bold]" in captured.get()


def test_markdown_table_is_regular_and_escaped(summary: list[Line]) -> None:
    lines = [summary[0], summary[6] | {"recipe": "a|b", "task": "*t*|<x>"}]
    text = markdown_table(lines).splitlines()
    assert len(text) == 4 and text[1].startswith("| :-- | :-- | --: |")
    assert {row.replace("\\|", "").count("|") for row in text} == {len(COLUMNS) + 1}
    assert "`a\\|b`" in text[3] and "\\*t\\*\\|\\<x>" in text[3]


def test_empty_summary() -> None:
    assert markdown_table([]).count("\n") == 2
    assert summary_table([]).row_count == 0


def test_the_oracle_table_shows_scores_and_only_where_a_reference_was_asked_for() -> None:
    line = {"task": "niah", "length": 1024, "compress": "before-question"}
    figures = {"mean": 0.5, "min": 0.25, "spread": 0.4, "jump": 0.125}
    agreed = {"name": "gt-ref", "recall": figures, "spearman": figures | {"jump": None}}
    lines = [line | {"recipe": "full", "oracle": None}, line | {"recipe": "snapkv(budget=0.2)", "oracle": agreed}]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(oracle_table(lines, title="gt-ref"))
    shown = [row.split() for row in console.export_text().splitlines()]
    assert ["snapkv(budget=0.2)", "0.500", "0.250", "0.125", "0.500", "0.250", "–"] in shown
    assert ["full", *"––––––"] in shown and ["niah", "·", "1,024"] in shown
    assert oracle_table([line | {"recipe": "full"}]) is None
