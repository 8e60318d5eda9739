"""What is kept of the sweeps that the planner is judged on."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import write_tiny_folder

from longspan.evaluation import read_parquet
from longspan.evaluation.sweeps import Grid, read_grid, sweep
from longspan.recipe import Recipe

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("planner_sweep", ROOT / "benchmarks" / "planner_sweep.py")
planner_sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planner_sweep)


def test_collected_rows_are_those_of_both_sweeps(tmp_path):
    model = str(write_tiny_folder(tmp_path / "tiny"))
    grid = Grid(("full", "knorm(budget=0.4)"), ("passkey",), (model,), lengths=(200,), seeds=(0, 1), examples=2, read_once=True)
    swept = sweep(grid, tmp_path / "quality").rows
    sweep(replace(grid, seeds=(0,)), tmp_path / "bytes")
    out = tmp_path / "small.parquet"
    assert planner_sweep.collect(tmp_path / "quality", tmp_path / "bytes", out) == 12
    kept = read_parquet(out)
    assert [r["part"] for r in kept] == 8 * ["quality"] + 4 * ["bytes"] and set(kept[0]) == {"part", *planner_sweep.COLUMNS}
    assert [r["answer_nll"] for r in kept[:8]] == [r["answer_nll"] for r in swept]


@pytest.mark.parametrize(("name", "part"), [("planner_grid", "quality"), ("planner_bytes", "bytes")])
def test_the_stored_rows_are_those_of_the_grids(name, part):
    grid = read_grid(ROOT / "docs" / "examples" / f"{name}.yaml")
    stored = [r for r in read_parquet(ROOT / "docs" / "data" / "planner_sweep.parquet") if r["part"] == part]
    cells = {(str(Recipe.parse(c.recipe)), c.task, c.length, c.seed) for c in grid.cells()}
    assert {(str(Recipe.parse(r["recipe"])), r["task"], r["length"], r["seed"]) for r in stored} == cells
    assert len(stored) == len(cells) * grid.examples
