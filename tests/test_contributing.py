"""CONTRIBUTING's walk-through, done as written: one file, no other edit, and the method is everywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from docs_pages import ROOT, shell_lines
from tiny_folder import write_tiny_folder

from longspan import registry

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCE = next(body for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "@method(" in body)
NAME = re.search(r'@method\("([\w-]+)"', SOURCE)[1]  # type: ignore[index]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """The file as a reader of the page would write it; what it registers is forgotten afterwards."""
    written = tmp_path_factory.mktemp("own") / "my_score.py"
    written.write_text(SOURCE, encoding="utf-8")
    held = registry._methods.pop(NAME, None)
    yield written
    registry._methods.pop(NAME, None)
    if held is not None:  # the whole run may have been given the example with --load
        registry._methods[NAME] = held
    sys.modules.pop("longspan_loaded_my_score", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def as_shown(command: str, file: Path) -> list[str]:
    """The words of the page's command, with our file in the place of the page's."""
    words = next(words for words in shell_lines(PAGE) if words[1] == command and "--load" in words)
    return [str(file) if word.endswith(".py") else word for word in words[1:]]


def test_the_name_is_unknown_without_the_file(call):
    known = NAME in {c.name for c in registry.cards()}
    if known:
        pytest.skip(f"the whole run was given {NAME} with --load")
    code, _, err = call("methods", NAME)
    assert code == 2 and f"unknown method '{NAME}'" in err


def test_methods_explains_it(call, file):
    code, out, err = call(*as_shown("methods", file))
    assert code == 0, err
    card = registry.card(NAME)
    assert NAME in out and card.paper in out and all(knob.name in out for knob in card.knobs)
    code, out, _ = call("methods", "--load", str(file), "--kind", card.kind, "--json")
    assert code == 0 and NAME in {row["name"] for row in json.loads(out)}


def test_compare_puts_it_into_table_pictures_and_page(call, file, folder, tmp_path):
    words = as_shown("compare", file)
    words[words.index("--out") + 1] = str(tmp_path / "out")
    recipe = next(word for word in words if word.startswith(f"{NAME}("))
    code, out, err = call(*words, "--model", str(folder), "--dtype", "float32", "--max-new-tokens", "3")
    assert code == 0, err
    assert NAME in out
    lines = json.loads((tmp_path / "out/summary.json").read_text())
    line = next(line for line in lines if line["recipe"] == recipe)
    assert line["n"] == 2 and "vs_full" in line
    assert line["achieved"]["kept_fraction"] == pytest.approx(0.3, abs=0.01) and line["achieved"]["compressions"] == 1
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    at = [r["name"] for r in data["recipes"]].index(recipe)
    assert data["views"] and all(at in {point["recipe"] for point in view} for view in data["views"].values())
    assert recipe in json.dumps(data["kept"])

    from longspan.reporting import pareto_svg, trade_off

    assert f"{NAME}(" in pareto_svg(lines) and recipe in trade_off(lines, "cache_bytes", "accuracy").to_json()


def test_what_the_page_says_about_refusals(file):
    from longspan.recipe import Recipe
    from longspan.registry import Refused

    registry.load_file(file)
    with pytest.raises(Refused, match="already weighs by the values"):
        Recipe.parse(f"criticalkv(base={NAME}())")
    with pytest.raises(Refused, match=r"window=0.*at least 1"):
        Recipe.parse(f"{NAME}(window=0)")
    assert Recipe.parse(f"{NAME}(window=8, budget=0.5)").cache is not None


def test_it_computes_what_the_paper_says(file):
    """Two query heads: mean attention times the value's L1 norm; sinks and window come first."""
    from longspan.cache import LayerContext

    registry.load_file(file)
    made = registry.get(NAME)(window=1, n_sink=1)  # type: ignore[call-arg]
    k = torch.tensor([0.0, 1.0, 3.0, 0.0]).view(1, 1, 4, 1)
    v = torch.tensor([[9.0, 9.0], [1.0, -3.0], [0.5, 0.5], [9.0, 9.0]]).view(1, 1, 4, 2)
    q = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    at = torch.arange(4).view(1, 1, 4)
    x = LayerContext(k, v, torch.ones(1, 1, 4, dtype=torch.bool), at, torch.tensor([4]), q,
                     torch.ones(1, 1, dtype=torch.bool), torch.tensor([[3]]), 1.0, 0, 1)  # fmt: skip
    scores = made.score(x)[0, 0]
    weights = torch.stack([torch.softmax(k[0, 0, :, 0] * a, 0) for a in (1.0, 2.0)]).mean(0)
    assert torch.allclose(scores[1:3], weights[1:3] * torch.tensor([4.0, 1.0]))
    assert scores[0] == scores[3] > scores[1:3].max() and made.protected(x) == 2


def test_the_grid_of_its_kind_runs_on_it(file):
    """The page's pytest line, with our file and one of the budgets: tests of the grid are collected for it, and pass."""
    line = next(line for line in PAGE.splitlines() if "pytest --load=" in line)
    words = [f"--load={file}" if word.startswith("--load=") else word for word in shlex.split(line)][1:]
    words[words.index("-k") + 1] += " and uniform"
    done = subprocess.run([sys.executable, *words, "-p", "no:cacheprovider", "-vv", "-x"], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = re.findall(rf"::\w+\[[^\]]*\b{NAME}\b[^\]]*\] PASSED", done.stdout)
    assert len(passed) >= 3, done.stdout[-3000:]
