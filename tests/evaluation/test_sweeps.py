"""Sweeps: grids that are read and refused, cells and their keys, and runs that lose nothing when somebody is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import write_tiny_folder

from longspan import registry
from longspan.commands.sweep import at_work, by_reason
from longspan.evaluation import Request, parse_task, run
from longspan.evaluation.sweeps import Folder, Grid, cells, command, read_grid, read_status, state_of, sweep
from longspan.evaluation.sweeps.cells import bundles, run_bundle
from longspan.evaluation.sweeps.command import duration
from longspan.evaluation.sweeps.engines import ENGINES
from longspan.models import load
from longspan.recipe import Recipe
from longspan.registry import Refused

QUALITY = ("recipe", "task", "length", "seed", "index", "prediction", "score", "answer_nll", "cache_bytes", "prompt_tokens")
ODD = '''
import os, pathlib, signal
from longspan.cache import Score
from longspan.registry import method

@method("odd", kind="score", summary="Fails, or takes its process along, once or always.")
class Odd(Score):
    def score(self, *args, **kwargs):
        mark = pathlib.Path(MARK)
        if DEADLY and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("odd on purpose")
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def grid(model):
    return Grid(recipes=("full", "streaming-llm(budget=0.5)"), tasks=("passkey",), models=(model,), lengths=(192,), seeds=(0, 1),
                examples=1, max_new_tokens=2, dtype="float32")


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def as_yaml(grid):
    axes = {name: list(getattr(grid, name)) for name in ("models", "recipes", "tasks", "lengths", "seeds", "load")}
    return json.dumps(axes | {"examples": grid.examples, "max_new_tokens": grid.max_new_tokens, "dtype": grid.dtype})


# ---------------------------------------------------------------------------------------------------------------- grids


def test_a_grid_is_read(tmp_path, grid):
    assert read_grid(write(tmp_path / "grid.yaml", as_yaml(grid))) == grid
    short = read_grid(write(tmp_path / "short.yaml", "recipes: full\ntasks: [niah]\nlengths: 512\n"))
    assert short == Grid(("full",), ("niah",), lengths=(512,))


@pytest.mark.parametrize(("text", "said"), [
    ("recipes: [full]\n", "has no tasks"),
    ("recipes: [full]\ntasks: [niah]\nlenghts: [5]\n", "unknown entry 'lenghts'; did you mean 'lengths'"),
    ("recipes: [full]\ntasks: [niah]\nlengths: [0]\n", "lengths: 0: expected a whole number of at least 1"),
    ("recipes: [full, full]\ntasks: [niah]\n", "recipes: 'full' stands there twice; expected each once"),
    ('recipes: ["snapkv(budget=0.50)", "snapkv(budget=0.5)"]\ntasks: [niah]\n', "twice, as 'snapkv.budget=0.50.'; expected each"),
    ('recipes: [full]\ntasks: [niah, "niah()"]\n', "tasks: 'niah..' stands there twice, as 'niah'"),
    ("recipes: [full]\ntasks: [niah]\nlengths: ['300']\n", "lengths: '300': expected a whole number of at least 1, without"),
    ("recipes: [full]\ntasks: [niah]\ndtype: float99\n", "dtype: 'float99': expected float32, bfloat16 or float16"),
    ("recipes: [full]\ntasks: [niah]\ndtype: [float32]\n", "dtype: .'float32'.: expected float32"),
    ("recipes: [full]\ntasks: [niah]\nread_once: 'no'\n", "read_once: 'no': expected true or false, without quotes"),
    ("recipes: [full]\ntasks: [niah]\nload: nofile.py\n", "load: 'nofile.py': no such file"),
    ("recipes:\ntasks: [niah]\n", "recipes is empty; expected a list, such as recipes: .full."),
    ("recipes: [snapkv(budget=0.5, window=8)]\ntasks: [niah]\n", "text with brackets or commas goes in quotes"),
    ("recipes: [fulll]\ntasks: [niah]\n", "did you mean"),
    ("recipes: [full]\ntasks: [snapkv]\n", "expected a task"),
    ("recipes: []\ntasks: [niah]\n", "expected at least one"),
    ("recipes: [full\n", "is not YAML"),
    ("just text\n", "expected entries such as"),
    ("recipes: [{a: 1}]\ntasks: [niah]\n", "expected text, in quotes"),
    ("recipes: [full]\ntasks: [niah]\ncompress: later\n", "compress: 'later'"),
])  # fmt: skip
def test_what_cannot_be_swept_is_refused(tmp_path, text, said):
    with pytest.raises(Refused, match=said):
        read_grid(write(tmp_path / "grid.yaml", text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(Refused, match="no such file"):
        read_grid(tmp_path / "grid.yaml")
    with pytest.raises(Refused, match="no such folder"):
        read_status(tmp_path / "none")
    with pytest.raises(Refused, match="no sweep there"):
        read_status(tmp_path)


def test_a_key_says_all_that_decides_a_cell(grid, tmp_path):
    cell = next(iter(grid.cells()))
    changes = {"recipe": "snapkv(budget=0.3)", "task": "passkey(digits=4)", "length": 200, "seed": 5, "examples": 2,
               "compress": "after-question", "max_new_tokens": 3, "dtype": "bfloat16"}
    keys = {replace(cell, **{name: value}).key for name, value in changes.items()} | {cell.key}
    assert len(keys) == len(changes) + 1 and replace(cell).key == cell.key
    assert len({c.key for c in grid.cells()}) == 4


def test_time_as_people_say_it():
    assert [duration(s) for s in (3, 89, 600, 11_100)] == ["3 s", "89 s", "10 min", "3 h 05 min"]


# ----------------------------------------------------------------------------------------------------------------- runs


def test_rows_are_those_of_compare_and_nothing_is_run_twice(tmp_path, grid, model, monkeypatch):
    said = []
    state = sweep(grid, tmp_path / "out", progress=lambda *what: said.append(what))
    assert (state.finished, state.failed, state.missing, state.total) == (4, [], 0, 4)
    assert [s[:2] for s in said] == [(n, 4) for n in range(5)] and " left · " in said[-1][2]
    for seed in (0, 1):
        request = Request([Recipe.parse(r) for r in grid.recipes], [parse_task("passkey")], [192], 1, seed, max_new_tokens=2)
        want = run(load(model, dtype="float32"), request)
        got = [row for row in state.rows if row["seed"] == seed]
        assert [[r[n] for n in QUALITY] for r in got] == [[r[n] for n in QUALITY] for r in want]
    monkeypatch.setattr(command, "run_cells", lambda cells, *_: iter(()) if not cells else pytest.fail("run again"))
    assert sweep(grid, tmp_path / "out").rows == state.rows == read_status(tmp_path / "out").rows
    assert (tmp_path / "out/rows.parquet").is_file()


def test_a_declared_refusal_is_a_result_and_a_failure_is_tried_again(tmp_path, grid, monkeypatch):
    answers = {"full": {"refused": "not with this.", "rows": []}, grid.recipes[1]: {"failed": "RuntimeError: odd"}}
    tried = []

    def engine(cells, *_):
        tried.append(len(cells))
        return ((cell, answers[cell.recipe]) for cell in cells)

    monkeypatch.setattr(command, "run_cells", engine)
    state = sweep(grid, tmp_path)
    assert (state.finished, len(state.refused), len(state.failed), state.missing) == (2, 2, 2, 0)
    assert "streaming-llm(budget=0.5) · passkey · 192 tokens · seed 0" in state.failed[0][0] and "odd" in state.failed[0][1]
    answers[grid.recipes[1]] = {"rows": []}
    state = sweep(grid, tmp_path)
    assert tried == [4, 2] and (state.finished, state.failed) == (4, [])
    assert not list((tmp_path / "failed").iterdir())


def test_half_a_file_is_no_cell(tmp_path, grid):
    folder = Folder.make(tmp_path)
    cell = next(iter(grid.cells()))
    (tmp_path / "cells" / f".{cell.key}.json.123").write_text('{"rows": [')
    assert not folder.has(cell) and state_of(folder, grid).missing == 4


@pytest.mark.parametrize(("options", "said"), [
    ({"engine": "locl"}, "did you mean 'local'"), ({"workers": 0}, "at least 1"),
    ({"address": "auto"}, "--address auto: only a Ray cluster has one")])  # fmt: skip
def test_engines_that_cannot_be(tmp_path, grid, options, said):
    with pytest.raises(Refused, match=said):
        sweep(grid, tmp_path, **options)


def test_what_is_refused_leaves_no_trace(tmp_path, grid):
    sweep_of = tmp_path / "out"
    for change, options in (({"models": ("nowhere/m",)}, {}), ({}, {"engine": "locl"}), ({}, {"workers": 0})):
        with pytest.raises(Refused):
            sweep(replace(grid, **change), sweep_of, **options)
    assert not sweep_of.exists()


def test_reports_of_an_earlier_grid_do_not_stay(tmp_path, grid, monkeypatch):
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    monkeypatch.setattr(command, "run_cells", lambda cells, *_: ((cell, {"rows": [], "refused": "not so."}) for cell in cells))
    assert len(sweep(grid, tmp_path).refused) == 4 and not (tmp_path / "report.html").exists()
    assert by_reason(sweep(grid, tmp_path).refused) == {"not so.": [str(cell) for cell in grid.cells()]}


def test_two_runs_do_not_share_a_folder(tmp_path, grid, monkeypatch, capsys):
    seen = []

    def engine(cells, *_):
        for cell in cells:
            yield cell, {"rows": []}
            seen.append(read_status(tmp_path))
            with pytest.raises(Refused, match=f"another run is at work there .process {os.getpid()} on"):
                sweep(grid, tmp_path)

    monkeypatch.setattr(command, "run_cells", engine)
    sweep(grid, tmp_path)
    assert [(s.busy, s.finished, s.run.done, s.run.cells) for s in seen] == [(True, n, n, 4) for n in (1, 2, 3, 4)]
    assert seen[1].as_json()["seconds_left"] == seen[1].run.left >= 0
    assert "2 of 4 cells of this run done, " in at_work(seen[1].run)
    after = read_status(tmp_path)
    assert (after.busy, after.finished, after.as_json()["seconds_left"]) == (False, 4, None)


def test_examples_are_read_once_for_the_recipes_of_a_bundle(grid, monkeypatch):
    recipes = ("full", "streaming-llm(budget=0.5)", "xattention", "snapkv(budget=0.5)")
    once = replace(grid, read_once=True, recipes=recipes, seeds=(0,))
    plain, (together,) = list(once.cells()), bundles(once.cells())
    assert together == tuple(plain) and bundles(grid.cells()) == [(cell,) for cell in grid.cells()]
    assert [len(b) for b in bundles(replace(once, seeds=(0, 1)).cells())] == [4, 4]
    asked = []
    monkeypatch.setattr(cells, "run", lambda loaded, request: asked.append(len(request.recipes)) or run(loaded, request))
    found = run_bundle(tuple(c for c in together if c.recipe != "xattention"))
    alone = [run_bundle((cell,))[0] for cell in together]
    assert asked[0] == 3 and "changes how a context is read" in alone.pop(2)["refused"]
    assert [[[row[n] for n in ("score", "answer_nll", "cache_bytes")] for row in f["rows"]] for f in found] == \
        [[[row[n] for n in ("score", "answer_nll", "cache_bytes")] for row in a["rows"]] for a in alone]
    asked.clear()
    mixed = run_bundle(together)
    assert ["refused" in result for result in mixed] == [False, False, True, False] and asked == [3]


@pytest.mark.slow
def test_an_error_in_a_cell_is_its_own(tmp_path, grid, monkeypatch):
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    odd = write(tmp_path / "odd.py", ODD.replace("MARK", repr(str(tmp_path / "mark"))).replace("DEADLY", "False"))
    state = sweep(replace(grid, recipes=("full", "odd(budget=0.5)"), load=(str(odd),)), tmp_path / "out", workers=2)
    assert (state.finished, len(state.failed)) == (2, 2) and "RuntimeError: odd on purpose (odd.py, line" in state.failed[0][1]


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_nothing_along(tmp_path, grid, monkeypatch):
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    odd = write(tmp_path / "odd.py", ODD.replace("MARK", repr(str(tmp_path / "mark"))).replace("DEADLY", "True")
                .replace('raise RuntimeError("odd on purpose")', "return args[0].k.float().norm(dim=-1)"))
    state = sweep(replace(grid, recipes=("odd(budget=0.5)", "full"), load=(str(odd),)), tmp_path / "out")
    assert (tmp_path / "mark").exists() and (state.finished, state.failed) == (4, [])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_driver_that_is_killed_goes_on_where_it_was(tmp_path, grid, engine):
    if engine == "ray":
        pytest.importorskip("ray")
    file = write(tmp_path / "grid.yaml", as_yaml(replace(grid, seeds=tuple(range(12)))))
    words = [sys.executable, "-m", "longspan.cli", "sweep", str(file), "--out", str(tmp_path / "out"), "--json"]
    words += ["--engine", engine]
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    cells = tmp_path / "out" / "cells"
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as first:
        end = time.monotonic() + 120
        while len(list(cells.glob("[!.]*"))) < 3 and time.monotonic() < end and first.poll() is None:
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    before = {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in cells.glob("[!.]*")}
    assert 3 <= len(before) < 24 and all(json.loads(content) for _, content in before.values())
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["finished"], said["missing"], said["failed"]) == (0, 24, 0, [])
    assert {name: ((cells / name).stat().st_mtime_ns, (cells / name).read_bytes()) for name in before} == before
    assert (tmp_path / "out/report.html").is_file() and (tmp_path / "out/summary.json").is_file()
