"""Does a 4-bit estimate of all scores choose key blocks as well as exact scores, and better than block means?

Rotated queries, keys and values of every fifth layer over one window of English are noted once. For every threshold the
blocks that SALE reads are compared with those it would read with exact scores: density, and the error of the attention
output of later rows. At one threshold, block means choose as many blocks in every row, and sink and local area stand alone.
Then thresholds are calibrated on one key-value prompt, and what follows the window is predicted under them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.context import Context
from longspan.evaluation.texts import load_text
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.noted import noted
from longspan.kernels import ReadPlan, block_sparse_attention
from longspan.kernels.plan import visible_blocks
from longspan.models import Loaded, load, profiles
from longspan.models.profiles import Profile
from longspan.prefill import ReadContext
from longspan.prefill.base import dense_plan, keep_top_k, pooled
from longspan.prefill.sale import Areas, Sale, inspect
from longspan.prefill.sale_calibration import texts, train
from longspan.recipe import Recipe
from longspan.registry import Refused

TAUS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
JUDGED = 0.004
"""The threshold at which other ways of choosing are compared."""
MOST_DENSITY_GAP, MOST_ERROR_GAP, MOST_OF_MEAN_POOL, MOST_NLL_GAP = 0.03, 0.005, 0.6, 0.05
PROTOTYPE: dict[str, dict[float, tuple[float, float]]] = {
    "int4": {0.0005: (0.80, 0.001), 0.002: (0.65, 0.007), 0.004: (0.57, 0.013), 0.016: (0.37, 0.044)},
    "exact": {0.0005: (0.79, 0.002), 0.002: (0.64, 0.007), 0.004: (0.56, 0.014), 0.016: (0.36, 0.046)},
}
"""(density, error) of the plain prototype that the specification reports."""
MEAN_POOL_ERROR, SINK_LOCAL = 0.034, (0.11, 0.33)
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"tokens": 384, "layers": (5,), "first_row": 320, "prompt": 384, "following": 8},
    "small": {"tokens": 4096, "layers": (0, 5, 10, 15, 20, 25), "first_row": 512, "prompt": 4096, "following": 128},
}
SEED = 0


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Compare choices of blocks on noted layers, then predict what follows under calibrated thresholds."""
    if scale == "paper":
        raise Refused("sale at paper scale needs Llama-3.1-8B at 64K tokens and more, and GPUs with 4-bit tensor cores; "
                      "expected smoke or small.")
    size, loaded = SIZES[scale], load(dtype="float32")
    ids = loaded.tokenizer(load_text("pydoc").text[: 12 * size["tokens"]], add_special_tokens=False)["input_ids"]
    window, following = ids[: size["tokens"]], ids[size["tokens"] :][: size["following"]]
    table: list[dict[str, Any]] = []
    for layer, x in noted(loaded.model, window, size["layers"]).items():
        progress(f"layer {layer}")
        table += [{"layer": layer} | row for row in choices(x, size["first_row"])]
    nll = predicted(loaded, window, following, size["prompt"], progress)
    return judged(scale, table, nll)


def written(text: str) -> Sale:
    """The method as it is written in a recipe."""
    method = Recipe.parse(text).selector
    assert isinstance(method, Sale)
    return method


# ----------------------------------------------------------------------------------------------------- choices of blocks


@torch.inference_mode()
def choices(x: ReadContext, first_row: int) -> list[dict[str, Any]]:
    """Density and error of every way of choosing blocks in one layer, means over its heads."""
    areas = written(f"sale(tau={JUDGED})").areas(x)
    dense = block_sparse_attention(x.q, x.k, x.v, dense_plan(x, 128), scale=x.scale)
    visible = visible_blocks(x.q_len, x.k_len, areas.q_block, areas.k_block, device=x.q.device)

    def row(way: str, tau: float | None, middle: Bool[Tensor, "B H NQ NK"]) -> dict[str, Any]:
        chosen = (areas.sink_local[:, None] | middle) & visible
        plan = ReadPlan.from_mask(chosen, q_len=x.q_len, k_len=x.k_len, q_block=areas.q_block, k_block=areas.k_block)
        out = block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale)
        off, whole = ((t[:, :, first_row:]).flatten(2).norm(dim=-1) for t in (out - dense, dense))
        density = chosen.sum((-2, -1)) / visible.sum()
        return {"way": way, "tau": tau, "density": float(density.mean()), "error": float((off / whole).mean())}

    largest = {way: inspect(x, areas, estimate=way).largest_ras() for way in ("int4", "exact")}
    rows = [row(way, tau, ras > tau) for way, ras in largest.items() for tau in TAUS]
    same_size = mean_pooled(x, areas, (largest["int4"] > JUDGED).sum(-1))
    return [*rows, row("mean-pool", JUDGED, same_size), row("sink and local", None, torch.zeros_like(same_size))]


def mean_pooled(x: ReadContext, areas: Areas, count: Tensor) -> Bool[Tensor, "B H NQ NK"]:
    """The `count` middle blocks of every row of blocks whose mean key has the largest product with the mean query."""
    keys = pooled(x.k, areas.k_block).repeat_interleave(x.heads // x.k.shape[1], 1)
    scores: Float[Tensor, "B H NQ NK"] = pooled(x.q, areas.q_block) @ keys.mT
    middle = areas.middle[:, None]
    return keep_top_k(scores.masked_fill(~middle, -torch.inf), count) & middle


# ------------------------------------------------------------------------------------------------ calibrated thresholds


def predicted(loaded: Loaded, window: list[int], following: list[int], prompt: int, progress: Callable[[str], None]
              ) -> dict[str, Any]:
    """Nats per token of what follows the window, read densely and under calibrated thresholds, and how dense that was."""
    progress("calibrating")
    short = len(window) <= 1024
    own = "dense_until=0" if short else ""
    method = written(f"sale({own})")
    made = [tuple(window)] if short else texts(loaded, 1, prompt, seed=SEED)
    tensors = train(loaded.model, made, [method], {}, progress=lambda done, total, what: progress(f"calibrating: {what}"))
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "sale.safetensors")
        profiles.save(Profile(profiles.trained_key(loaded.model, method), tensors), Path(place))
        nlls, density = {}, 1.0
        for name, recipe in (("dense", "full"), ("sale", f'sale(thresholds="{place}"{own and ", " + own})')):
            progress(f"predicting under {name}")
            context = Context.from_ids(loaded, window, recipe)
            nlls[name] = np.array(context.nlls([], following))
            density = context.achieved.density  # type: ignore[union-attr]
    gap = nlls["sale"] - nlls["dense"]
    return {"dense": float(nlls["dense"].mean()), "sale": float(nlls["sale"].mean()), "mean |dNLL|": float(np.abs(gap).mean()),
            "mean dNLL": float(gap.mean()), "tokens": len(following), "density": density,
            "dense heads": float((tensors["tau"] == 0).float().mean()), "median tau": float(tensors["tau"].median())}


# ------------------------------------------------------------------------------------------------------------- verdict


def judged(scale: str, table: list[dict[str, Any]], nll: dict[str, Any]) -> Outcome:
    """Means over layers, and the statements about them."""
    def mean(way: str, tau: float | None, what: str) -> float:
        return float(np.mean([r[what] for r in table if (r["way"], r["tau"]) == (way, tau)]))

    gaps = {what: max(abs(mean("int4", tau, what) - mean("exact", tau, what)) for tau in TAUS) for what in ("density", "error")}
    own, means = mean("int4", JUDGED, "error"), mean("mean-pool", JUDGED, "error")
    checks = {
        f"density within {MOST_DENSITY_GAP} of exact scores' at every threshold": gaps["density"] <= MOST_DENSITY_GAP,
        f"error within {MOST_ERROR_GAP} of exact scores' at every threshold": gaps["error"] <= MOST_ERROR_GAP,
        f"error at most {MOST_OF_MEAN_POOL} of mean pooling's at tau={JUDGED}": own <= MOST_OF_MEAN_POOL * means,
        f"calibrated: mean |dNLL| of what follows at most {MOST_NLL_GAP}": nll["mean |dNLL|"] <= MOST_NLL_GAP,
    }
    pair = lambda way, tau: [round(mean(way, tau, what), 4) for what in ("density", "error")]  # noqa: E731
    measured: dict[str, Any] = {f"{way}: density, error": {str(tau): pair(way, tau) for tau in TAUS} for way in ("int4", "exact")}
    measured |= {f"mean pooling at tau={JUDGED}: density, error": pair("mean-pool", JUDGED),
                 "sink and local: density, error": pair("sink and local", None),
                 "calibrated": {name: round(value, 4) for name, value in nll.items()}}
    expected: dict[str, Any] = {f"{way}: density, error": {str(tau): list(found) for tau, found in PROTOTYPE[way].items()}
                                for way in PROTOTYPE}
    expected |= {f"mean pooling at tau={JUDGED}: error": MEAN_POOL_ERROR, "sink and local: density, error": list(SINK_LOCAL),
                 "calibrated": f"mean |dNLL| at most {MOST_NLL_GAP}"}
    if scale == "smoke":
        verdict, reason = "mechanism-only", "one layer over a short text says nothing about means."
    else:
        verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table)


EXPERIMENT = Experiment(
    id="sale", system="sale", run=measure,
    claim="Estimating every score in 4 bits and reading the blocks with one pair that is strong beside sink and local keys loses "
          "no more than choosing by exact scores, and less than choosing by block means at the same density.",
)
