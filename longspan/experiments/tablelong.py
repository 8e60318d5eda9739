"""Does dependence recur in tables where text forgets, does reinforcement learning on lookups work, what are the questions like?

The published gains are of models trained on thousands of questions with many GPUs. Here:

(a) the profile of dependence over distance, of real tables and of text (`table_profile.py`);
(b) the learning loop: a small decoder is taught by cross-entropy on tables of two rows until it is right about two times in
    five on tables of eight (taught on those, it was still guessing a cell after 600 steps), then by GRPO alone on those, with
    one question a table. The control's rewards are permuted inside each batch, so that they say nothing about the tokens they
    go to. Judged is the mean probability of the right token on tables that neither saw: what the sampled reward is in the
    mean, without the noise of sampling. When to stop teaching is seen on training tables;
(c) the generator of questions, and how often the bundled model is right by family (`table_questions.py`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused
from longspan.training import Grpo, NextToken, TrainConfig, Trainer, evaluate
from longspan.training.table_lookup import TableLookup

Progress = Callable[[str], None]
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"dim": 32, "batch": 8, "taught": 0.0, "most": 10, "steps": 5, "seeds": [0],
              "questions": 2, "held_out": 2},
    "small": {"dim": 128, "batch": 64, "taught": 0.4, "most": 3000, "steps": 200, "seeds": [0, 1, 2],
              "questions": 8, "held_out": 32},
}
"""`taught`: the mean reward at which cross-entropy, with several `questions` a table, stops, at the latest after `most` steps;
`steps` of GRPO follow."""
GROUP, BETA = 8, 1e-3
TEACH_LR, LR, TEACH_ROWS = 3e-3, 1e-4, 2
EVERY, WINDOW = 5, 10
"""Steps between looks at how far teaching has come, and training batches looked at, then and at both ends of GRPO."""
LEAST_RISE, MOST_MOVED, FAR = 0.15, 0.05, 0.1
"""The pass criteria, and how far from `taught` the start may be."""


class Permuted(Grpo):
    """The control: the rewards of a batch, dealt out at random."""

    def rewards(self, tokens: Int[Tensor, "N G"], labels: Int[Tensor, " N"], index: int) -> Float[Tensor, "N G"]:
        found = super().rewards(tokens, labels, index)
        order = torch.randperm(found.numel(), generator=torch.Generator().manual_seed(index + 1))
        return found.flatten()[order.to(found.device)].view_as(found)


class _Taught(Exception):
    """Cross-entropy has come as far as asked."""


def measure(scale: str, progress: Progress) -> Outcome:
    """The three parts."""
    if scale == "paper":
        raise Refused("tablelong at paper scale needs the tables of BIRD, CoSQL and Spider, an instruct model of billions of "
                      "weights with verl or TRL, and GPUs for weeks; expected smoke or small.")
    from longspan.experiments.table_profile import profile_part
    from longspan.experiments.table_questions import generator_part

    profile, learning = profile_part(scale, progress), learning_part(scale, progress)
    questions = generator_part(scale, progress)
    parts = {"profile": profile, "learning": learning, "questions": questions}
    measured = {name: part["measured"] for name, part in parts.items()}
    measured["seconds"] = {name: part["seconds"] for name, part in parts.items()}
    checks = profile["checks"] | learning["checks"]
    expected = {
        "profile": {"I(5 k)": [2.12, 2.04, 1.98, 1.97, 1.92, 1.91], "I at other lags": [0.128, 0.135], "peak ratio": 15.2,
                    "persistence": 0.92, "I of text": [0.109, 0.05, 0.028, 0.024, 0.015, 0.009, 0.006]},
        "learning": {"rise of the mean reward at least": LEAST_RISE, "moved by permuted rewards, less than": MOST_MOVED},
        "questions": "a model of 135M weights is right about never; retrieval above computation",
    }
    table = [row | {"of": name} for name, part in parts.items() for row in part["rows"]]
    verdict, reason = by_checks(checks)
    if scale == "smoke":
        verdict, reason = "mechanism-only", "drawn tables and a few steps say nothing about the claims."
    return Outcome(measured, expected, checks, verdict, reason, SIZES[scale]["seeds"], table)


# --------------------------------------------------------------------------------------------------------------- learning


def learning_part(scale: str, progress: Progress) -> dict[str, Any]:
    """GRPO and its control from the same start: `measured`, `checks`, `rows` and `seconds`."""
    size, start = SIZES[scale], time.perf_counter()
    rows = [row for seed in size["seeds"] for row in one_seed(size, seed, progress)]

    def of(run: str, what: str) -> list[float]:
        return [row[what] for row in rows if row["run"] == run]

    rises, moved = (np.array(of(run, "after")) - np.array(of(run, "before")) for run in ("grpo", "permuted"))
    checks = {
        f"the taught model is right {size['taught']} of the time, give or take {FAR}":
            max(abs(value - size["taught"]) for value in of("grpo", "before")) <= FAR,
        f"GRPO lifts the mean reward by at least {LEAST_RISE}, with every seed": bool(rises.min() >= LEAST_RISE),
        f"permuted rewards move it by less than {MOST_MOVED}, with every seed": bool(np.abs(moved).max() < MOST_MOVED),
    }
    measured = {
        "mean reward before": rounded(of("grpo", "before")), "after GRPO": rounded(of("grpo", "after")),
        "after permuted rewards": rounded(of("permuted", "after")), "rise": rounded(rises.tolist()),
        "moved by permuted rewards": rounded(moved.tolist()), "greedy accuracy before": rounded(of("grpo", "greedy before")),
        "greedy accuracy after GRPO": rounded(of("grpo", "greedy after")), "steps of cross-entropy": of("grpo", "taught"),
        "same number of further steps of cross-entropy, rise": rounded(
            (np.array(of("cross-entropy", "after")) - np.array(of("cross-entropy", "before"))).tolist()),
        "groups with unequal rewards, first and last steps": rounded([of("grpo", "used first"), of("grpo", "used last")]),
        "held-out tables": size["held_out"] * size["batch"],
    }
    return {"measured": measured, "checks": checks, "rows": rows, "seconds": round(time.perf_counter() - start, 1)}


def one_seed(size: dict[str, Any], seed: int, progress: Progress) -> list[dict[str, Any]]:
    """A row each for GRPO, the control, and further cross-entropy, from one taught model."""
    progress(f"teaching, seed {seed}")
    model, taught = teach(size, seed)
    held_out = TableLookup(batch=size["batch"], seed=seed, split="held-out")
    before = evaluate(model, held_out, size["held_out"], Grpo(warmup=0.0))  # type: ignore[call-arg]
    rows = []
    for run, kind, warmup in (("grpo", Grpo, 0.0), ("permuted", Permuted, 0.0), ("cross-entropy", NextToken, None)):
        progress(f"{run}, seed {seed}")
        make: Any = kind
        objective = make() if warmup is None else make(group=GROUP, beta=BETA, warmup=warmup)
        own = copy.deepcopy(model)
        config = TrainConfig(steps=size["steps"], lr=LR, schedule="constant", weight_decay=0.0, log_every=1, seed=seed)
        # Tables of other dice than those it was taught with.
        history = Trainer(own, TableLookup(batch=size["batch"], seed=1000 + seed), config, objective).run().history
        after = evaluate(own, held_out, size["held_out"], Grpo(warmup=0.0))  # type: ignore[call-arg]
        row = {"seed": seed, "run": run, "taught": taught, "before": before["reward"], "after": after["reward"],
               "greedy before": before["accuracy"], "greedy after": after["accuracy"]}
        if warmup is not None:
            ends = (history[:WINDOW], history[-WINDOW:])
            row |= {f"used {name}": mean([r["used"] for r in end]) for name, end in zip(("first", "last"), ends)}
            row["kl"] = mean([r.get("kl", 0.0) for r in ends[1]])
        rows.append(row)
    return rows


def teach(size: dict[str, Any], seed: int) -> tuple[Decoder, int]:
    """A model that is right about as often as asked, and the steps that took."""
    small = TableLookup(rows=TEACH_ROWS, questions=size["questions"], batch=size["batch"] // 2, seed=seed)
    large = TableLookup(batch=size["batch"], seed=2000 + seed)
    judge = Grpo(warmup=0.0)  # type: ignore[call-arg]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(DecoderConfig(small.vocab_size, dim=size["dim"], n_layers=2, side_path="short-conv"))
    steps = 0

    def watch(step: int, metrics: dict[str, float]) -> None:
        nonlocal steps
        steps = step
        if step % EVERY == 0 and evaluate(model, large, WINDOW, judge)["reward"] >= size["taught"]:
            raise _Taught

    config = TrainConfig(steps=size["most"], lr=TEACH_LR, warmup=min(20, size["most"]), schedule="constant", weight_decay=0.0,
                         log_every=1, seed=seed)
    with suppress(_Taught):
        Trainer(model, small, config, NextToken(), progress=watch).run()  # type: ignore[call-arg]
    return model, steps


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def rounded(value: Any) -> Any:
    """Figures with four digits behind the point."""
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


# --------------------------------------------------------------------------------------------------------------- the table


def lines(table: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The learning loop by seed."""
    rows = [row for row in table if row["of"] == "learning"]
    head = ["seed", "then", "mean reward before", "after"]
    names = {"grpo": "GRPO", "permuted": "GRPO, rewards permuted", "cross-entropy": "cross-entropy"}
    return head, [[str(row["seed"]), names[row["run"]], f"{row['before']:.3f}", f"{row['after']:.3f}"] for row in rows]


EXPERIMENT = Experiment(
    id="tablelong", system="tablelong", run=measure, lines=lines,
    claim="In tables dependence recurs at every multiple of the number of columns and doesn't decay, as it does in text; "
          "questions whose answers SQL gives let a model learn from exact rewards alone.",
)
