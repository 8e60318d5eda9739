"""How much true attention each selector keeps at which density, and what choosing costs.

    python benchmarks/prompt_selectors.py [--tokens N] [--layers STEP] [--out FILE]

Rotated queries and keys of every fifth layer of the bundled model, over English text that every Python carries. Recall
is the share of the true attention weight in the plan's pairs, over queries after the first 1,024 (a quarter of shorter
texts); the error is that of the layer's attention output, relative to its norm; seconds are for choosing only, next to
dense attention on the same tensors. Forced blocks count.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.plan import ReadPlan
from longspan.models import load
from longspan.prefill import ReadContext, Selector
from longspan.registry import get


def sweep() -> list[Selector]:
    """The settings that are compared."""
    def made(name: str, **knobs: Any) -> Selector:
        return get(name)(**knobs)  # type: ignore[return-value]

    return (
        [made("oracle-top-p", p=p) for p in (0.8, 0.9, 0.95)]
        + [made("mean-pool", density=d) for d in (0.1, 0.2, 0.3, 0.4)]
        + [made("mean-pool", p=p) for p in (0.8, 0.9, 0.95)]
        + [made("xattention", threshold=t) for t in (0.7, 0.8, 0.9)]
        + [made("flexprefill", gamma=g, min_budget=256) for g in (0.8, 0.9, 0.95)]
        + [made("vertical-slash"), made("vertical-slash", vertical=200, slash=200)]
        + [made("a-shape", window=w) for w in (128, 800)]
    )


def captured(tokens: int, step: int) -> list[ReadContext]:
    """Attention inputs of every `step`-th layer for the first `tokens` tokens of the text."""
    loaded = load(dtype=torch.float32)
    seen: list[ReadContext] = []

    def keep(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx % step == 0:
            seen.append(ReadContext(q, k, v, module.scaling, layer=module.layer_idx))
        return sdpa_attention_forward(module, q, k, v, None, **options)

    AttentionInterface.register("longspan_capture", keep)
    loaded.model.set_attn_implementation("longspan_capture")
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = loaded.tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens).input_ids
    with torch.no_grad():
        loaded.model.model(ids, use_cache=False)
    return seen


def measure(selector: Selector, layers: list[ReadContext], dense: list[Tensor]) -> dict[str, Any]:
    """Means over layers, heads and query rows."""
    density, recall, error, seconds = [], [], [], []
    for x, exact in zip(layers, dense, strict=True):
        start = time.perf_counter()
        plan = selector.plan(x)
        seconds.append(time.perf_counter() - start)
        out = block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale)
        density.append(plan.density)
        recall.append(float(plan.recall(x.q, x.k, scale=x.scale, first_row=min(1024, x.q_len // 4)).mean()))
        error.append(float((out - exact).norm() / exact.norm()))
    return {"selector": str(selector), "density": mean(density), "recall": mean(recall), "error": mean(error),
            "select_s": mean(seconds)}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=5, metavar="STEP", help="take every STEP-th layer")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    layers = captured(args.tokens, args.layers)
    full = ReadPlan.dense(q_len=args.tokens, k_len=args.tokens)
    start = time.perf_counter()
    dense = [block_sparse_attention(x.q, x.k, x.v, full, scale=x.scale) for x in layers]
    dense_s = (time.perf_counter() - start) / len(layers)
    rows = []
    print(f"{args.tokens} tokens, {len(layers)} layers, dense attention {dense_s:.3f} s a layer")
    print(f"{'selector':44} {'density':>7} {'recall':>7} {'error':>7} {'choose s':>8}")
    for selector in sweep():
        row = measure(selector, layers, dense)
        rows.append(row)
        print(f"{row['selector']:44} {row['density']:7.3f} {row['recall']:7.3f} {row['error']:7.3f} "
              f"{row['select_s']:8.4f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"tokens": args.tokens, "dense_s": dense_s, "rows": rows}, indent=1) + "\n",
                            encoding="utf-8")


if __name__ == "__main__":
    main()
