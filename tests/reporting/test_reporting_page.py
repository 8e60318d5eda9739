from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.evaluation.statistics import summarise
from longspan.registry import Refused
from longspan.reporting import findings
from longspan.reporting.kept import kept_mask, kept_payload
from longspan.reporting.page import page_html, script_json, write_page

Row = dict[str, Any]
EVIL = ["</script><script>alert(1)</script>", "<!--", "]]>", "&lt;", "\"'`", "\u2028", "\ud83d", "\x00", "\n\n", " <b>"]


class Reader(HTMLParser):
    """The page as a browser splits it: elements with their attributes, and the text of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens = [f" word{i}" for i in range(40)] + EVIL
    masks = [rng.random((4, 2, 50)) < share for share in (0.3, 0.6)]
    return kept_payload(tokens, [("snapkv(budget=0.2)", masks[0]), ("full", masks[1])], spans=[("needle", 5, 9)])


@pytest.fixture(scope="module")
def html(rows: list[Row], kept: dict[str, Any]) -> str:
    return page_html(rows, kept=kept, meta={"command": "longspan compare <x>", "versions": {"Python": "3"}})


def test_nothing_is_loaded_from_anywhere(html: str) -> None:
    reader = Reader(html)
    for tag, attrs in reader.elements:
        assert tag not in ("iframe", "img", "object", "embed", "base")
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, name, value)
        assert not any(name.startswith("on") for name in attrs)
    policy = [a["content"] for tag, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and policy[0] is not None and policy[0].startswith("default-src 'none'")
    assert re.findall(r"https?://[^\s\"']*", html) == ["http://www.w3.org/2000/svg"]  # a name space, not an address
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", html)


def test_page_is_small_and_complete(html: str, rows: list[Row]) -> None:
    assert len(html.encode()) < 200_000
    found = Reader(html)
    ids = {attrs.get("id") for _, attrs in found.elements}
    assert {"overview", "pictures", "results", "needles", "kept", "examples", "run"} <= ids
    anchors = {attrs["href"][1:] for tag, attrs in found.elements if tag == "a" and attrs.get("href")}  # type: ignore[index]
    assert anchors <= ids
    for fact in ("SmolLM2-135M-Instruct", "pydoc_data.topics (9f2c41d07be1)", "longspan compare &lt;x&gt;", "Python 3"):
        assert fact in html
    assert "compressed before the question" in html and "240 runs" in html


def test_labels_name_every_control(html: str) -> None:
    depth = []
    for tag, attrs in Reader(html).elements:
        if tag in ("select", "input") and not attrs.get("aria-label"):
            depth.append(attrs.get("id"))
    assert all(re.search(rf'<label[^>]*>[^<]*<(select|input)[^>]*id="{found}"', html) for found in depth), depth


def test_dangerous_texts_stay_data(html: str, rows: list[Row], kept: dict[str, Any]) -> None:
    reader = Reader(html)
    assert "alert(1)" not in "".join(reader.scripts[1:])
    data = reader.data
    assert data["kept"][0]["tokens"] == kept["tokens"]
    assert (kept_mask(data["kept"][0], "full") == kept_mask(kept, "full")).all()
    hostile = [row | {"recipe": row["recipe"] + EVIL[0], "prediction": EVIL[0], "task": EVIL[0]} for row in rows[:60]]
    page = page_html(hostile, meta={EVIL[0]: EVIL[0], "title": EVIL[0]})
    again = Reader(page)
    assert len(again.scripts) == len(Reader(page_html(rows[:60])).scripts)
    assert not any("<script>alert" in script for script in again.scripts[1:])
    assert page.count("<script>alert(1)") == 0
    assert again.data["examples"][0]["runs"][0][1] == EVIL[0]


def test_script_json_round_trips_whatever_it_holds() -> None:
    value = {"a": EVIL, "n": [1.5, None, True]}
    text = script_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)
    text.encode("utf-8")
    with pytest.raises(ValueError):
        script_json(float("nan"))


def test_data_of_the_pictures(html: str, rows: list[Row], summary: list[Row]) -> None:
    data = Reader(html).data
    assert set(data["views"]) == {
        f"{t}|{n}" for t in ("", "niah", "ruler-vt", "kv-retrieval") for n in ("", "1000", "4000")
    }  # fmt: skip
    names = [recipe["name"] for recipe in data["recipes"]]
    for task, length in (("niah", 4000), ("ruler-vt", 1000)):
        for p in data["views"][f"{task}|{length}"]:
            (line,) = [
                x for x in summary
                if (x["recipe"], x["task"], x["length"]) == (names[p["recipe"]], task, length)
            ]  # fmt: skip
            assert p["accuracy"] == pytest.approx(line["accuracy"], rel=1e-5)
            assert [p["lo"], p["hi"]] == pytest.approx(line["ci95"], rel=1e-4, abs=1e-5)
            expected = line.get("vs_full")
            assert (p["vs"] is None) == (expected is None)
            if expected:
                assert p["vs"]["accuracy_difference"] == pytest.approx(expected["accuracy_difference"], abs=1e-5)
    pooled = {names[p["recipe"]]: p for p in data["views"]["|"]}
    assert pooled["snapkv(budget=0.2)"]["n"] == 48 and pooled["snapkv(budget=0.2)"]["vs"]["n"] == 48
    assert len(data["examples"]) == 48 and all(len(example["runs"]) == 5 for example in data["examples"])


def test_results_table_holds_every_line_and_its_sort_keys(html: str, summary: list[Row]) -> None:
    found = re.findall(r'<tr data-recipe="(\d+)" data-task="([^"]+)" data-length="(\d+)">', html)
    assert len(found) == len(summary)
    keys = [a["data-key"] for tag, a in Reader(html).elements if tag == "td" and "data-key" in a]
    assert len(keys) == 11 * len(summary)
    assert float(keys[7] or "nan") == summary[0]["cache_bytes"]


def test_sections_without_anything_to_show_are_left_out(rows: list[Row]) -> None:
    bare = [row | {"depth": None, "score": None} for row in rows if row["length"] == 1000 and row["task"] == "niah"]
    html = page_html(bare)
    ids = {attrs.get("id") for _, attrs in Reader(html).elements}
    assert not ids & {"needles", "kept", "task", "length"}
    assert {"overview", "pictures"} <= ids
    plots = [(a["data-x"], a["data-y"]) for tag, a in Reader(html).elements if a.get("class") == "plot"]
    assert plots == [("cache_bytes", "answer_nll"), ("ttft_s", "answer_nll")]


def test_page_is_written_and_refuses_what_it_cannot_show(tmp_path: Path, rows: list[Row]) -> None:
    path = write_page(tmp_path / "deep" / "page.html", rows[:30], summarise(rows[:30]))
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(Refused, match="at least one result row"):
        write_page(tmp_path / "none.html", [])


# ------------------------------------------------------------------------------------------------------------ headline


def overall(recipe: str, lo: float, share: float, difference: float = 0.0) -> Row:
    versus = {"accuracy_difference": difference, "all95": [lo, lo + 0.2], "n": 50}
    return {"recipe": recipe, "cache_bytes": int(1000 * share), "full_cache_bytes": 1000, "vs_full": versus}


def test_headline_names_the_smallest_cache_that_rules_the_loss_out() -> None:
    dense = {"recipe": "full", "cache_bytes": 1000, "full_cache_bytes": 1000}
    small, good, large = overall("s", -0.3, 0.1), overall("g", -0.05, 0.2, -0.01), overall("l", 0.0, 0.5)
    found = findings.headline([dense, large, small, good])
    assert found["recipe"] == "g"
    assert "20% of the dense cache" in found["text"] and "−1 points [−5, +15]" in found["text"]
    none = findings.headline([dense, small])
    assert none["recipe"] == "" and "no recipe is shown to stay within 10 points" in none["text"]
    assert "Add “full”" in findings.headline([small])["text"]
    assert "answer NLL" in findings.headline([dense, dense | {"recipe": "x"}])["text"]


def test_headline_names_others_of_the_same_size_and_says_that_it_holds_for_all() -> None:
    dense = {"recipe": "full", "cache_bytes": 1000, "full_cache_bytes": 1000}
    found = findings.headline([dense, overall("a", -0.05, 0.2), overall("b", 0.0, 0.2), overall("c", 0.0, 0.4)])
    assert found["recipe"] == "a" and found["text"].endswith("for all 3 recipes together. Of the same size: b.")
    assert findings.headline([dense, overall("a", -0.05, 0.2)])["text"].endswith("at 95% confidence.")


def test_intervals_of_the_headline_are_wider_the_more_recipes_there_are(rows: list[Row]) -> None:
    every = {line["recipe"]: line for line in findings.overall(rows)}
    for recipe in list(every)[1:]:
        line = every[recipe]
        assert line["vs_full"]["all95"][0] < line["vs_full"]["ci95"][0] < line["vs_full"]["ci95"][1] < line["vs_full"]["all95"][1]
        (alone,) = (x for x in findings.overall([r for r in rows if r["recipe"] in ("full", recipe)]) if x["recipe"] == recipe)
        assert alone["vs_full"]["all95"] == alone["vs_full"]["ci95"]


def test_provenance_lists_every_text_and_seed_once() -> None:
    rows = [
        {"model": "m", "task": "t", "length": 10, "index": i, "seed": i % 2, "compress": "after-question",
         "text_source": "s", "text_hash": f"h{i % 2}"} for i in range(4)
    ]  # fmt: skip
    found = dict(findings.provenance(rows, {"dtype": "bfloat16", "versions": {"torch": "2"}}))
    assert found["Text (hash)"] == "s (h0), s (h1)" and found["Seeds"] == "0, 1"
    assert found["Examples"] == "4 examples, 4 runs" and found["Dtype"] == "bfloat16" and found["Versions"] == "torch 2"
    assert "Python" in dict(findings.provenance(rows, None))["Versions"]


def test_long_predictions_are_cut_and_say_so() -> None:
    row = {"recipe": "x", "task": "t", "prediction": "a" * 1000, "answers": '["b", 7]', "score": 1.0}
    (found,) = findings.examples([row], ["x"])
    assert found["runs"][0][1].endswith("… (400 more characters)") and found["answers"] == ["b", "7"]


def test_answers_that_were_cut_short_are_told() -> None:
    row = {"new_tokens": 6, "max_new_tokens": 6, "answer_tokens": 8}
    said = findings.cut_short([row, row | {"answer_tokens": 6}, row | {"new_tokens": 3}, {}])
    assert said.startswith("1 of 4: at most 6 tokens were written") and findings.cut_short([row | {"answer_tokens": 5}]) == ""
