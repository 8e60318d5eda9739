"""Does a histogram of a row's scores leave one or two steps to its α-entmax threshold, and does skipping empty tiles save time?

First, thresholds of drawn rows: steps until the row sums to 1 within 1e-6, in float64, from the histogram's bracket, from the
middle of [max - 1, max], and by halving alone; whether the bracket holds, and whether that check notices a histogram that counts
elements at bin centres or the maximum at its bin's edge. Second, the same on the logits of the bundled model over plain English,
with the share of 64 x 64 tiles that hold no weight. Third, attention in tiles over queries of growing strength: the same output
with and without skipping, and the time it takes.

The model was trained with softmax: how sparse its scores are under α-entmax says what its heads look at, not what a model trained
with α-entmax would look at. The specification drew its text from the standard library's docstrings; here it is plain sentences
of the installed text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.hidden import plain_prose
from longspan.experiments.noted import noted
from longspan.kernels.entmax import below_top, by_sorting, entmax, histogram, histogram_root, threshold
from longspan.kernels.entmax_attention import Tiles, entmax_attention
from longspan.kernels.entmax_tiles import TILE, packed
from longspan.models import load
from longspan.registry import Refused

BINS, ALPHA = 8, 1.5
MOST_MEAN, MOST_STEPS, LEAST_HALVINGS = 2.1, 3, 15.0
STARTS: dict[str, dict[str, Any]] = {
    "histogram": {}, "middle": {"start": "middle"}, "bisection": {"start": "middle", "steps": "bisection"}}
WAYS = LEFT, CENTRE, TWICE = ("left edges", "bin centres", "maximum not taken out")
"""The histogram, and two that must not pass for it."""
EMPTY = {1.5: 0.46, 2.0: 0.58}
"""Empty tiles that the specification measured."""
SUPPORT_ROWS, SUPPORT = 256, 5.9
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"rows": 60, "lengths": (256,), "tokens": 192, "layers": (0, 15), "heads": (0, 4), "time": 256, "rounds": 1},
    "small": {"rows": 60, "lengths": (1024, 16384), "tokens": 1024, "layers": tuple(range(0, 30, 3)),
              "heads": tuple(range(0, 9, 2)), "time": 2048, "rounds": 5},
}
STRENGTHS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
"""How much nearer keys are preferred: by this times the squared distance in tiles, in units of the threshold's range."""
SEED = 0


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Steps on drawn rows, steps and empty tiles on a model's logits, and the time of attention that skips."""
    if scale == "paper":
        raise Refused("adasplash2 at paper scale trains models with entmax attention on GPUs and compares with FlashAttention-2; "
                      "expected smoke or small.")
    size = SIZES[scale]
    table: list[dict[str, Any]] = []
    for n in size["lengths"]:
        for name, scores in drawn(n, size["rows"]).items():
            progress(f"{name} rows of {n}")
            table.append({"rows": name, "n": n} | steps(scores))
    progress("the model's logits")
    model = on_a_model(size)
    timed = []
    for strength in STRENGTHS:
        progress(f"time at strength {strength}")
        timed.append(skipping(strength, size["time"], size["rounds"]))
    return judged(scale, table, model, timed)


# ------------------------------------------------------------------------------------------------------------- thresholds


def drawn(n: int, rows: int) -> dict[str, Float[Tensor, "rows n"]]:
    """Rows of every kind, in float64."""
    g = torch.Generator().manual_seed(SEED + n)
    normal = torch.randn(rows, n, generator=g, dtype=torch.float64)
    chi = torch.stack([torch.randn(rows, n, generator=g, dtype=torch.float64).square() for _ in range(3)]).sum(0)
    spike = normal.clone()
    spike[torch.arange(rows), torch.randint(n, (rows,), generator=g)] += 30.0
    return {"Gaussian, sigma 1": normal, "Gaussian, sigma 3": 3 * normal, "Gaussian, sigma 10": 10 * normal,
            "Student t, 3 degrees": normal / (chi / 3).sqrt(), "one spike": spike, "constant": torch.ones_like(normal)}


def steps(scores: Float[Tensor, "rows n"]) -> dict[str, Any]:
    """Mean and most steps from every start, and rows outside each kind of bracket."""
    found: dict[str, Any] = {}
    for name, how in STARTS.items():
        taken = threshold(scores, ALPHA, bins=BINS, **how).iterations
        found |= {f"{name}: mean": float(taken.double().mean()), f"{name}: most": int(taken.max())}
    x, _ = below_top(scores, ALPHA)
    exact = by_sorting(x, ALPHA)
    for name, low in brackets(x).items():
        out = (low > exact + 1e-9) | (low + 1 / BINS < exact - 1e-9)
        found[f"outside the bracket, {name}"] = int(out.sum())
    return found


def brackets(x: Float[Tensor, "rows n"]) -> dict[str, Float[Tensor, " rows"]]:
    """Lower ends: as they should be, with elements at bin centres, and with the maximum counted twice."""
    counts = histogram(x, BINS)
    twice = counts.clone()
    twice[..., -1] += 1
    ways = {LEFT: (counts, 0.0), CENTRE: (counts, 0.5), TWICE: (twice, 0.0)}
    return {name: histogram_root(counted, ALPHA, place=place) for name, (counted, place) in ways.items()}


# ---------------------------------------------------------------------------------------------------------------- a model


def on_a_model(size: dict[str, Any]) -> dict[str, Any]:
    """Steps, supports and empty tiles on some layers and heads of the bundled model over plain English."""
    loaded = load(dtype="float32")
    ids = loaded.tokenizer(" ".join(plain_prose()), add_special_tokens=False)["input_ids"][: size["tokens"]]
    heads = list(size["heads"])
    per_layer, supports, empty = [], [], {alpha: [] for alpha in EMPTY}  # type: ignore[var-annotated]
    for x in noted(loaded.model, ids, size["layers"]).values():
        q, k, scale = x.q, x.k, x.scale
        group = q.shape[1] // k.shape[1]
        keys = k[0, [h // group for h in heads]]
        for query, key in zip(q[0, heads].double(), keys.double()):
            scores = causal(query @ key.mT * scale)
            per_layer.append(steps(scores))
            supports.append(float((entmax(scores[-SUPPORT_ROWS:], ALPHA) > 0).double().sum(-1).mean()))
            for alpha, found in empty.items():
                found.append(empty_tiles(scores, alpha))
    over_heads = {name: [row[name] for row in per_layer] for name in per_layer[0]}
    return {name: float(max(seen) if name.endswith("most") else sum(seen) if "outside" in name else np.mean(seen))
            for name, seen in over_heads.items()} | {
        f"mean support of the last {SUPPORT_ROWS} rows": float(np.mean(supports)),
        **{f"empty tiles, alpha={alpha}": float(np.mean(found)) for alpha, found in empty.items()}}


def causal(scores: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """-inf after each row's own key."""
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def empty_tiles(scores: Float[Tensor, "n n"], alpha: float) -> float:
    """Share of the causal tiles that hold no weight at all."""
    n = len(scores)
    support: Bool[Tensor, "n n"] = entmax(scores, alpha) > 0
    whole = F.pad(support, (0, -n % TILE, 0, -n % TILE))
    mask = whole.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1)
    return Tiles(packed(mask[None, None]), n, n).empty_share


# ------------------------------------------------------------------------------------------------------------------- time


def skipping(strength: float, length: int, rounds: int) -> dict[str, Any]:
    """One strength: empty tiles, whether skipping changes anything, and best times of forward and both ways."""
    g = torch.Generator().manual_seed(SEED)
    angle = torch.arange(length)[:, None] / length
    near = torch.cat((angle.cos(), angle.sin()), -1)
    q, k, v = (torch.randn(1, 4, length, 64, generator=g) for _ in range(3))
    if strength:  # z = s / 2 = size² cos(a - b) / 16 is `strength` less one tile away, where cos is 1 - (TILE / length)² / 2
        size = (32 * strength) ** 0.5 * length / TILE
        q[..., :2], k[..., :2] = near * size, near * size
    given, grad = tuple(t.requires_grad_() for t in (q, k, v)), torch.randn(1, 4, length, 64, generator=g)

    def both(skip: bool) -> list[Tensor]:
        out = entmax_attention(q, k, v, ALPHA, skip=skip)
        return [out, *torch.autograd.grad(out, given, grad)]

    @torch.no_grad()
    def forward(skip: bool) -> Tensor:
        return entmax_attention(q, k, v, ALPHA, skip=skip)

    tiles = entmax_attention(q, k, v, ALPHA, return_tiles=True)[1]
    same = all(torch.equal(a, b) for a, b in zip(both(True), both(False)))
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way, run in (("forward", forward), ("both", both)):
            for skip in (True, False):
                start = time.perf_counter()
                run(skip)
                seconds.setdefault(f"{way}, {'skipping' if skip else 'all tiles'}", []).append(time.perf_counter() - start)
    best = {name: min(taken) for name, taken in seconds.items()}
    return {"strength": strength, "empty": tiles.empty_share, "same": same} | best


# ---------------------------------------------------------------------------------------------------------------- verdict


def judged(scale: str, table: list[dict[str, Any]], model: dict[str, Any], timed: list[dict[str, Any]]) -> Outcome:
    """The specification's statements about the three measurements."""
    varied = [row for row in table if row["rows"] != "constant"]
    means = {name: [row[f"{name}: mean"] for row in varied] for name in STARTS}
    most = {name: max(row[f"{name}: most"] for row in varied) for name in STARTS}
    outside = {way: sum(row[f"outside the bracket, {way}"] for row in table) for way in WAYS}
    low, high = timed[0], timed[-1]
    fraction = {way: high[f"{way}, skipping"] / high[f"{way}, all tiles"] for way in ("forward", "both")}
    checks = {
        f"drawn rows: histogram takes {MOST_MEAN} steps on average or fewer": max(means["histogram"]) <= MOST_MEAN,
        f"drawn rows: histogram takes {MOST_STEPS} steps at most": most["histogram"] <= MOST_STEPS,
        f"drawn rows: bisection takes {LEAST_HALVINGS:.0f} steps on average or more": min(means["bisection"]) >= LEAST_HALVINGS,
        "drawn rows: no threshold outside its bracket": not outside[LEFT],
        "bin centres fail the bracket": bool(outside[CENTRE]),
        "a maximum that isn't taken out of its bin fails the bracket": bool(outside[TWICE]),
        f"the model: histogram takes {MOST_MEAN} steps on average or fewer": model["histogram: mean"] <= MOST_MEAN,
        f"the model: histogram takes {MOST_STEPS} steps at most": model["histogram: most"] <= MOST_STEPS,
        f"the model: bisection takes {LEAST_HALVINGS:.0f} steps on average or more": model["bisection: mean"] >= LEAST_HALVINGS,
        "the model: no threshold outside its bracket": not model[f"outside the bracket, {LEFT}"],
        "the model: alpha=2 leaves no fewer tiles empty than alpha=1.5":
            model["empty tiles, alpha=2.0"] >= model["empty tiles, alpha=1.5"],
        "skipping changes neither output nor gradients": all(row["same"] for row in timed),
        "time falls with empty tiles, forward": high["forward, skipping"] < low["forward, skipping"] and fraction["forward"] < 1,
        "time falls with empty tiles, both ways": high["both, skipping"] < low["both, skipping"] and fraction["both"] < 1,
    }
    measured: dict[str, Any] = {f"{name}, drawn rows (least mean, largest mean, most)": [
        round(min(means[name]), 2), round(max(means[name]), 2), most[name]] for name in STARTS}
    measured["drawn rows outside the bracket"] = outside
    measured["constant rows: histogram, most"] = max(r["histogram: most"] for r in table if r["rows"] == "constant")
    measured |= {f"the model: {name}": round(value, 3) for name, value in model.items()}
    measured |= {f"time of all tiles that skipping takes, {way}": {f"{row['empty']:.0%} empty": round(
        row[f"{way}, skipping"] / row[f"{way}, all tiles"], 3) for row in timed} for way in ("forward", "both")}
    expected: dict[str, Any] = {
        "histogram, drawn rows": "means 1.9 to 2.0, at most 2", "middle, drawn rows": "means 2.4 to 3.0, at most 4",
        "bisection, drawn rows": "means about 19 to 20, at most 22", "constant rows: histogram, most": "3 to 4",
        "the model": f"histogram 1.97 on average and at most 2, bisection 19.2, support {SUPPORT}",
        "the model: empty tiles": {f"alpha={alpha}": share for alpha, share in EMPTY.items()}, "time": "falls with empty tiles"}
    if scale == "smoke":
        verdict, reason = "mechanism-only", "few rows and a short text say nothing about means."
    else:
        verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [SEED], [*table, {"rows": "the model"} | model, *timed])


EXPERIMENT = Experiment(
    id="adasplash2", system="adasplash2", run=measure,
    claim="A histogram of a row's scores leaves one or two refinement steps to its entmax threshold, and attention that skips "
          "the tiles without weight gives the same output in less time.",
)
