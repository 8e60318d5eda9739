"""Does a router learn which tokens must look back, and do the others lose nothing by not looking?

Small decoders are trained from nothing on lines in which a few questions need full attention and nothing else does: a
fixed Markov chain of fillers, pairs of key and value in the first half, questions ``? key`` in the second, each at least
three windows behind its pair. Full attention, local attention alone, and L2A at several prices for looking back see the
same lines in the same order. L2A's runs share the steps in which the price is still 0. The price and the layer to prune
are chosen on lines of their own; everything is judged on others.

The sizes are smaller than the specification's (lines of 128 tokens with a window of 8, 8 keys and values, width 64, 1,000
steps of 16 lines) and a short convolution stands beside every attention, so that all six runs take minutes on one core;
training lines ask for each pair twice. The router learns at a twentieth of the others' rate, about that of the published
recipe: at the full rate of a model that starts from nothing it closes before attention is worth anything.

Second, the bundled model is converted and every identity that doesn't need training is checked on a text.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.l2a_identities import identities
from longspan.layers.attention.l2a import FIRES, L2A, prune
from longspan.layers.attention.softmax import Softmax
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused
from longspan.training import IGNORE, Batch, TrainConfig, Trainer, dice
from longspan.training import Outcome as StepOutcome
from longspan.training.l2a import L2ANextToken

PRICES = (0.0, 0.01, 0.05, 0.2)
WARMUP = 0.4
POINTS, SKIP_LEAST, RATIO, PRUNE_POINTS, FULL_LEAST, FAR_LESS = 0.03, 0.7, 5.0, 0.02, 0.9, 2.0
"""What passes: L2A's distance from full attention, its skip share, firing at questions over fillers, the price of pruning,
full attention's accuracy, and how much more often a free gate fires."""
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 10, "batch": 4, "lr": 2e-3, "time": 96, "window": 4, "dim": 16, "heads": 2, "mlp": 32, "weight": 5.0,
              "asks": 1, "fillers": 48, "keys": 24, "values": 24, "router_lr": 1.0, "choose": 1, "judge": 2, "text": 96,
              "text_window": 32},
    "small": {"steps": 1000, "batch": 16, "lr": 4e-3, "time": 128, "window": 8, "dim": 64, "heads": 2, "mlp": 128,
              "side_path": "short-conv", "weight": 10.0, "asks": 2, "fillers": 16, "keys": 8, "values": 8, "router_lr": 0.05,
              "choose": 10, "judge": 40, "text": 1024, "text_window": 256},
}
EXPECTED = {"local accuracy": "near 1/values", "full accuracy": ">= 0.9", "L2A behind full": "<= 0.03", "skip": ">= 0.7",
            "firing at questions over fillers": ">= 5", "cost of pruning": "<= 0.02"}
SEED, LAYERS = 0, 3


# ---------------------------------------------------------------------------------------------------------- the lines


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of `time` tokens: fillers, then keys, values and the question mark as further tokens."""

    time: int
    window: int
    batch: int
    split: str = "train"
    asks: int = 1
    """How often each pair is asked for."""
    fillers: int = 48
    keys: int = 24
    values: int = 24
    pairs: int = 6

    @property
    def vocab_size(self) -> int:
        return self.fillers + self.keys + self.values + 1

    @cached_property
    def chain(self) -> np.ndarray:
        """Three successors of every filler, the likeliest first; the same for all lines."""
        draw = np.random.default_rng(7)
        return np.stack([draw.permutation(self.fillers)[:3] for _ in range(self.fillers)])

    def __call__(self, index: int) -> Batch:
        draw = dice(SEED, self.split, index)
        texts = self._fill(draw)
        rows = [self._line(draw, text) for text in texts]
        ids, answers = (torch.from_numpy(np.stack(part)) for part in zip(*rows))
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
        return Batch(ids, labels, extra={"answers": answers}, index=index)

    def _fill(self, draw: np.random.Generator) -> np.ndarray:
        """The fillers of every line, one after the other along the chain."""
        count = self.time - (2 + 3 * self.asks) * self.pairs
        out = np.empty((self.batch, count), np.int64)
        out[:, 0] = draw.integers(0, self.fillers, self.batch)
        which = np.searchsorted(np.cumsum([0.7, 0.2]), draw.random((self.batch, count)))
        for t in range(1, count):
            out[:, t] = self.chain[out[:, t - 1], which[:, t]]
        return out

    def _line(self, draw: np.random.Generator, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and True at each key whose value comes next and can be known."""
        half, n, q = self.time // 2, self.pairs, self.pairs * self.asks
        while True:
            told = np.sort(draw.permutation(half - n)[:n]) + np.arange(n)
            asked = np.sort(draw.permutation(half - 2 * q)[:q]) + 2 * np.arange(q) + half
            order = draw.permutation(q) % n
            if (asked - told[order]).min() >= 3 * self.window:
                break
        keys = self.fillers + draw.permutation(self.keys)[:n]
        values = self.fillers + self.keys + draw.integers(0, self.values, n)
        line, answers = np.full(self.time, -1), np.zeros(self.time, bool)
        line[told], line[told + 1] = keys, values
        line[asked], line[asked + 1], line[asked + 2] = self.vocab_size - 1, keys[order], values[order]
        line[line < 0] = text
        answers[asked + 1] = True
        return line, answers


@dataclass(frozen=True)
class Weighted:
    """Next-token cross-entropy in which answers count `weight` times, plus the price of L2A if there is one.

    Its text doesn't tell the price: a run goes on from another's checkpoint where the price was still 0.
    """

    weight: float
    price: L2ANextToken | None = None

    def __str__(self) -> str:
        return f"answers x {self.weight}"

    def __call__(self, model: Any, batch: Batch, state: Any = None) -> StepOutcome:
        return self.plain(model, batch) if self.price is None else self.price.around(self.plain, model, batch)

    def plain(self, model: Any, batch: Batch, state: Any = None) -> StepOutcome:
        asked = batch.labels != IGNORE
        losses = F.cross_entropy(model(batch.ids).logits[asked], batch.labels[asked], reduction="none")
        weights = 1.0 + (self.weight - 1.0) * batch.extra["answers"][asked].float()
        return StepOutcome((losses * weights).sum() / weights.sum(), float(weights.sum()))


# ------------------------------------------------------------------------------------------------------------ training


def build(mixer: Any, size: dict[str, Any], vocab_size: int) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Decoder(DecoderConfig(vocab_size, dim=size["dim"], n_layers=LAYERS, n_heads=size["heads"], mlp_dim=size["mlp"],
                                     mixer=mixer, side_path=size.get("side_path")))


def lines_of(size: dict[str, Any], batch: int, split: str, asks: int) -> Lines:
    return Lines(size["time"], size["window"], batch, split, asks, size["fillers"], size["keys"], size["values"])


def fit(mixer: Any, size: dict[str, Any], objective: Weighted, out: Path | None = None, resume: bool = False) -> Decoder:
    """One run; with `out` it leaves a checkpoint where the price begins, or goes on from there."""
    lines = lines_of(size, size["batch"], "train", size["asks"])
    model, steps = build(mixer, size, lines.vocab_size), size["steps"]
    start = int(WARMUP * (steps - 1))
    config = TrainConfig(steps=steps, lr=size["lr"], warmup=steps // 20, log_every=steps, seed=SEED, keep_last=steps,
                         checkpoint_every=start if out is not None else 0)
    Trainer(model, lines, config, objective, out=out).run(resume)
    return model


def runs(size: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Decoder]:
    """The trained models by name; the later L2A runs go on from the first one's checkpoint."""
    plain, models = Weighted(size["weight"]), {}
    for name, mixer in (("full", Softmax(None)), ("local", Softmax(size["window"]))):
        progress(f"training {name}")
        models[name] = fit(mixer, size, plain)
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "first"
        start = f"step-{int(WARMUP * (size['steps'] - 1)):08d}"
        for price in PRICES:
            progress(f"training l2a at {price}")
            objective = Weighted(size["weight"], L2ANextToken(lambda_mean=price, warmup=WARMUP))  # type: ignore[call-arg]
            own = shared
            if price != PRICES[0]:
                own = Path(folder) / str(price)
                shutil.copytree(shared / start, own / start)
            gated = L2A(window=size["window"], router_lr=size["router_lr"])  # type: ignore[call-arg]
            models[f"l2a {price}"] = fit(gated, size, objective, own, resume=own != shared)
    return models


# ------------------------------------------------------------------------------------------------------------- judging


@torch.no_grad()
def judge(model: Decoder, lines: Lines, first: int, count: int) -> dict[str, Any]:
    """Accuracy on answers, skip share, and how often each layer fires at questions and at fillers."""
    right = asked = tokens = fillers = 0.0
    fired, at_asked, at_fillers = (torch.zeros(LAYERS) for _ in range(3))
    for index in range(first, first + count):
        batch = lines(index)
        answers: Bool[Tensor, "B T"] = batch.extra["answers"]
        plain = batch.ids < lines.fillers
        out = model.eval()(batch.ids)
        right += float((out.logits[answers].argmax(-1) == batch.labels[answers]).sum())
        asked, tokens, fillers = asked + float(answers.sum()), tokens + batch.ids.numel(), fillers + float(plain.sum())
        for layer, m in enumerate(out.ctx.auxiliary.get(FIRES, [])):
            fired[layer] += m.sum()
            at_asked[layer] += m[answers].sum()
            at_fillers[layer] += m[plain].sum()
    found: dict[str, Any] = {"accuracy": right / asked, "answers": int(asked)}
    if FIRES not in out.ctx.auxiliary:
        return found
    rates = {"fires": fired / tokens, "at questions": at_asked / asked, "at fillers": at_fillers / fillers}
    found |= {name: [round(x, 4) for x in rate.tolist()] for name, rate in rates.items()}
    floor = 1.0 / fillers
    return found | {"skip": float(1.0 - (fired / tokens).mean()),
                    "ratio": max(q / max(f, floor) for q, f in zip(rates["at questions"].tolist(), rates["at fillers"].tolist()))}


def pruned(model: Decoder, layer: int) -> Decoder:
    """A copy without one layer's global path."""
    made = copy.deepcopy(model)
    prune([part.mixer for part in made.stack.layers], [layer])  # type: ignore[union-attr, arg-type]
    return made


def choose(found: dict[str, dict[str, Any]]) -> str:
    """The price whose model skips most among those within reach of full attention; else the most accurate one."""
    priced = {name: f for name, f in found.items() if name.startswith("l2a") and name != f"l2a {PRICES[0]}"}
    near = {name: f for name, f in priced.items() if f["accuracy"] >= found["full"]["accuracy"] - POINTS}
    return max(near, key=lambda n: near[n]["skip"]) if near else max(priced, key=lambda n: priced[n]["accuracy"])


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Train, choose, judge, prune; then the identities on the bundled model."""
    if scale == "paper":
        raise Refused("the published figures need Qwen2.5 or Qwen3 trained for 24 billion tokens at 131,072 tokens a line; train "
                      'with `longspan train --retrofit "l2a(window=4095)" --model …` on a machine for that.')
    size = SIZES[scale]
    models = runs(size, progress)
    lines = lines_of(size, 32, "held-out", 1)
    progress("judging")
    seen = {name: judge(model, lines, 0, size["choose"]) for name, model in models.items()}
    best = choose(seen)
    layer = int(np.argmin(seen[best]["fires"]))
    place = size["choose"], size["judge"]
    table = [{"run": name} | judge(model, lines, *place) for name, model in models.items()]
    table.append({"run": f"{best} without layer {layer}"} | judge(pruned(models[best], layer), lines, *place))
    progress("converting the bundled model")
    return outcome(scale, table, best, identities(size["text"], size["text_window"]), size)


def outcome(scale: str, table: list[dict[str, Any]], best: str, same: dict[str, Any], size: dict[str, Any]) -> Outcome:
    """What was found beside what was expected."""
    rows = {row["run"]: row for row in table}
    full, local, free, chosen, cut = rows["full"], rows["local"], rows[f"l2a {PRICES[0]}"], rows[best], table[-1]
    behind, cost = full["accuracy"] - chosen["accuracy"], chosen["accuracy"] - cut["accuracy"]
    chance = 1.0 / size["values"]
    noise = 3 * (chance * (1 - chance) / local["answers"]) ** 0.5
    checks = {
        "local attention alone answers at chance": local["accuracy"] <= 1.5 * chance + noise,
        f"full attention answers at least {FULL_LEAST:.0%}": full["accuracy"] >= FULL_LEAST,
        f"L2A at most {POINTS * 100:.0f} points behind full attention": behind <= POINTS,
        f"and skips at least {SKIP_LEAST:.0%} of global attention": chosen["skip"] >= SKIP_LEAST,
        f"without a price {FAR_LESS:.0f} times as many tokens fire": 1 - free["skip"] >= FAR_LESS * (1 - chosen["skip"]),
        f"questions fire at least {RATIO:.0f} times as often as fillers in some layer": chosen["ratio"] >= RATIO,
        f"pruning the layer that skips most costs at most {PRUNE_POINTS * 100:.0f} points": cost <= PRUNE_POINTS,
    } | {f"bundled model: {name}": bool(holds) for name, holds in same["checks"].items()}
    measured = {"full accuracy": full["accuracy"], "local accuracy": local["accuracy"], "chosen": best,
                "L2A accuracy": chosen["accuracy"], "L2A behind full": behind, "skip": chosen["skip"],
                "skip by price": {name: rows[f"l2a {name}"]["skip"] for name in PRICES},
                "accuracy by price": {name: rows[f"l2a {name}"]["accuracy"] for name in PRICES},
                "firing at questions over fillers": chosen["ratio"], "cost of pruning": cost,
                "bundled model": same["measured"], "size": size}
    if scale == "smoke":
        verdict, reason = "mechanism-only", "a few steps teach nothing; only the machinery is tried."
    else:
        verdict, reason = by_checks(checks)
    return Outcome(measured, EXPECTED, checks, verdict, reason, [SEED], table)


EXPERIMENT = Experiment(
    id="l2a", system="l2a", run=measure,
    claim="Most tokens learn to skip global attention at next to no loss, and the layers that skip most can lose it.",
)
