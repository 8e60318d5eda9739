"""Does plash's time double when the text doubles, and where does it pass softmax attention?

    python benchmarks/plash_scaling.py [--quick] [--out FILE]

One layer of the bundled model's shape (width 576, 9 query heads, 3 key heads, head dim 64) in float32 reads texts of 4,096, 8,192
and 16,384 tokens: the mixer plash with default knobs, the same without its bound, the same with sketches, and the mixer softmax,
which is PyTorch's fused attention between the same projections. Times are the best of several rounds that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from longspan.experiments.timing import best_of
from longspan.layers import Context
from longspan.registry import get
from longspan.reporting import human_seconds

SHAPE = (576, 9, 3, 64, 0, 1)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plash": ("plash", {}),
    "plash, no bound": ("plash", {"certificate": False}),
    "plash, sketches": ("plash", {"gate": 0.1}),
    "softmax": ("softmax", {}),
}
LEAST, MOST = 1.8, 2.3
"""A doubling of the text should cost a factor between these."""


@torch.inference_mode()
def measure(lengths: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Seconds of every way at every length, and the factor per doubling."""
    rope: Any = get("rope")
    modules: dict[str, Any] = {}
    for way, (name, knobs) in WAYS.items():
        made: Any = get(name)
        torch.manual_seed(0)
        modules[way] = made(**knobs).build(*SHAPE).eval()
    position = rope().build(*SHAPE)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        x = torch.randn(1, length, SHAPE[0], generator=torch.Generator().manual_seed(0))

        def read(module: Any, x: torch.Tensor = x) -> None:
            module(x, dataclasses.replace(Context.of(*x.shape[:2]), residual=x, position=position))

        found = best_of(rounds, {way: (lambda module=module: read(module)) for way, module in modules.items()})
        rows += [{"length": length, "way": way, "seconds": seconds} for way, seconds in found.items()]
    return rows


def factors(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of every way, the factors from each length to the next, per doubling."""
    found = {}
    for way in WAYS:
        own = [(row["length"], row["seconds"]) for row in rows if row["way"] == way]
        found[way] = [(after / before) ** (1 / torch.tensor(b / a).log2().item()) for (a, before), (b, after) in pairwise(own)]
    return found


def render(found: dict[str, Any]) -> str:
    """Times and factors as a table."""
    lengths = sorted({row["length"] for row in found["rows"]})
    lines = ["| layer | " + " | ".join(f"{length:,} tokens" for length in lengths) + " | factor per doubling |",
             "| :-- |" + " --: |" * (len(lengths) + 1)]
    for way in WAYS:
        times = [row["seconds"] for row in found["rows"] if row["way"] == way]
        per = ", ".join(f"{factor:.2f}" for factor in found["factors"][way])
        lines.append(f"| {way} | {' | '.join(map(human_seconds, times))} | {per} |")
    return f"{found['threads']} threads, torch {found['torch']}.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,024 and 2,048 tokens only")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = measure((1024, 2048) if args.quick else (4096, 8192, 16384), args.rounds)
    per = factors(rows)
    found = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows, "factors": per,
             "linear": all(LEAST <= factor <= MOST for factor in per["plash"])}
    print(render(found))
    print(f"\nplash: every factor between {LEAST} and {MOST}: {found['linear']}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
