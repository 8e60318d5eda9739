"""Context parallelism on processes of this machine: memory, bytes and time of Ulysses, untied Ulysses and a ring.

    python benchmarks/context_parallel.py [--quick] [--out docs/data/context_parallel.json]

The runs are those of `longspan reproduce upipe` (16 heads of 32, width 512, float32, 16 and 4 key heads) on two and four
processes at 1,024 and 4,096 tokens, forward and backward. From the times come the speeds of a core, by least squares, and
with them the table of a node of eight devices: what the model says for devices as slow as that core.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspan.experiments import upipe
from longspan.experiments.base import machine
from longspan.parallel.planner import LLAMA_3_8B, Node, table
from longspan.parallel.ring import RingAttention
from longspan.parallel.ulysses import Ulysses
from longspan.parallel.upipe import UPipe
from longspan.parallel.usp import USP
from longspan.reporting import human_bytes, human_seconds

LENGTHS, ROUNDS = (1024, 4096), {16: 3, 4: 3}
NODE = (Ulysses(), Ulysses(recompute=True), UPipe(U=8), UPipe(U=16), UPipe(U=32), RingAttention(),
        USP(inner=UPipe(U=4), ring=2))


def runs(lengths: tuple[int, ...], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    found = []
    for length in lengths:
        size = upipe.SIZES["small"] | {"length": length, "ranks": list(ranks), "rounds": ROUNDS, "lengths": []}
        found += upipe.gathered(size, lambda what, n=length: print(f"{n} tokens, {what}", flush=True))
    return [{name: value for name, value in row.items() if name != "checksum"} for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two processes and 1,024 tokens only")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--summarise", action="store_true", help="only make the table of eight devices again, from --out's runs")
    args = parser.parse_args()
    if args.summarise and not (args.out and args.out.exists()):
        parser.error("--summarise reads the runs in --out FILE, which isn't there")
    before: dict[str, Any] = {"machine": machine(), "cores": upipe.cores()}
    before |= json.loads(args.out.read_text(encoding="utf-8")) if args.summarise else {}
    rows = before["rows"] if args.summarise else runs(LENGTHS[:1], (2,)) if args.quick else runs(LENGTHS, (2, 4))
    speed, off = upipe.speed_of(rows, upipe.SIZES["small"], before["cores"])
    node = Node()
    planned = table(NODE, LLAMA_3_8B, node, speed=speed)
    show(rows, planned, node)
    if args.out:
        made = before | {"rows": rows, "speed_of_a_core": upipe.as_figures(speed, off), "node": asdict(node),
                         "eight_devices": planned}
        args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """The largest measured case, and the node of eight devices."""
    most = max(found["rows"], key=lambda r: (r["ranks"], r["length"]))
    lines = [f"{found['machine']}, {found['cores']} cores. {most['ranks']} processes, {most['length']:,} tokens, 16 query heads "
             "of 32, forward and backward.", "",
             "| method | key heads | exchange, elements | with the output | sent forward | sent backward | exchanges | time |",
             "| :-- | --: | --: | --: | --: | --: | --: | --: |"]
    for r in found["rows"]:
        if (r["ranks"], r["length"]) == (most["ranks"], most["length"]):
            lines.append(f"| `{r['method']}` | {r['kv_heads']} | {r['forward_elements']:,} | {r['forward_with_output']:,} | "
                         f"{human_bytes(r['forward_bytes'])} | {human_bytes(r['backward_bytes'])} | {r['forward_operations']} + "
                         f"{r['backward_operations']} | {human_seconds(r['seconds'])} |")
    node, planned = found["node"], found["eight_devices"]
    kept = "offloaded" if node["offload"] else "kept"
    lines += ["", f"{planned[0]['model']} on {node['devices']} devices of {human_bytes(node['memory'])}, activations of other "
              f"layers {kept}: an upper bound, since MLP, logits and a ring's running sums are left out.",
              "", f"| method | longest sequence | memory at {planned[0]['length']:,} tokens | sent forward |",
              "| :-- | --: | --: | --: |"]
    lines += [f"| `{r['method']}` | {r['longest']:,} | {r['memory_gib']:.1f} GiB | {human_bytes(r['forward_bytes'])} |"
              for r in planned]
    return "\n".join(lines)


def show(rows: list[dict[str, Any]], planned: list[dict[str, Any]], node: Node) -> None:
    print(f"{'P':>2} {'S':>6} {'Hkv':>3} {'method':24} {'exchange':>10} {'output':>10} {'MB sent':>8} {'ops':>4} {'s':>7} "
          f"{'error':>8}")
    for r in rows:
        sent, operations = (sum(r[f"{when}_{what}"] for when in ("forward", "backward")) for what in ("bytes", "operations"))
        print(f"{r['ranks']:2} {r['length']:6} {r['kv_heads']:3} {r['method']:24} {r['forward_elements']:10} "
              f"{r['forward_with_output']:10} {sent / 1e6:8.1f} {operations:4} {r['seconds']:7.3f} {r['gradient_error']:8.1e}")
    for row in planned:
        print(f"{row['model']} on {node.devices} x {node.memory >> 30} GiB, {row['method']:32} longest {row['longest']:10,} "
              f"tokens, at {row['length']:,}: {row['memory_gib']:.1f} GiB, {row['forward_bytes'] / 1e9:.2f} GB sent in forward")


if __name__ == "__main__":
    main()
