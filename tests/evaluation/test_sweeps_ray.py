"""Sweeps on Ray: the same rows as on this machine alone, with a node of a real cluster killed under way."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_folder import write_tiny_folder

from longspan import registry
from longspan.evaluation.sweeps import Folder, Grid, command, engines, read_status, sweep
from longspan.evaluation.sweeps.engines import at_once, attempt_elsewhere
from longspan.registry import Refused

QUALITY = ("recipe", "task", "length", "seed", "index", "prediction", "score", "answer_nll", "cache_bytes", "prompt_tokens")
OWN = """
from longspan.cache import Score
from longspan.registry import method

@method("by-norm", kind="score", summary="Long keys first.")
class ByNorm(Score):
    def score(self, x):
        return x.k.float().norm(dim=-1)
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    model, own = write_tiny_folder(folder / "tiny"), folder / "by_norm.py"
    own.write_text(OWN, encoding="utf-8")
    yield Grid(recipes=("full", "by-norm(budget=0.5)"), tasks=("passkey",), models=(str(model),), lengths=(192,),
                seeds=tuple(range(8)), examples=1, max_new_tokens=2, dtype="float32", load=(str(own),))
    registry._methods.pop("by-norm")


def test_files_travel_and_another_machine_must_be_the_same(grid, monkeypatch):
    cell = list(grid.cells())[1]
    key = cell.key
    others = {name: found for name, found in registry._methods.items() if name != "by-norm"}
    monkeypatch.setattr(registry, "_methods", others)  # as on a machine that has not seen the file
    data = cell.as_json() | {"load": ["nowhere/by_norm.py"]}
    files = {"nowhere/by_norm.py": OWN}
    first, second = (attempt_elsewhere([(data, key)], files) for _ in range(2))
    assert first[0]["rows"][0]["score"] == second[0]["rows"][0]["score"] and "failed" not in first[0]
    assert "another longspan, other weights or other libraries" in attempt_elsewhere([(data, "0" * 32)], files)[0]["failed"]
    assert "no such folder" in attempt_elsewhere([(data | {"model": "nowhere/tiny"}, key)], files)[0]["failed"]


def test_workers_hold_on_a_cluster_of_others_too():
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0})
    assert [at_once(ray, *asked) for asked in ((3, "auto"), (None, "auto"), (3, None))] == [3, 16, 16]


def test_without_ray(tmp_path, grid, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refused, match=r"needs the package ray; pip install longspan\[ray\]"):
        sweep(replace(grid, load=(), recipes=("full",)), tmp_path, "ray")


@pytest.fixture
def two_nodes():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster, second
    cluster.shutdown()


@pytest.mark.slow
def test_a_node_that_is_killed_takes_nothing_along(tmp_path, grid, two_nodes, monkeypatch):
    cluster, second = two_nodes
    alone = sweep(grid, tmp_path / "local")
    written, finish = [], Folder.finish

    def kill_after_three(folder, cell, result):
        finish(folder, cell, result)
        written.append(cell.key)
        if len(written) == 3:
            for process in second.all_processes["raylet"]:
                process.process.send_signal(signal.SIGKILL)

    monkeypatch.setattr(Folder, "finish", kill_after_three)
    state = sweep(grid, tmp_path / "ray", "ray", address=cluster.address)
    assert (state.finished, state.failed, state.missing) == (16, [], 0)
    assert sorted(written) == sorted({c.key for c in grid.cells()})
    assert [[row[n] for n in QUALITY] for row in state.rows] == [[row[n] for n in QUALITY] for row in alone.rows]
    monkeypatch.setattr(command, "run_cells", lambda cells, *_: iter(()) if not cells else pytest.fail("run again"))
    assert sweep(grid, tmp_path / "ray", "ray").rows == state.rows == read_status(tmp_path / "ray").rows


@pytest.mark.slow
def test_a_cluster_of_its_own_and_one_that_is_not_there(tmp_path, grid):
    pytest.importorskip("ray")
    state = sweep(replace(grid, seeds=(0, 1)), tmp_path / "own", "ray", workers=1)
    assert (state.finished, state.failed) == (4, [])
    with pytest.raises(Refused, match=r"--address 127\.0\.0\.1:1: no Ray cluster answers there"):
        list(engines.run_cells(list(grid.cells()), "ray", None, "127.0.0.1:1"))
