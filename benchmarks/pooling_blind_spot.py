"""What mean pooling leaves of each rotary frequency: closed form, measured, and in the bundled model's own keys.

    python benchmarks/pooling_blind_spot.py [--tokens N] [--block N] [--out FILE]

Closed form and measurement are for content that stays the same within a block, for heads of 64 channels with base 1e5
(the bundled model's) and of 128 with base 1e6. In the model's keys content changes from token to token, so pooling
takes something of the slow frequencies too; shown is the root mean square of block means over that of tokens, over
every third layer and all heads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from prompt_selectors import captured

from longspan.experiments.pooling import blind_spot, left_by_pooling
from longspan.prefill.prism import Rotation

SHAPES = ((64, 1e5), (128, 1e6))


def measure(dim: int, base: float, block: int) -> dict[str, Any]:
    """The rows of one head size, its cut-off channel and the bands that follow from it."""
    rows = blind_spot(dim, base, block)
    fast = sum(row["theta"] * block > 2 * torch.pi for row in rows)
    dh, dl = Rotation(dim, "half", fast).band_sizes()
    return {"dim": dim, "base": base, "cut_off": 2 * fast, "dh": dh, "dl": dl, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    heads = [measure(dim, base, args.block) for dim, base in SHAPES]
    left = torch.stack([left_by_pooling(x.k, args.block) for x in captured(args.tokens, 3)]).square().mean(0).sqrt()
    for row, share in zip(heads[0]["rows"], left.tolist(), strict=True):
        row["keys"] = share
    for head in heads:
        print(f"{head['dim']} channels, base {head['base']:g}: cut-off at {head['cut_off']}, dh={head['dh']}, dl={head['dl']}")
        print(f"{'channel':>7} {'closed form':>11} {'measured':>9} {'model keys':>10}")
        for row in head["rows"]:
            print(f"{row['channel']:7d} {row['closed_form']:11.4f} {row['measured']:9.4f} {row.get('keys', float('nan')):10.4f}")
    if args.out:
        args.out.write_text(json.dumps({"block": args.block, "tokens": args.tokens, "model": "SmolLM2-135M-Instruct",
                                        "heads": heads}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
