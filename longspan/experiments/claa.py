"""Does ranking prompt tokens by the maximum over several layers make a prefill pruner less dependent on single layers?

The published comparison measures heuristics against an answer-informed reference and finds that their per-layer rankings
collapse at some layers; the maximum over four layers takes the collapse away. Here the bundled model reads about 520
tokens of prose with four numbers hidden in it and a question about one. Every layer's window scores are compared with
the reference of the right digits (`gt-ref`): those of the layer alone, as FastKV ranks; the maximum over the last four
layers, as CLAA does; and their mean.

Then the prompt is pruned at one layer after another, a fifth of it kept, and the likelihood of the answer is measured:
CLAA's should depend less on where that happens than FastKV's. Beside them stands the same pruning guided by the reference.
The curve of the maximum needs four layers, so all three are compared from the layer on where it has them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.cache import KeepPlan, LayerContext, OwnPolicy, Policy, fork
from longspan.cache.policies.claa import fold
from longspan.cache.policies.pruning import REFERENCE, window_scores
from longspan.context.document import frame
from longspan.decoding import read, token_nlls
from longspan.evaluation import Request, parse_task, run
from longspan.evaluation.agreement import Agreement, compare_rankings, over_layers
from longspan.evaluation.oracles import DenseReading, dense_reading, reference
from longspan.evaluation.statistics import paired
from longspan.evaluation.words import NOUNS
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.hidden import hide, plain_prose
from longspan.models import Prompt, load
from longspan.recipe import Recipe
from longspan.registry import Card, Refused

W, N_LAYERS, KERNEL, RHO = 8, 4, 7, 0.2
WAYS = ("single", "max", "mean")
"""FastKV's ranking, CLAA's, and the mean that CLAA is not."""
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"prompts": 1, "tokens": 200, "prune": [8, 20]},
    "small": {"prompts": 8, "tokens": 460, "prune": list(range(4, 25, 2))},
}
RECALL_GAIN, JUMP_MOST = 0.03, 0.6
"""Least gain of CLAA's mean recall over a single layer's, and most jump as a share of its."""
SEED = 11
PAPER: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B-Instruct", "examples": 100, "folder": "longbench",
                         "tasks": ("triviaqa", "hotpotqa", "qasper", "multifieldqa_en"), "length": 10_000, "rho": (0.1, 0.2, 0.4)}


# ---------------------------------------------------------------------------------------------------------- the prompts


@dataclass(frozen=True)
class Question:
    """Token ids of a prompt, which ends with the answer's first words, and of the answer's digits."""

    prompt: list[int]
    answer: list[int]


def questions(tokenizer: Any, prompts: int, tokens: int) -> Iterator[Question]:
    """Prose with four hidden numbers, and a question about one of them."""
    head, foot = frame(tokenizer)
    prose = plain_prose()

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for index in range(prompts):
        rng = random.Random(f"claa/{SEED}/{index}")
        needles = {word: str(rng.randrange(10_000, 100_000)) for word in rng.sample(NOUNS, 4)}
        lines = [f"The magic number for {word} is: {number}." for word, number in needles.items()]
        body = hide(lines, prose, tokens, lambda text: len(ids(text)), rng)
        word = rng.choice(sorted(needles))
        asked = f"\n\nWhat is the magic number for {word} mentioned in the text?{foot}The magic number for {word} is:"
        yield Question(ids(head + " ".join(body) + asked), ids(f" {needles[word]}"))


# --------------------------------------------------------------------------------------------------- rankings of layers


class _WindowScores(Policy):
    """Notes every layer's window scores, and evicts nothing."""

    card = Card("window-scores", "policy", "", "experiments", "", "Evicts nothing.", __name__, "_WindowScores")
    found: list[Tensor]

    def __init__(self) -> None:
        object.__setattr__(self, "found", [])

    def __str__(self) -> str:
        return "window-scores"

    def window_rows(self) -> int:
        return W

    def plan(self, x: LayerContext) -> KeepPlan:
        self.found.append(window_scores(x, W, KERNEL))
        return KeepPlan(x.valid)


def look(loaded: Any, q: Question) -> tuple[list[Tensor], Tensor, float]:
    """Window scores (1,H,N) of every layer, the answer's reference ranking (N), and nats per answer token uncompressed."""
    scores = OwnPolicy(_WindowScores())
    with dense_reading(loaded.model, q.prompt, [scores]) as reading:
        fork(reading.cache, scores)
        r = reference([reading.peaks(q.answer)], KERNEL)
        return scores.chooser.found, r, _nll(loaded.model, reading, q)  # type: ignore[attr-defined]


def _nll(model: Any, reading: DenseReading, q: Question) -> float:
    return float(np.mean(token_nlls(model, reading.cache, reading.logits, q.answer)))


def agreements(scores: list[Tensor], r: Tensor) -> dict[str, Agreement]:
    """How each way of ranking agrees with the reference at every layer that has enough layers before it."""
    found: dict[str, list[tuple[float, float | None]]] = {way: [] for way in WAYS}
    for last in range(N_LAYERS - 1, len(scores)):
        buffered = tuple(scores[last - N_LAYERS + 1 : last + 1])
        rankings = {"single": scores[last].sum(1), "max": fold(buffered, "max"), "mean": fold(buffered, "mean")}
        for way, ranking in rankings.items():
            found[way].append(compare_rankings(ranking[0], r, W))
    return {way: Agreement([a for a, _ in both], [b for _, b in both]) for way, both in found.items()}


# -------------------------------------------------------------------------------------------------------------- pruning


@torch.inference_mode()
def pruned_nll(model: Any, recipe: Recipe, q: Question, r: Tensor | None = None) -> float:
    """Nats per answer token after the prompt was pruned while it was read, guided by `r` if it is given."""
    ids = torch.tensor([q.prompt], device=model.device)
    with recipe.on(model) as active:
        cache = active.new_cache(Prompt(ids, len(q.prompt)))
        if r is not None:
            cache.across[REFERENCE] = r
        logits = read(model, ids, cache)[:, 0]
        return float(np.mean(token_nlls(model, cache, logits, q.answer)))


def recipes(l_p: int) -> dict[str, Recipe]:
    """What is compared at one pruning layer."""
    claa = Recipe.parse(f"claa(rho={RHO}, W={W}, n={N_LAYERS}, kernel={KERNEL}, l_p={l_p})")
    return {"fastkv": Recipe.parse(f"fastkv(rho={RHO}, W={W}, kernel={KERNEL}, l_p={l_p})"), "claa": claa, "reference": claa}


# ------------------------------------------------------------------------------------------------------- the comparison


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Compare rankings layer by layer, then answers after pruning; at paper scale by task scores."""
    if scale == "paper":
        return measure_paper(progress)
    size, loaded = SIZES[scale], load(dtype="float32")
    ranked: list[dict[str, Agreement]] = []
    nlls: dict[str, list[list[float]]] = {"fastkv": [], "claa": [], "reference": []}
    full = []
    for n, q in enumerate(questions(loaded.tokenizer, size["prompts"], size["tokens"])):
        progress(f"prompt {n + 1} of {size['prompts']}")
        scores, r, dense = look(loaded, q)
        ranked.append(agreements(scores, r))
        full.append(dense)
        for l_p in size["prune"]:
            for name, recipe in recipes(l_p).items():
                nlls[name] = nlls[name] or [[] for _ in size["prune"]]
                guide = r if name == "reference" else None
                nlls[name][size["prune"].index(l_p)].append(pruned_nll(loaded.model, recipe, q, guide))
    return judged(scale, size, ranked, nlls, float(np.mean(full)))


def judged(scale: str, size: dict[str, Any], ranked: list[dict[str, Agreement]], nlls: dict[str, list[list[float]]],
           full: float) -> Outcome:
    """Means, and the statements about them."""
    figures = {way: {what: _mean_over_prompts(ranked, way, what) for what in ("recall", "spearman")} for way in WAYS}
    curves = {name: [float(np.mean(at)) for at in rows] for name, rows in nlls.items()}
    spread = {name: max(curve) - min(curve) for name, curve in curves.items()}
    gain = figures["max"]["recall"]["mean"] - figures["single"]["recall"]["mean"]
    jump = figures["max"]["recall"]["jump"] / max(figures["single"]["recall"]["jump"], 1e-12)
    checks = {
        f"CLAA's mean recall is at least {RECALL_GAIN} above a single layer's": gain >= RECALL_GAIN,
        f"its jump between neighbouring layers is at most {JUMP_MOST} of a single layer's": jump <= JUMP_MOST,
        "its answer NLL depends less on the pruning layer than FastKV's": spread["claa"] < spread["fastkv"],
    }
    measured: dict[str, Any] = {f"{what}, {way}": {part: round(v, 3) for part, v in figures[way][what].items()}
                                for what in ("recall", "spearman") for way in WAYS}
    of_max, of_one = ([over_layers(p[way].recall)["mean"] for p in ranked] for way in ("max", "single"))
    gains = paired(of_max, of_one, seed=SEED)
    measured |= {"recall, CLAA - single": round(gain, 3),
                 "recall, CLAA - single, 95% interval over prompts": [round(gains.lo, 3), round(gains.hi, 3)],
                 "jump, CLAA / single": round(jump, 2),
                 "answer NLL, max - min over pruning layers": {name: round(s, 3) for name, s in spread.items()},
                 "answer NLL, mean over pruning layers": {name: round(float(np.mean(c)), 3) for name, c in curves.items()},
                 "answer NLL of the full cache": round(full, 3), "prompts": len(ranked)}
    expected = {"recall, CLAA - single": f"at least {RECALL_GAIN}", "jump, CLAA / single": f"at most {JUMP_MOST}",
                "answer NLL, max - min over pruning layers": "CLAA below FastKV"}
    table: list[dict[str, Any]] = []
    for i in range(len(ranked[0]["max"].recall)):
        recall = {way: float(np.mean([p[way].recall[i] for p in ranked])) for way in WAYS}  # type: ignore[misc]
        table.append({"layer": N_LAYERS - 1 + i} | {f"recall, {way}": round(v, 4) for way, v in recall.items()})
    table += [{"l_p": l_p} | {f"answer NLL, {name}": round(curve[i], 4) for name, curve in curves.items()}
              for i, l_p in enumerate(size["prune"])]
    if scale == "smoke":
        verdict, reason = "mechanism-only", "one short prompt says nothing about means."
    else:
        verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table)


def _mean_over_prompts(ranked: list[dict[str, Agreement]], way: str, what: str) -> dict[str, float]:
    """Mean, minimum, spread and jump over layers, each averaged over prompts."""
    found = [p[way].as_json()[what] for p in ranked]
    return {part: float(np.mean([f[part] for f in found])) for part in found[0]}


def measure_paper(progress: Callable[[str], None]) -> Outcome:
    """LongBench scores at several keep rates on the paper's model."""
    folder = Path(PAPER["folder"])
    if not folder.is_dir():
        raise Refused(f"the published scores are LongBench's; expected its files (data.zip of its data set page) in ./{folder}.")
    tasks = [parse_task(f'longbench(path="{folder}", name="{name}")') for name in PAPER["tasks"]]
    loaded = load(PAPER["model"])
    chosen = [Recipe.parse("full"), *(Recipe.parse(f"{name}(rho={rho})") for rho in PAPER["rho"] for name in ("claa", "fastkv"))]
    request = Request(chosen, tasks, [PAPER["length"]], PAPER["examples"], compress="after-question")
    rows = run(loaded, request, lambda done, total, what: progress(f"{done}/{total} {what}"))
    means = {str(r): 100 * float(np.mean([row["score"] for row in rows if row["recipe"] == r.name])) for r in chosen}
    table = [{"recipe": name, "score": score} for name, score in means.items()]
    pairs = {rho: [str(Recipe.parse(f"{name}(rho={rho})")) for name in ("claa", "fastkv")] for rho in PAPER["rho"]}
    checks = {f"rho={rho}: CLAA above FastKV": means[claa] > means[fastkv] for rho, (claa, fastkv) in pairs.items()}
    verdict, reason = by_checks(checks)
    return Outcome({n: round(m, 1) for n, m in means.items()}, {"CLAA": "1 to 3 points above FastKV; TriviaQA 92.4"}, checks,
                   verdict, reason, [0], table)


EXPERIMENT = Experiment(
    id="claa", system="claa", run=measure,
    claim="Ranking prompt tokens by the maximum of several layers' attention agrees better with what the answer attends to than "
          "a single layer does, jumps less from layer to layer, and makes pruning depend less on the layer where it happens.",
)
