"""The page of a sweep as a document, and the cells it is made of."""

from __future__ import annotations

import json
from dataclasses import astuple
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import write_tiny_folder

from longspan.commands.sweep import write_sweep_pages
from longspan.evaluation.statistics import summarise
from longspan.evaluation.sweeps import Folder, Grid
from longspan.registry import Refused
from longspan.reporting import sweeps

Row = dict[str, Any]


def of_model(rows: list[Row], name: str, seed: int = 0) -> list[Row]:
    return [row | {"model": name, "seed": seed} for row in rows]


class Data(HTMLParser):
    """The page's data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.inside = "", False
        self.feed(html)
        self.found: dict[str, Any] = json.loads(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "script" and dict(attrs).get("id") == "data"

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""


def test_views_are_what_summarise_says_of_one_model_and_seed(rows: list[Row]) -> None:
    harder = [row | {"score": row["score"] and float(row["score"]) / 2} for row in rows]
    both = of_model(rows, "a") + of_model(harder, "a", 1) + of_model(harder, "b")
    data = Data(sweeps.sweep_html(both)).found
    assert data["models"] == ["a", "b"] and data["seeds"] == [0, 1]
    names = [recipe["name"] for recipe in data["recipes"]]
    for model, seed, own in (("0", "", both[:480]), ("0", "1", both[240:480]), ("1", "0", both[480:])):
        for line in summarise(own, by=("recipe", "task", "length")):
            found = {names[p["recipe"]]: p for p in data["views"][f"{model}|{line['task']}|{line['length']}|{seed}"]}
            p = found[line["recipe"]]
            assert p["accuracy"] == pytest.approx(line["accuracy"], rel=1e-5) and p["n"] == line["n"]
            assert p["standing"] == line.get("standing")
            assert (p["vs"] is None) == ("vs_full" not in line)
            if p["vs"]:
                assert p["vs"]["p_holm"] == pytest.approx(line["vs_full"]["p_holm"], rel=1e-5)
        pooled = {line["recipe"]: line["standing"] for line in summarise(own, by=("recipe",)) if "standing" in line}
        assert {names[p["recipe"]]: p["standing"] for p in data["views"][f"{model}|||{seed}"] if p["standing"]} == pooled
    assert "1|||1" not in data["views"]  # b has no runs of seed 1
    assert {cell[0] for cell in data["cells"]} == {"finished"} and sum(cell[6] for cell in data["cells"]) == len(both)


def test_models_of_one_name_are_told_apart_by_their_weights(rows: list[Row]) -> None:
    two = [row | {"fingerprint": "f" * 64} for row in rows[:3]] + [row | {"fingerprint": "e" * 64} for row in rows[:3]]
    assert {row["model"] for row in sweeps.named_apart(two)} == {
        "SmolLM2-135M-Instruct (ffffffff)", "SmolLM2-135M-Instruct (eeeeeeee)"}
    assert sweeps.named_apart(rows[:5]) == rows[:5]


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="at least one result row"):
        sweeps.write_sweep(tmp_path / "x.html", [])


def test_cells_of_a_folder_are_told_with_their_reasons(rows: list[Row], tmp_path: Path) -> None:
    models = tuple(str(write_tiny_folder(tmp_path / place / "tiny", seed=seed)) for seed, place in enumerate(("one", "two")))
    grid = Grid(recipes=("full", "snapkv(budget=0.2)"), tasks=("niah",), models=models, lengths=(1000,), seeds=(0, 1), examples=8)
    folder = Folder.make(tmp_path / "sweep")
    folder.begin(grid)
    cells = list(grid.cells())
    assert len(cells) == 8
    for at, cell in enumerate(cells):
        if at in (0, 1, 4):  # model, seed and recipe: 0-0-full, 0-0-snapkv, 1-0-full
            own = [row for row in rows if (row["recipe"], row["task"], row["length"]) == (cell.recipe, "niah", 1000)]
            finger = str(models.index(cell.model or "")) * 64
            folder.finish(cell, {"rows": [row | {"model": "tiny", "fingerprint": finger} for row in own], "seconds": 1.0})
    folder.finish(cells[3], {"rows": [], "refused": "too small a budget.", "seconds": 1.0})
    folder.fail(cells[5], "RuntimeError: odd")
    found, states = sweeps.cells_of(folder.path)
    assert len(found) == 24 and {row["model"] for row in found} == {"tiny (00000000)", "tiny (11111111)"}
    assert " ".join(state.state for state in states) == "finished finished missing refused finished failed missing missing"
    assert astuple(states[0]) == ("finished", "tiny (00000000)", "full", "niah", 1000, 0, 8, "")
    assert (states[3].reason, states[5].reason) == ("too small a budget.", "RuntimeError: odd")
    assert states[5].model == "tiny (11111111)"
    write_sweep_pages(folder.path)
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert Data(page).found["cells"][3][0] == "refused" and "5 cells not there" in page
    assert list(json.loads((folder.path / "summary.json").read_text())) == ["tiny (00000000)", "tiny (11111111)"]
    assert not list(folder.path.glob("report-*.html"))
