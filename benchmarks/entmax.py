"""What α-entmax of rows costs, beside the PyPI package `entmax` on the same tensors in the same run.

    python benchmarks/entmax.py [--quick] [--rows 64 1024] [--out FILE]

Rows of 4,096 scores from a normal distribution, of spread 1 (a tenth of the scores or fewer can be in the support) and of spread
0.05 (most of them are). Ours is `longspan.kernels.entmax.entmax` (the C kernel where a compiler is
present). The package's exact functions sort (`entmax15`, `sparsemax`); `entmax_bisect` halves 50 times and takes any α. Times are
the best of several rounds that take turns; "both" is forward and backward. Results are compared too: the largest difference of
probabilities and of gradients. The package is only compared with; without it ours is timed alone.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.experiments.timing import best_of
from longspan.kernels.entmax import choose_backend, entmax
from longspan.kernels.entmax_cpu import entmax_forward
from longspan.reporting import human_seconds

KEYS = 4096
ALPHAS = (1.5, 2.0, 1.25)
SPREADS = (1.0, 0.05)
EXACT = {1.5: "entmax15", 2.0: "sparsemax"}
NO_PEER = "the package entmax is not installed; ours is timed alone."


def peer() -> Any:
    """The package, or None. This file has its name, so the folder of this file is not searched."""
    here, searched = Path(__file__).resolve().parent, sys.path[:]
    sys.path[:] = [entry for entry in searched if Path(entry or ".").resolve() != here]
    try:
        return importlib.import_module("entmax")
    except ImportError:
        return None
    finally:
        sys.path[:] = searched


def theirs(package: Any, alpha: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """The package's functions for this α."""
    found: dict[str, Callable[[Tensor], Tensor]] = {"entmax_bisect": lambda x: package.entmax_bisect(x, alpha)}
    return ({EXACT[alpha]: getattr(package, EXACT[alpha])} if alpha in EXACT else {}) | found


def measure(package: Any, alpha: float, n_rows: int, rounds: int, keys: int = KEYS, spread: float = 1.0) -> dict[str, Any]:
    """Seconds of every function, forward and both ways, how many times ours is faster, and the largest differences."""
    torch.manual_seed(0)
    scores, grad = torch.randn(n_rows, keys) * spread, torch.randn(n_rows, keys)
    leaf = scores.clone().requires_grad_()
    functions: dict[str, Callable[[Tensor], Tensor]] = {"longspan": lambda x: entmax(x, alpha)}
    if package is not None:
        functions |= theirs(package, alpha)

    def both(function: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        def run() -> tuple[Tensor, Tensor]:
            p = function(leaf)
            return p.detach(), torch.autograd.grad(p, leaf, grad)[0]
        return run

    results = {name: both(function)() for name, function in functions.items()}  # also compiles and warms up
    runs: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        runs |= {f"{name}: forward": lambda f=function: f(scores), f"{name}: both": both(function)}  # type: ignore[misc]
    seconds = best_of(rounds, runs)
    others = [name for name in functions if name != "longspan"]
    differences = {name: [float((a - b).abs().max()) for a, b in zip(results["longspan"], results[name])] for name in others}
    faster = {f"{name}: {way}": seconds[f"{name}: {way}"] / seconds[f"longspan: {way}"]
              for name in others for way in ("forward", "both")}
    backend = choose_backend(scores, alpha, None)
    steps = entmax_forward(scores, alpha)[1].float() if backend == "cpu" else torch.tensor([math.nan])
    return {"alpha": alpha, "spread": spread, "rows": n_rows, "keys": keys, "backend": backend, "seconds": seconds,
            "times faster": faster, "largest difference (probability, gradient)": differences, "mean steps": float(steps.mean())}


def render(found: dict[str, Any]) -> str:
    """One line for every function of the package."""
    lines = ["| α | spread | rows | package | its time | ours | times faster | forward alone | largest difference |",
             "| --: | --: | --: | :-- | --: | --: | --: | --: | --: |"]
    for row in found["rows"]:
        for name, gaps in row["largest difference (probability, gradient)"].items():
            seconds, faster = row["seconds"], row["times faster"]
            its, ours = (human_seconds(seconds[f"{who}: both"]) for who in (name, "longspan"))
            lines.append(f"| {row['alpha']} | {row['spread']} | {row['rows']:,} | {name} | {its} | {ours} | "
                         f"{faster[f'{name}: both']:.1f} | {faster[f'{name}: forward']:.1f} | {max(gaps):.1e} |")
    return f"{found['threads']} threads, torch {found['torch']}, entmax {found['entmax']}.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 rows only, one round")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    args = parser.parse_args()
    package = peer()
    try:
        found_version = version("entmax") if package is not None else None
    except PackageNotFoundError:
        found_version = getattr(package, "__version__", "unknown")
    if package is None:
        print(NO_PEER, flush=True)
    rows = []
    for alpha in ALPHAS:
        for spread, n_rows in itertools.product(SPREADS, [64] if args.quick else args.rows):
            rounds = 1 if args.quick else max(2, args.rounds if n_rows < 2048 else args.rounds // 2)
            rows.append(measure(package, alpha, n_rows, rounds, keys=KEYS, spread=spread))
            print(json.dumps(rows[-1]), flush=True)
    found = {"threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine(),
             "entmax": found_version, "rows": rows}
    print("\n" + render(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
