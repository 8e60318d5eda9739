"""Does a compressed few-shot prompt serve better when its worked examples stay whole?

Twelve worked examples in a private format stand before a question; the prompt is compressed when it has been read, to 30 % and
40 % of its tokens. Measured is the likelihood of the right chain of steps, teacher forced. Everything is compared on one
reading of each prompt: whole shots by the attention of all rows or of the question's; the *same* attention with the same
protected tokens, but token by token and head by head (as H2O and SnapKV without pooling choose); random whole shots, the same
in every layer (and, for information, drawn for each layer); StreamingLLM; no shots at all. H2O and SnapKV as the library has
them stand in the table too.

KVFundaBench's curve is drawn from the same runs: the relative change dP of the share of answer tokens that would be written
right. It is information; no check reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache import CachePolicy, LayerContext, OwnPolicy, Score, protect
from longspan.cache.policies.shotkv import RECEIVED, ShotKV
from longspan.context import Context, read_once
from longspan.decoding import read
from longspan.evaluation.base import Example, answer_ids, prompt_parts, token_spans
from longspan.evaluation.fundamental import Harness, relative_change
from longspan.evaluation.runner import parse_task
from longspan.evaluation.statistics import paired
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import Loaded, load
from longspan.recipe import Recipe
from longspan.registry import Card, Refused

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"prompts": 1, "shots": 6, "ratios": [0.4], "curve": []},
    "small": {"prompts": 8, "shots": 12, "ratios": [0.3, 0.4], "curve": [0.2, 0.6]},
}
SEED, LENGTH = 0, 4096
DRAWS = 3
"""Random choices a prompt, whose mean counts."""
WINDOW_MOST = 0.25
"""ShotKV's NLL with the question's rows, as a share of the token-level choice's, must be at most this."""
PUBLISHED = {
    "full": 0.186, "zero-shot": 3.25,
    "30 %": {"shotkv, all rows": 0.171, "tokens, all rows": 0.188, "random shots": 0.230, "shotkv, window": 0.212,
             "tokens, window": 2.08, "streaming-llm": 0.377},
    "40 %": {"shotkv, all rows": 0.155, "tokens, all rows": 0.172, "random shots": 0.194, "shotkv, window": 0.193,
             "tokens, window": 1.83, "streaming-llm": 0.260},
}
CURVE = ("shotkv, all rows", "tokens, all rows", "streaming-llm")
PAPER: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B-Instruct", "length": 16384, "examples": 200, "methods": ("shotkv", "h2o", "streaming-llm"),
    "tasks": {'kvfunda-long-generation(K=35, shots=8, file="gsm8k.jsonl")': (0.4, 0.3, 0.25),
              'kvfunda-arithmetic(shots=50, file="gsm8k.jsonl")': (0.1,)}}


# ----------------------------------------------------------------------------------------------- what is compared with


@dataclass(frozen=True)
class TokenLevel(Score):
    """ShotKV's attention and protected tokens, with every head of the cache choosing single tokens by its own sums."""

    base: ShotKV
    card = Card("token-level", "score", "shotkv", "experiments", "", "Single tokens by the attention that ShotKV looks at.",
                __name__, "TokenLevel", capabilities=("all-queries",))

    def __str__(self) -> str:
        return f"token-level(base={self.base})"

    def observe(self, x: LayerContext) -> None:
        self.base.observe(x)

    def protected(self, x: LayerContext) -> int:
        return int(self._safe(x)[0, 0].sum())

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return protect(x.per_key[RECEIVED], self._safe(x))

    def _safe(self, x: LayerContext) -> Bool[Tensor, "B H S"]:
        outside = x.positions >= x.seen[:, None, None] - self.base.W
        shots = torch.zeros_like(outside)
        for first, end in x.spans["shots"]:
            shots |= (x.positions >= first) & (x.positions < end)
        return x.valid & (outside | ~shots)


@dataclass(frozen=True)
class RandomShots(ShotKV):
    """Whole shots by the draw: the same in every layer, as if the others had been left out; or a draw for each layer."""

    seed: int = 0
    per_layer: bool = False
    card = Card("random-shots", "policy", "shotkv", "experiments", "", "Whole shots at random.", __name__, "RandomShots",
                capabilities=("units",))

    def scores(self, x: LayerContext, unit: Int[Tensor, "B S"], n: int) -> Float[Tensor, "B n"]:
        generator = torch.Generator().manual_seed(1009 * self.seed + (x.layer + 1 if self.per_layer else 0))
        return torch.rand(n, generator=generator).expand(len(unit), -1)


def recipes(ratio: float, question: int, index: int) -> Iterator[Recipe]:
    """What is compared at a kept share; `question` tokens follow the last shot."""
    for rows, name in (("all", "all rows"), ("window", "window")):
        policy = ShotKV(r_p=ratio, rows=rows, W=question)  # type: ignore[call-arg]
        yield Recipe(cache=OwnPolicy(policy), name=f"shotkv, {name}")
        budget = Recipe.parse(f"h2o(budget={ratio})").scored.budget
        yield Recipe(cache=CachePolicy(TokenLevel(policy), budget), name=f"tokens, {name}")
    for draw in range(DRAWS):
        for per_layer in (False, True):
            drawn = RandomShots(  # type: ignore[call-arg]
                r_p=ratio, W=question, seed=DRAWS * index + draw, per_layer=per_layer)
            yield Recipe(cache=OwnPolicy(drawn), name="random shots, per layer" if per_layer else "random shots")
    for name, text in (("streaming-llm", "streaming-llm(budget={})"), ("h2o", "h2o(budget={})"),
                       ("snapkv, no pooling", f"snapkv(window={question}, kernel=1, budget={{}})")):
        yield replace(Recipe.parse(text.format(ratio)), name=name)


# -------------------------------------------------------------------------------------------------------- measuring


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Compare what is kept; at paper scale by accuracy."""
    if scale == "paper":
        return measure_paper(progress)
    size, loaded = SIZES[scale], load(dtype="float32")
    rows: list[dict[str, Any]] = []
    few, zero = (list(parse_task(f"kvfunda-arithmetic(shots={n})").examples(LENGTH, size["prompts"], SEED, loaded.tokenizer))
                 for n in (size["shots"], 0))
    for index, (example, bare) in enumerate(zip(few, zero)):
        progress(f"prompt {index + 1} of {size['prompts']}")
        rows += measure_prompt(loaded, example, size, index)
        ids = prompt_parts(bare, loaded.tokenizer).ids
        for _, context in read_once(loaded, ids, [Recipe()]):
            rows.append({"ratio": 1.0, "name": "zero-shot", "index": index, "kept": 1.0} | judge(loaded, context, bare))
    return judged(scale, size, rows)


def measure_prompt(loaded: Loaded, example: Example, size: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """Every recipe on one prompt."""
    ids = prompt_parts(example, loaded.tokenizer).ids
    shots = token_spans(example, loaded.tokenizer, "shots")
    question = len(ids) - shots[-1][1]
    wanted: list[tuple[float, Recipe]] = [(1.0, Recipe(name="full"))]
    wanted += [(ratio, recipe) for ratio in size["ratios"] for recipe in recipes(ratio, question, index)]
    wanted += [(ratio, recipe) for ratio in size["curve"] for recipe in recipes(ratio, question, index) if recipe.name in CURVE]
    found = []
    shared = read_once(loaded, ids, [recipe for _, recipe in wanted], spans={"shots": shots})
    for (ratio, recipe), (_, context) in zip(wanted, shared):
        figures = judge(loaded, context, example)
        assert isinstance(context, Context)
        found.append({"ratio": ratio, "name": recipe.name, "index": index, "kept": context.achieved.kept_fraction,
                      "prompt": len(ids), "protected": len(ids) - sum(b - a for a, b in shots)} | figures)
    return found


def judge(loaded: Loaded, context: Context | Refused, example: Example) -> dict[str, float]:
    """Nats per token of the right answer, and the share of its tokens that are the likeliest, teacher forced."""
    if isinstance(context, Refused):
        raise context
    answer = answer_ids(example, loaded.tokenizer)
    point, device = context.cache.snapshot(), loaded.model.device
    after = read(loaded.model, torch.tensor([answer[:-1]], device=device), context.cache, last=len(answer) - 1)
    context.cache.restore(point)
    assert context.logits is not None
    logprobs = torch.cat([context.logits[:, None], after], 1)[0].log_softmax(-1)
    wanted = torch.tensor(answer, device=device)
    right = logprobs.argmax(-1) == wanted
    return {"nll": float(-logprobs.gather(-1, wanted[:, None]).mean()), "right": float(right.float().mean()),
            "all_right": float(right.all())}


# ---------------------------------------------------------------------------------------------------------- the verdict


def judged(scale: str, size: dict[str, Any], rows: list[dict[str, Any]]) -> Outcome:
    """Means, the statements about the first share, and the curve. An order that may be chance is not yet reproduced."""

    def column(name: str, ratio: float, figure: str) -> list[float]:
        """One value a prompt: the mean, where there are several draws."""
        own = [row for row in rows if (row["name"], row["ratio"]) == (name, ratio)]
        return [float(np.mean([row[figure] for row in own if row["index"] == i])) for i in sorted({r["index"] for r in own})]

    def mean(name: str, ratio: float, figure: str = "nll") -> float:
        return float(np.mean(column(name, ratio, figure)))

    named = dict.fromkeys((row["name"], row["ratio"]) for row in rows)
    table = [{"name": name, "ratio": ratio, "n": len(column(name, ratio, "nll"))}
             | {figure: round(mean(name, ratio, figure), 4) for figure in ("nll", "right", "all_right", "kept")}
             for name, ratio in named]
    first, full = size["ratios"][0], mean("full", 1.0, "right")
    pairs = [("shotkv, window", "tokens, window")]
    pairs += [("shotkv, all rows", name) for name, ratio in named if ratio == first and not name.startswith("shotkv")]
    tests = {(a, b): paired(column(a, first, "nll"), column(b, first, "nll")) for a, b in pairs}
    table += [{"pair": " - ".join(pair), "ratio": first, "nll_difference": test.difference, "ci95": [test.lo, test.hi],
               "p": test.p_value} for pair, test in tests.items()]
    share = f"{first:.0%}".replace("%", " %")
    checks = {
        f"{share}, window: whole shots have at most {WINDOW_MOST} of the tokens' NLL":
            mean("shotkv, window", first) <= WINDOW_MOST * mean("tokens, window", first),
        f"{share}, all rows: whole shots below tokens": mean("shotkv, all rows", first) < mean("tokens, all rows", first),
        f"{share}, all rows: below random whole shots": mean("shotkv, all rows", first) < mean("random shots", first),
        f"{share}, all rows: below streaming-llm": mean("shotkv, all rows", first) < mean("streaming-llm", first),
    }
    measured: dict[str, Any] = {name: round(mean(name, 1.0), 3) for name in ("full", "zero-shot")}
    for ratio in size["ratios"]:
        measured[f"{ratio:.0%}".replace("%", " %")] = {name: round(mean(name, ratio), 3) for name, r in named if r == ratio}
    shares = sorted([*size["ratios"], *size["curve"]], reverse=True)
    measured["dP of right answer tokens"] = {
        name: {str(ratio): round(relative_change(mean(name, ratio, "right"), full), 3) for ratio in shares} for name in CURVE}
    failed = [name for name, holds in checks.items() if not holds]
    if scale == "smoke":
        verdict, reason = "mechanism-only", "one short prompt says nothing about means."
    elif failed:
        verdict, reason = "failed", "not so here: " + "; ".join(failed) + "."
    else:
        judged_by = [pairs[0], *(("shotkv, all rows", name) for name in ("tokens, all rows", "random shots", "streaming-llm"))]
        chance = [" - ".join(pair) for pair in judged_by if tests[pair].p_value >= 0.05]
        verdict = "mechanism-only" if chance else "reproduced"
        reason = f"the order holds, but within chance for {size['prompts']} prompts: {'; '.join(chance)}." if chance else ""
    return Outcome(measured, PUBLISHED, checks, verdict, reason, [SEED], table)


def measure_paper(progress: Callable[[str], None]) -> Outcome:
    """Accuracy on the paper's model and GSM8K; needs ``gsm8k.jsonl`` in the current folder."""
    harness = Harness(load(PAPER["model"]), PAPER["length"], PAPER["examples"])
    table, measured = [], {}
    for task, ratios in PAPER["tasks"].items():
        for method in PAPER["methods"]:
            progress(f"{method}, {task}")
            curve = harness.curve(method, task, ratios)
            table.append(curve.as_json())
            measured[f"{method}, {task}"] = dict(zip(map(str, ratios), curve.accuracies)) | {"full": curve.base}
    checks = {f"{task}: shotkv above {other} at {ratio}":
              measured[f"shotkv, {task}"][str(ratio)] > measured[f"{other}, {task}"][str(ratio)]
              for task, ratios in PAPER["tasks"].items() for other in PAPER["methods"][1:] for ratio in ratios}
    expected = {"LG-GSM8K, full 46.00; 40 / 30 / 25 %": {
        "shotkv": [47.33, 38.33, 26.83], "streaming-llm": [39.50, 14.83, 6.33], "h2o": [32.66, 19.83, 14.83]},
        "many-shot GSM8K, full 82.35; 10 %": {"shotkv": 80.37, "streaming-llm": 74.32, "h2o": 51.27}}
    verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [0], table)


EXPERIMENT = Experiment(
    id="shotkv", system="shotkv", run=measure,
    claim="Keeping worked examples whole when a few-shot prompt is compressed costs less of the answer's likelihood than keeping "
          "single tokens by the same attention, random whole examples, or the newest tokens.",
)
