"""The page in a real browser, where Playwright and a Chromium are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.reporting.kept import kept_payload
from longspan.reporting.page import write_page

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKENS = [f" w{i}" if i % 11 else "\n" for i in range(200)] + ["</script>", " <b>&amp;", "\u200b"]
N = len(TOKENS)


@pytest.fixture(scope="module")
def masks() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random((5, 2, N)) < share for share in (0.2, 0.5)]


@pytest.fixture(scope="module")
def page(rows: list[Any], masks: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    kept = kept_payload(TOKENS, [("snapkv(budget=0.2)", masks[0]), ("full", masks[1])], spans=[("needle", 150, 154)])
    path: Path = write_page(tmp_path_factory.mktemp("page") / "page.html", rows, kept=kept)
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        found = browser.new_page(viewport={"width": 1300, "height": 900}, reduced_motion="reduce")
        found.problems, found.asked = [], []
        found.on("console", lambda message: found.problems.append(message.text))
        found.on("pageerror", lambda error: found.problems.append(str(error)))
        found.on("request", lambda request: found.asked.append(request.url))
        found.goto(path.as_uri())
        yield found
        browser.close()


def classes(page: Any, side: int) -> list[str]:
    return page.eval_on_selector_all(f".pane:nth-child({side + 1}) .text > span", "all => all.map((e) => e.className)")


def test_text_is_shown_faithfully(page: Any) -> None:
    for side in (0, 1):
        texts = page.locator(".pane .text").nth(side).evaluate("e => e.textContent")
        assert texts == "".join(TOKENS)


def test_colours_are_the_share_of_heads_that_keep_a_token(page: Any, masks: list[np.ndarray]) -> None:
    for side, mask in enumerate(masks):
        share = mask.mean(axis=(0, 1))
        found = [int(name.split()[0][1:]) for name in classes(page, side)]
        assert [level == 0 for level in found] == (share == 0).tolist()
        assert np.abs(np.array(found) / 10 - share).max() <= 0.1
    page.select_option("#layer", "3")
    page.select_option("#head", "1")
    for side, mask in enumerate(masks):
        assert [name.startswith("s10") for name in classes(page, side)] == mask[3, 1].tolist()
        assert f"{100 * mask[3, 1].mean():.1f}% kept" in page.locator(".pane .count").nth(side).inner_text()
    page.keyboard.press("]")
    assert page.input_value("#layer") == "4"
    page.keyboard.press("]")
    assert page.input_value("#layer") == "-1"
    page.select_option("#head", "-1")


def test_arrow_keys_walk_through_the_text_and_tell_who_keeps_a_token(page: Any, masks: list[np.ndarray]) -> None:
    page.locator(".pane .text").first.focus()
    page.keyboard.press("Home")
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    tip = page.locator("#tip").inner_text()
    assert "token 12\n" in tip
    assert f"snapkv(budget=0.2): kept by {int(masks[0][:, :, 12].sum())} of 10" in tip
    assert f"full: kept by {int(masks[1][:, :, 12].sum())} of 10" in tip
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_table_sorts_and_filters(page: Any, summary: list[Any]) -> None:
    page.locator("#table th button", has_text="cache").first.click()
    shown = page.eval_on_selector_all("#table tbody tr", "all => all.map((r) => +r.cells[7].dataset.key)")
    assert shown == sorted(line["cache_bytes"] for line in summary)
    page.select_option("#task", "niah")
    assert page.locator("#table tbody tr:visible").count() == 10
    page.select_option("#length", "4000")
    assert page.locator("#table tbody tr:visible").count() == 5
    page.select_option("#task", "")
    page.select_option("#length", "")


def test_a_recipe_can_be_taken_out_of_the_pictures(page: Any) -> None:
    assert page.locator(".plot").first.locator(".pt").count() == 5
    page.locator("#board .toggle").nth(1).click()
    assert page.locator(".plot").first.locator(".pt").count() == 4
    page.locator("#board .toggle").nth(1).press("Enter")
    assert page.locator(".plot").first.locator(".pt").count() == 5


def test_examples_filter_and_open(page: Any) -> None:
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    page.keyboard.type("ruler-vt")
    assert page.locator("#found").inner_text().startswith("16 of 48")
    page.locator(".ex summary").first.click()
    page.locator(".ex[open] tbody tr").first.wait_for()  # an opened example is filled by an event of its own
    assert page.locator(".ex[open] tbody tr").count() == 6
    page.fill("#find", "no such answer")
    assert "No example fits" in page.locator("#list").inner_text()
    page.fill("#find", "")


def test_theme_follows_the_system_and_the_button(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colour)
    assert light != dark
    page.locator("#theme").click()
    assert page.evaluate(colour) == light
    page.locator("#theme").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(colour) == dark


def test_narrow_screens_do_not_scroll_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.set_viewport_size({"width": 1300, "height": 900})


def test_nothing_went_wrong_and_nothing_was_loaded(page: Any) -> None:
    assert page.problems == []
    assert len(page.asked) == 1 and page.asked[0].startswith("file:")
