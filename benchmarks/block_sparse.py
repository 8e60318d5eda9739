"""Block-sparse attention against PyTorch's dense causal attention, on the same tensors in the same run.

    python benchmarks/block_sparse.py [--quick] [--out FILE]

Shapes are the bundled model's: 9 query heads, 3 key heads, head dim 64. The plan of each head is random, with the sink
block and the diagonal always in it, cut to the asked density of the causal half. The limit is 1/density: what a kernel
as efficient per pair as dense attention would reach. Times are the best of several rounds that alternate the two.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.block_sparse_cpu import gathered
from longspan.kernels.plan import ReadPlan, forced_blocks, repeat_heads, visible_blocks

HEADS, KEY_HEADS, DIM = 9, 3, 64
BLOCK = 128


def random_plan(length: int, density: float, heads: int = HEADS, block: int = BLOCK, seed: int = 0) -> ReadPlan:
    """Sink and diagonal, and random visible blocks, different per head, up to `density` of the causal pairs."""
    draw = torch.rand(1, heads, *([-(-length // block)] * 2), generator=torch.Generator().manual_seed(seed))
    forced, seen = forced_blocks(length, length, block, block), visible_blocks(length, length, block, block)
    low, high, plan = 0.0, 1.0, None
    for _ in range(24):  # the share of random blocks that gives the density asked for
        middle = (low + high) / 2
        plan = ReadPlan.from_mask((draw < middle) & seen | forced, q_len=length, k_len=length, q_block=block,
                                  k_block=block)
        low, high = (middle, high) if plan.density < density else (low, middle)
    assert plan is not None
    return plan


def best_of(rounds: int, *runs: Callable[[], Any]) -> list[float]:
    """Best wall time of each run in seconds; the runs take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, seen in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            seen.append(time.perf_counter() - start)
    return [min(seen) for seen in times]


def measure(dtype: torch.dtype, length: int, density: float, rounds: int) -> dict[str, Any]:
    """One row: dense and sparse time, and how far the sparse output is from the definition on its own pairs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, length, DIM).to(dtype) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    k_all, v_all = repeat_heads(k, HEADS), repeat_heads(v, HEADS)  # dense attention is not charged for this
    plan = random_plan(length, density)
    scale = DIM**-0.5
    dense_s, sparse_s, torch_s = best_of(
        rounds,
        lambda: F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True),
        lambda: block_sparse_attention(q, k, v, plan),
        lambda: gathered(q, k, v, plan, scale, None),
    )
    last = plan.token_mask(length - 256, length)
    exact = F.scaled_dot_product_attention(q[:, :, -256:].float(), k_all.float(), v_all.float(), attn_mask=last)
    error = (block_sparse_attention(q, k, v, plan)[:, :, -256:].float() - exact).abs().max()
    return {"dtype": str(dtype).removeprefix("torch."), "length": length, "density_asked": density,
            "density": plan.density, "sdpa_s": dense_s, "ours_s": sparse_s, "speedup": dense_s / sparse_s,
            "pytorch_only_s": torch_s, "pytorch_only_speedup": dense_s / torch_s, "limit": 1 / plan.density,
            "max_error": float(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,024 and 2,048 tokens only")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lengths = (1024, 2048) if args.quick else (8192, 16384)
    densities = (0.3,) if args.quick else (0.1, 0.3)
    rows = []
    print(f"{'dtype':9} {'tokens':>6} {'density':>7} {'dense s':>8} {'sparse s':>8} {'speedup':>8} {'pytorch':>8} "
          f"{'limit':>6} {'error':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        for length in lengths:
            for density in densities:
                row = measure(dtype, length, density, args.rounds if length < 16384 else max(2, args.rounds // 2))
                rows.append(row)
                print(f"{row['dtype']:9} {length:6d} {row['density']:7.3f} {row['sdpa_s']:8.4f} {row['ours_s']:8.4f} "
                      f"{row['speedup']:7.1f}x {row['pytorch_only_speedup']:7.1f}x {row['limit']:5.1f}x "
                      f"{row['max_error']:8.1e}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows},
                                       indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
