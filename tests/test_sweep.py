"""The sweep's winners and its tables: right figures in the right cells, and no winner that chance could have made."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TASK = "ruler-niah-multikey-1"


def module(path, *folders):
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        spec = importlib.util.spec_from_file_location(f"tried_{path.stem}", path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found
    finally:
        del sys.path[: len(folders)]


sweep = module(ROOT / "benchmarks" / "cache_sweep.py")


def row(recipe, index, nll, score=1.0, length=1024):
    return {"model": "tiny", "recipe": recipe, "task": TASK, "length": length, "index": index, "seed": 0, "text_hash": "",
            "compress": "before-question", "score": score, "answer_nll": nll, "cache_bytes": 100, "full_cache_bytes": 1000,
            "ttft_s": None, "tokens_per_s": None, "achieved": "{}"}


@pytest.fixture
def rows():
    """`good` beats `bad` on every example by far and `close` by a hair that changes sides."""
    found = []
    for length in (1024, 2048):
        for i in range(8):
            found.append(row("full", i, 0.1, length=length))
            for budget in sweep.BUDGETS:
                found.append(row(f"good @ uniform(budget={budget})", i, 1.0 + 0.01 * i, length=length))
                near = 1.011 + 0.01 * i + (0.2 if i % 2 else -0.2)
                found.append(row(f"close @ lu-kv(budget={budget})", i, near, length=length))
                found.append(row(f"bad @ adakv(budget={budget})", i, 3.0 + 0.01 * i, 0.0, length=length))
    return found


def test_winners_are_named_with_those_that_cannot_be_told_from_them(rows):
    found = sweep.winners(rows)
    assert [w["budget"] for w in found] == list(sweep.BUDGETS)
    for w in found:
        assert w["winner"].startswith("good @ uniform") and w["n"] == 16 and w["recipes"] == 3
        assert [r.split(" ")[0] for r in w["not_told_apart"]] == ["close"]
        assert w["full_nll"] == pytest.approx(0.1)


def test_only_examples_that_every_recipe_has_count(rows):
    fewer = [r for r in rows if not (r["recipe"].startswith("close") and r["index"] == 7 and r["length"] == 2048)]
    assert {w["n"] for w in sweep.winners(fewer)} == {15}


def test_the_page_shows_the_figures(rows, tmp_path):
    (tmp_path / "data").mkdir()
    refused = {"recipe": "snapkv @ uniform(budget=0.05)", "length": 1024, "task": TASK, "refused": "too small."}
    stored = {"model": "tiny", "machine": "this one", **sweep.summary([*rows, refused])}
    (tmp_path / "data" / "cache_sweep.json").write_text(json.dumps(stored))
    page = module(ROOT / "docs" / "rendering" / "sweep.py", ROOT / "docs", ROOT)
    tables = page.tables(tmp_path)
    assert f"### `{TASK}` at 1,024 tokens" in tables and "### Refused" in tables and "too small." in tables
    assert "| `good` | uniform | 1.035 (100%) | 1.035 (100%) | 1.035 (100%) | 1.035 (100%) |" in tables
    assert "Full cache: 0.100 (100%); 8 examples." in tables
    winners = page.winners(tmp_path)
    assert winners.count("| `good @ uniform` |") == len(sweep.BUDGETS) and "`close @ lu-kv`" in winners
    assert list(page.pictures(tmp_path)) == [f"sweep-{TASK}.svg"]


def test_every_score_and_allocator_is_swept():
    texts = [str(r) for r in sweep.recipes()]
    assert texts[0] == "full" and len(texts) == len(set(texts)) == 1 + len(sweep.scores()) * 12
    assert any("h2o @ lu-kv(budget=0.05)" in t for t in texts)
