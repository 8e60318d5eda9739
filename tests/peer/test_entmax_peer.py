"""α-entmax equals the PyPI package `entmax`, values and gradients; and the benchmark runs with and without it."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from longspan.kernels.entmax import entmax
from longspan.kernels.entmax_attention import entmax_attention

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "entmax.py"


def benchmark():
    spec = importlib.util.spec_from_file_location("entmax_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package():
    found = benchmark().peer()
    if found is None:
        pytest.skip("the package entmax is not installed")
    return found


def test_the_benchmark_says_when_the_package_is_missing(monkeypatch, capsys, tmp_path):
    module = benchmark()
    monkeypatch.setattr(module, "KEYS", 64)
    monkeypatch.setattr(module, "peer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["entmax.py", "--quick", "--out", str(tmp_path / "found.json")])
    module.main()
    assert module.NO_PEER in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["entmax"] is None and all(row["keys"] == 64 for row in found["rows"])
    assert [(row["alpha"], row["spread"]) for row in found["rows"]] == [(a, s) for a in module.ALPHAS for s in module.SPREADS]
    assert all(set(row["seconds"]) == {"longspan: forward", "longspan: both"} for row in found["rows"])


def test_the_benchmark_never_takes_itself_for_the_package(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    found = benchmark().peer()
    assert found is None or Path(found.__file__).resolve() != BENCHMARK


def test_the_benchmark_compares_results():
    module = benchmark()
    other = types.SimpleNamespace(entmax15=lambda x: entmax(x, 1.5) + 0.25, entmax_bisect=lambda x, alpha: entmax(x, alpha))
    row = module.measure(other, 1.5, 4, 1, keys=32)
    gaps = row["largest difference (probability, gradient)"]
    assert gaps["entmax15"] == [pytest.approx(0.25), 0.0] and gaps["entmax_bisect"] == [0.0, 0.0]
    assert set(row["times faster"]) == {f"{name}: {way}" for name in ("entmax15", "entmax_bisect") for way in ("forward", "both")}
    text = module.render({"threads": 1, "torch": "2", "entmax": "1.3", "rows": [row]})
    assert "| 1.5 | 1.0 | 4 | entmax15 |" in text and "2.5e-01" in text


@pytest.mark.peer
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("backend", ["reference", None])
def test_probabilities_and_gradients_equal_the_packages(alpha, backend):
    other = package()
    for n, size in ((7, 1.0), (300, 3.0), (4096, 1.0)):
        draw = torch.Generator().manual_seed(n)
        scores, grad = (torch.randn(16, n, generator=draw) * size).requires_grad_(), torch.randn(16, n, generator=draw)
        ours = entmax(scores, alpha, backend=backend)
        (gradient,) = torch.autograd.grad(ours, scores, grad)
        for name, function in benchmark().theirs(other, alpha).items():
            want = function(scores)
            torch.testing.assert_close(ours, want, atol=1e-5, rtol=0, msg=f"{name} {n}")
            torch.testing.assert_close(gradient, torch.autograd.grad(want, scores, grad)[0], atol=1e-5, rtol=0, msg=f"{name} {n}")


@pytest.mark.peer
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_attention_equals_attention_with_the_packages_weights(alpha):
    other = package()
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 200, 16, generator=draw).mul(size).requires_grad_() for size in (3.0, 1.0, 1.0)]
    grad = torch.randn(1, 2, 200, 16, generator=draw)
    hidden = torch.ones(200, 200, dtype=torch.bool).triu(1)
    for function in benchmark().theirs(other, alpha).values():
        scores = (given[0] @ given[1].mT / 4).masked_fill(hidden, -1e4)
        want, ours = function(scores) @ given[2], entmax_attention(*given, alpha)
        torch.testing.assert_close(ours, want, atol=1e-4, rtol=0)
        for have, expected in zip(torch.autograd.grad(ours, given, grad), torch.autograd.grad(want, given, grad)):
            torch.testing.assert_close(have, expected, atol=1e-4, rtol=1e-4)
