"""The page of a sweep in a real browser, where Playwright and a Chromium are installed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.reporting.sweeps import CellState, finished, write_sweep

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MODELS = ("SmolLM2-135M-Instruct", "Other & <b>model</b>")
ODD = "streaming(budget=0.2)"
REASON = "RuntimeError: <img src=x> out of memory (odd.py, line 3)"


def key(x: Any) -> tuple[Any, ...]:
    read = x.get if isinstance(x, dict) else lambda name: getattr(x, name)
    return tuple(read(name) for name in ("model", "recipe", "task", "length", "seed"))


@pytest.fixture(scope="module")
def swept(rows: list[Any]) -> tuple[list[Any], list[CellState]]:
    """Two models and two seeds; of the second model some cells were refused, one failed and two are missing."""
    every = [row | {"model": model, "seed": seed} for model in MODELS for seed in (0, 1) for row in rows]
    cells = []
    for cell in finished(every):
        if cell.model == MODELS[1] and cell.task == "ruler-vt" and cell.recipe == ODD:
            cell = replace(cell, state="refused", runs=0, reason="needs more than 1,000 tokens.")
        elif cell.model == MODELS[1] and cell.task == "niah" and cell.recipe == ODD and cell.seed == 1:
            state = "failed" if cell.length == 1000 else "missing"
            cell = replace(cell, state=state, runs=0, reason=REASON if state == "failed" else "")
        cells.append(cell)
    gone = {key(cell) for cell in cells if cell.state != "finished"}
    return [row for row in every if key(row) not in gone], cells


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        try:
            found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(swept: tuple[list[Any], list[CellState]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("page") / "sweep.html", *swept)


@pytest.fixture(scope="module")
def open_page(browser: Any) -> Any:
    def opened(file: Path, hash: str = "") -> Any:
        page = browser.new_page(viewport={"width": 1300, "height": 900}, reduced_motion="reduce")
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.goto(file.as_uri() + hash)
        return page
    return opened


@pytest.fixture
def page(open_page: Any, file: Path) -> Iterator[Any]:
    found = open_page(file)
    yield found
    assert found.problems == []
    found.close()


def rows_of(page: Any, axis: str) -> set[str]:
    return set(page.eval_on_selector_all("#table tbody tr", f"all => all.map((r) => r.dataset.{axis})"))


def picked(page: Any) -> str:
    return page.locator("#picked").inner_text()


def test_everything_is_there_at_first_and_every_picture_belongs_to_one_model(page: Any) -> None:
    assert picked(page) == "912 of 912 runs · 120 of 120 cells"
    assert page.locator("#table tbody tr").count() == 2 * 5 * 3 * 2 - 2
    assert page.locator("table.board:visible").count() == 2
    assert page.locator("#overview h3").all_inner_texts() == list(MODELS)
    assert page.locator(".plot:visible").count() == 8
    for plot in page.locator(".plot:visible").all()[:3]:
        assert plot.locator(".pt").count() == 5


def test_filters_combine_and_everything_follows(page: Any, swept: tuple[list[Any], list[CellState]]) -> None:
    rows = swept[0]
    page.select_option("#model", label=MODELS[0] + " (480)")
    page.select_option("#task", "niah")
    page.select_option("#seed", "1")
    found = [r for r in rows if (r["model"], r["task"], r["seed"]) == (MODELS[0], "niah", 1)]
    assert picked(page) == f"{len(found)} of {len(rows)} runs · 10 of 120 cells"
    assert page.locator("#table tbody tr").count() == 10
    assert rows_of(page, "model") == {"0"} and rows_of(page, "task") == {"niah"}
    assert page.locator("table.board:visible").count() == 1 and page.locator(".plot:visible").count() == 4
    assert {row.inner_text() for row in page.locator("#table tbody td:nth-child(5)").all()} == {"8"}
    assert page.locator("#found").inner_text().startswith("16 of ")
    page.select_option("#recipe", "1")
    assert rows_of(page, "recipe") == {"1"} and page.locator("#table tbody tr").count() == 2
    assert page.locator(".plot:visible").first.locator(".pt").count() == 1
    assert page.locator("#maps figure").count() == 1
    page.select_option("#length", "4000")
    assert page.locator("#table tbody tr").count() == 1
    page.locator("#clear").click()
    assert page.locator("#table tbody tr").count() == 58 and page.locator("#clear").is_hidden()


def test_options_say_how_many_runs_they_would_leave(page: Any) -> None:
    page.select_option("#task", "ruler-vt")
    page.select_option("#recipe", "1")
    models = page.locator("#model option").all_inner_texts()
    assert models == ["all", f"{MODELS[0]} (32)", f"{MODELS[1]} (0)"]
    assert page.locator("#seed option").all_inner_texts() == ["all", "0 (16)", "1 (16)"]
    page.select_option("#model", "1")
    assert "No run of this choice is finished." in page.locator("#table").inner_text()
    assert picked(page).startswith("0 of 912 runs · 4 of 120 cells")


def test_the_address_holds_the_view(page: Any, open_page: Any, file: Path) -> None:
    page.select_option("#model", "1")
    page.select_option("#length", "1000")
    page.locator("table.board:visible .toggle").nth(2).click()
    page.locator("nav a", has_text="Results").click()  # doesn't take the place of the filters
    hash = page.evaluate("location.hash")
    assert "length=1000" in hash and "off=snapkv" in hash
    other = open_page(file, hash)
    assert other.input_value("#model") == "1" and other.input_value("#length") == "1000"
    assert picked(other) == picked(page)
    assert other.locator("#table").inner_text() == page.locator("#table").inner_text()
    assert rows_of(other, "recipe") == {"0", "1", "3", "4"}
    other.evaluate("location.hash = '#length=4000&recipe=nobody&task=niah'")
    other.wait_for_function("document.getElementById('task').value === 'niah'")
    assert (other.input_value("#length"), other.input_value("#recipe"), other.input_value("#model")) == ("4000", "", "")
    assert other.locator("tr.off").count() == 0 and other.problems == []
    other.close()


def test_refused_and_failed_cells_are_told_with_their_reasons_and_follow_the_filters(page: Any) -> None:
    told = page.locator("#cell-counts").inner_text()
    assert "Of 120: 114 finished, 4 refused as declared, 1 failed at their latest try, 1 missing" in told
    kinds = page.eval_on_selector_all("#cell-table tbody tr", "all => all.map((r) => r.dataset.kind)")
    assert kinds == ["failed"] + ["refused"] * 4
    assert REASON in page.locator("#cell-table").inner_text() and page.locator("#cell-table img").count() == 0
    page.select_option("#task", "ruler-vt")
    assert page.locator("#cell-table tbody tr").count() == 4
    assert "Of the 40 chosen: 36 finished, 4 refused as declared, 0 missing" in page.locator("#cell-counts").inner_text()
    page.select_option("#model", "0")
    assert "None of the cells chosen" in page.locator("#cell-table").inner_text()


def test_the_table_sorts_by_what_it_shows(page: Any) -> None:
    for down in (False, True):
        page.locator("#table th button", has_text="accuracy").click()
        shown = [float(text.split("%")[0]) for text in page.locator("#table tbody td:nth-child(6)").all_inner_texts()]
        assert shown == sorted(shown, reverse=down) and len(set(shown)) > 5


def test_marks_of_the_best_are_shown_only_where_they_are_known(page: Any) -> None:
    page.select_option("#model", "0")
    marks = page.evaluate("D.views['0|||'].map((p) => (p.standing || {}).accuracy)")
    cells = page.locator("table.board:visible tbody td:nth-child(2)").all_inner_texts()
    for mark, text in zip(marks, cells, strict=True):
        assert ("★" in text, "≈" in text) == (mark == "best", mark == "may-be-best")
    assert "★" not in cells[0] and "≈" not in cells[0]  # the dense run takes no part


def test_narrow_screens_do_not_scroll_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_it_stays_quick_with_thousands_of_rows(rows: list[Any], open_page: Any, tmp_path: Path) -> None:
    many = [row | {"model": f"m{m}", "seed": seed, "index": row["index"] + 8 * more}
            for m in range(2) for seed in (0, 1) for more in range(15) for row in rows if row["task"] == "niah"]
    assert len(many) == 4800
    file = write_sweep(tmp_path / "many.html", many)
    assert file.stat().st_size < 3_000_000
    page = open_page(file)
    assert page.locator(".ex").count() <= 60  # pages of examples, not all of them
    start = time.perf_counter()
    page.select_option("#length", "4000")
    page.select_option("#model", "1")
    assert picked(page) == "1,200 of 4,800 runs · 10 of 40 cells"
    assert time.perf_counter() - start < 5
    assert page.problems == []
    page.close()
