"""Do the few rows of a block that changed need all of the sparse budget?

Published: with as many tokens a query, letting only changed rows choose pages keeps more quality than Quest on all rows,
and loads about 1.5 times fewer keys, since fewer rows have fewer different wishes. Here a small model trained on bytes
denoises blocks of held-out text, one commit a step; every method is replayed on those token states at equal budgets. Taken
apart are which rows are active (those that moved, or any), the dense first step, and what movement is compared with. Then
one layer's attention with gathers is timed at a length where it matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.decoding.blocks import Denoising
from longspan.decoding.denoising.losa import LoSA, movement
from longspan.decoding.denoising.quest_rows import QuestRows
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.block_replay import (
    Seen,
    held_out_prefixes,
    layer_seconds,
    over_blocks,
    random_prefix,
    recorded,
    the_model,
    watched,
)
from longspan.registry import Refused

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"blocks": 1, "budgets": [16, 32], "keys": 512, "layer_budget": 64, "repeats": 1},
    "small": {"blocks": 42, "budgets": [8, 16, 32, 64], "keys": 32_768, "layer_budget": 512, "repeats": 5},
}
PAGE, JUDGED = 8, (16, 32)
DENSITY, RANDOM, NO_DENSE_FIRST, TOP_SHARE, TIMES_FASTER = 0.8, 1.3, 1.2, 0.8, 1.3
"""What the checks ask for: LoSA's density over Quest's at most; divergence with random rows, and without a dense first step,
over LoSA's at least; share of all movement in the five rows that moved most; Quest's time over LoSA's."""
SEED = 1
PROTOTYPE = {
    "quest": {"kl": (0.062, 0.033, 0.016, 0.0067), "density": (0.18, 0.30, 0.49, 0.72)},
    "losa, k=5": {"kl": (0.051, 0.029, 0.013, 0.0050), "density": (0.11, 0.20, 0.36, 0.60)},
    "losa, k=2": {"kl": (0.043, 0.023, 0.012, 0.0063), "density": (0.075, 0.14, 0.27, 0.50)},
    "five random rows": {"kl": (0.081, 0.050, 0.029, 0.018)}, "no dense first step": {"kl": (0.074, 0.042, 0.019, 0.0083)},
    "k=0": {"kl": 0.063}, "share of the five top rows": "0.96-1.00"}
"""What a plain prototype measured at budgets of 8, 16, 32 and 64 tokens."""


def variants(budget: int) -> dict[str, Denoising]:
    """What is compared at one budget."""
    return {
        "quest": QuestRows(budget=budget, page=PAGE),  # type: ignore[call-arg]
        "losa, k=5": LoSA(k=5, budget=budget, page=PAGE),  # type: ignore[call-arg]
        "losa, k=2": LoSA(k=2, budget=budget, page=PAGE),  # type: ignore[call-arg]
        "five random rows": LoSA(k=5, budget=budget, page=PAGE, active="random"),  # type: ignore[call-arg]
        "no dense first step": LoSA(k=5, budget=budget, page=PAGE, first="sparse"),  # type: ignore[call-arg]
        "compared with the previous step": LoSA(k=5, budget=budget, page=PAGE, ref="previous"),  # type: ignore[call-arg]
    }


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Replay every variant on the dense run's token states, and time one layer."""
    if scale == "paper":
        raise Refused("--scale paper: the paper's models (Trado, SDAR) and GPU kernels don't run here; expected small.")
    size, model = SIZES[scale], the_model(scale)
    progress("recording")
    blocks = [recorded(model, prefix) for prefix in held_out_prefixes(model, size["blocks"], SEED)]
    shares = top_shares([watched(model, block) for block in blocks], model.config.n_layers)
    table = [row | {"budget": 0} for row in over_blocks(model, {"k=0": LoSA(k=0, page=PAGE)}, blocks, progress)]  # type: ignore[call-arg]
    for budget in size["budgets"]:
        rows = over_blocks(model, variants(budget), blocks, lambda name, b=budget: progress(f"{name}, {b} tokens"))
        table += [row | {"budget": budget} for row in rows]
    progress("timing")
    quest, losa = timed(size["keys"], size["layer_budget"], size["repeats"])
    table.append({"method": "one layer", "keys": size["keys"], "budget": size["layer_budget"], "quest_ms": 1e3 * quest,
                  "losa_ms": 1e3 * losa})
    return judged(scale, table, shares, quest / losa)


def top_shares(seen: list[Seen], n_layers: int) -> list[float]:
    """For every layer the share of all rows' movement between neighbouring steps that the five top rows carry."""
    found = []
    for layer in range(n_layers):
        moves = [movement(b[layer], a[layer]) for s in seen for a, b in itertools.pairwise(s.queries)]
        found.append(float(np.mean([float(e.topk(5).values.sum() / e.sum()) for e in moves])))
    return found


def timed(keys: int, budget: int, repeats: int, rows: int = 16, heads: int = 8, kv_heads: int = 2,
          width: int = 64) -> tuple[float, float]:
    """Seconds of one layer's attention under Quest on all rows, and under LoSA with five active ones."""
    prefix, draw = random_prefix(keys, kv_heads, width, SEED), torch.Generator().manual_seed(SEED)
    q = torch.randn(1, heads, rows, width, generator=draw)
    k, v = (torch.randn(1, kv_heads, rows, width, generator=draw) for _ in range(2))

    def moved() -> Tensor:
        return q + 0.1 * torch.randn(q.shape, generator=draw)

    steps = [(moved(), k, v) for _ in range(4)]
    quest, losa = (layer_seconds(method.begin(prefix, rows, rows), steps, repeats)
                   for method in (QuestRows(budget=budget), LoSA(k=5, budget=budget)))  # type: ignore[call-arg]
    return quest, losa


def judged(scale: str, table: list[dict[str, Any]], shares: list[float], faster: float) -> Outcome:
    """The statements about the measurement."""
    rows = {(row["method"], row["budget"]): row for row in table}
    checks: dict[str, bool] = {}
    for budget in JUDGED:
        losa, quest = rows["losa, k=5", budget], rows["quest", budget]
        checks |= {
            f"{budget} tokens: LoSA diverges no more than Quest": losa["kl"] <= quest["kl"],
            f"{budget} tokens: LoSA's density is at most {DENSITY} of Quest's": losa["density"] <= DENSITY * quest["density"],
            f"{budget} tokens: random rows diverge at least {RANDOM} times as much":
                rows["five random rows", budget]["kl"] >= RANDOM * losa["kl"],
            f"{budget} tokens: without a dense first step at least {NO_DENSE_FIRST} times as much":
                rows["no dense first step", budget]["kl"] >= NO_DENSE_FIRST * losa["kl"]}
    checks[f"the five top rows carry at least {TOP_SHARE:.0%} of all movement in every layer"] = min(shares) >= TOP_SHARE
    checks[f"one layer: Quest takes at least {TIMES_FASTER} times as long"] = faster >= TIMES_FASTER
    budgets = sorted({row["budget"] for row in table if row["method"] == "quest"})
    measured: dict[str, Any] = {name: {"kl": [round(rows[name, b]["kl"], 4) for b in budgets],
                                       "density": [round(rows[name, b]["density"], 3) for b in budgets]} for name in variants(1)}
    measured |= {"k=0": {"kl": round(rows["k=0", 0]["kl"], 4)}, "share of the five top rows": [round(s, 3) for s in shares],
                 "one layer, times faster": round(faster, 2)}
    if scale == "smoke":
        verdict, reason = "mechanism-only", "a random model says nothing about how local changes are."
    else:
        verdict, reason = by_checks(checks)
    return Outcome(measured, PROTOTYPE, checks, verdict, reason, [SEED], table)


EXPERIMENT = Experiment(
    id="losa", system="losa", run=measure,
    claim="At equal budgets, letting only the rows that changed read chosen pages, and keeping the others' attention to the "
          "prefix, diverges less from dense denoising than Quest on all rows and loads fewer keys.",
)
