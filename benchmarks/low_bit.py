"""What SALE's selection costs beside the dense attention it is meant to save, on the same tensors in the same run.

    python benchmarks/low_bit.py [--quick] [--out FILE]

Shapes are the bundled model's: 9 query heads, 3 key heads, head dim 64, bfloat16. Parts of the selection: means and 4-bit
codes, exact attention over sink and local keys, the estimate of all other scores. The estimate leaves a block at its first
strong pair, so it is timed with a threshold that nothing reaches (every pair is looked at: the most it costs) and with one
that most blocks reach. Then the whole plan, and reading with it. Times are the best of several rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from longspan.experiments.timing import best_of
from longspan.kernels.block_sparse import block_sparse_attention
from longspan.prefill import ReadContext
from longspan.registry import get
from longspan.reporting import human_seconds

HEADS, KEY_HEADS, DIM = 9, 3, 64
GROUPS = ("per_thread", "per_token")
NOTHING, MUCH = 1e9, 0.05
"""Thresholds: one that no pair of random keys reaches, and one that some pair of most blocks does."""


def measure(length: int, groups: str, rounds: int) -> dict[str, Any]:
    """One row: seconds of every part, and the whole selection as a share of dense attention."""
    import longspan.prefill.sale as sale

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, length, DIM).bfloat16() for h in (HEADS, KEY_HEADS, KEY_HEADS))
    k_all, v_all = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))  # dense attention is not charged for this
    x = ReadContext(q, k, v, DIM**-0.5)
    made: Any = get("sale")
    least, most = (made(tau=tau, groups=groups) for tau in (NOTHING, MUCH))
    areas = least.areas(x)
    seen = sale.inspect(x, areas, groups=groups)
    plans = {tau: method.plan(x) for tau, method in ((NOTHING, least), (MUCH, most))}
    tau = {name: torch.full((HEADS,), value) for name, value in (("nothing", NOTHING), ("much", MUCH))}
    found = best_of(rounds, {
        "sdpa_s": lambda: F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True),
        "sink_local_s": lambda: sale.sink_local_lse(x, areas),
        "codes_and_sink_local_s": lambda: sale.inspect(x, areas, groups=groups),
        "estimate_nothing_chosen_s": lambda: seen.important(tau["nothing"]),
        "estimate_much_chosen_s": lambda: seen.important(tau["much"]),
        "plan_nothing_chosen_s": lambda: least.plan(x),
        "plan_much_chosen_s": lambda: most.plan(x),
        "read_nothing_chosen_s": lambda: block_sparse_attention(q, k, v, plans[NOTHING]),
        "read_much_chosen_s": lambda: block_sparse_attention(q, k, v, plans[MUCH]),
    })
    found["codes_s"] = found["codes_and_sink_local_s"] - found["sink_local_s"]
    shares = {f"selection_{name}_chosen_of_sdpa": found[f"plan_{name}_chosen_s"] / found["sdpa_s"] for name in tau}
    return {"length": length, "groups": groups, "density_nothing_chosen": plans[NOTHING].density,
            "density_much_chosen": plans[MUCH].density, **found, **shares}


def render(found: dict[str, Any]) -> str:
    """The costs of choosing, as shares of dense attention."""
    lines = ["| tokens | scales | dense | codes | sink and local | estimate | of dense, nothing chosen | of dense, most chosen |",
             "| --: | :-- | --: | --: | --: | --: | --: | --: |"]
    for r in found["rows"]:
        cells = [f"{r['length']:,}", r["groups"], human_seconds(r["sdpa_s"]), human_seconds(r["codes_s"]),
                 human_seconds(r["sink_local_s"]), human_seconds(r["estimate_nothing_chosen_s"]),
                 f"{r['selection_nothing_chosen_of_sdpa']:.1%}", f"{r['selection_much_chosen_of_sdpa']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return f"{found['threads']} threads, torch {found['torch']}.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,048 tokens only")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for length in (2048,) if args.quick else (8192, 16384):
        for groups in GROUPS:
            row = measure(length, groups, args.rounds if length < 16384 else max(2, args.rounds // 2))
            rows.append(row)
            print(", ".join(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in row.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows},
                                       indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
