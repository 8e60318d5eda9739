"""Do a head's weights alone tell whether it finds far-away needles?

Frequency kernels rank all heads without data. Then sentences such as "The best thing to do in Paris is juggle." are
hidden in docstrings, and the prompt ends with the same sentence's beginning. A head succeeds on a prompt if the token
that the answer starts with is among the ten it attends to most. Scores must go along with the heads' success rates, the
best heads must be ones that succeed, and silencing them must lose the needles, which silencing random ones must not.

Beside the claim it is measured what the ranking is good for as a budget: the same score keeps the same number of entries
before the question is known, once evenly and once with the best heads keeping everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.context import Context
from longspan.evaluation.texts import load_text
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import LayerCall, find_parts, load
from longspan.models.frequency_kernels import (
    HeadScores,
    best_heads,
    energy_scores,
    head_scores,
    kernel_energy,
    rotary_rows,
    rotation,
)
from longspan.recipe import Recipe
from longspan.weights.base import WeightTransform
from longspan.weights.head_ablation import HeadAblation
from longspan.weights.head_enhancement import HeadEnhancement

PLACES = {"Paris": "juggle", "Rome": "paint", "Tokyo": "dance", "Cairo": "swim", "Lima": "sing", "Oslo": "ski", "Delhi": "read",
          "Boston": "cook"}
"""Cities, and the best thing to do there."""
TOP = 10
"""Heads that are looked at and silenced, and places of a head's attention that count as success."""
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"model": None, "text": "pydoc", "cities": 2, "depths": [0.5], "tokens": 90, "distance": -4096, "random": 1},
    "small": {"model": None, "text": "docstrings", "cities": 8, "depths": [0.2, 0.5], "tokens": 700, "distance": -4096,
              "random": 3},
    "paper": {"model": "meta-llama/Llama-3.2-3B-Instruct", "text": "docstrings", "cities": 4,
              "depths": [i / 10 for i in range(10)], "tokens": 65_536, "distance": -32_768, "random": 3},
}
EVEN, BY_HEADS = "h2o(budget=0.3)", "h2o @ long-context-heads(budget=0.3, distance={distance})"
SEED = 11


@dataclass(frozen=True)
class Needle:
    """A prompt, and where its answer starts."""

    ids: list[int]
    answer: int
    """The answer's first token."""
    at: int
    """Where it stands in the prompt."""
    cut: int
    """Where the text ends and the repeated beginning starts."""


def needles(tokenizer: Any, text: str, cities: int, depths: list[float], tokens: int) -> list[Needle]:
    """One prompt for every city and depth."""
    sentences = load_text(text).sentences

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    found = []
    for city, verb in list(PLACES.items())[:cities]:
        stem, answer = f"The best thing to do in {city} is", ids(f" {verb}")
        for depth in depths:
            rng = random.Random(f"long-context-heads/{SEED}/{city}/{depth}")
            start, n = rng.randrange(len(sentences)), 0
            before: list[int] = []
            after: list[int] = []
            while len(before) + len(after) < tokens:
                piece = ids(" " + sentences[(start + n) % len(sentences)])
                (before if len(before) < depth * tokens else after).extend(piece)
                n += 1
            before = [*before, *ids(" " + stem)]
            bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
            text_ids = [*bos, *before, *answer, *ids("."), *after]
            found.append(Needle(text_ids + ids("\n\n" + stem), answer[0], len(bos) + len(before), len(text_ids)))
    return found


@torch.inference_mode()
def look_up(model: Any, needle: Needle) -> tuple[Tensor, float, bool]:
    """Which heads have the answer among their ten largest weights at the last position, (layers, heads); the answer's
    log-probability; whether it is the most likely token."""
    hits: list[Tensor] = []
    with Recipe().on(model) as active:
        plain = active.attend

        def attend_and_look(call: LayerCall) -> Tensor:
            q = call.q[0, :, -1].unflatten(0, (call.k.shape[1], -1)).float()
            logits = (q @ call.k[0].float().mT).flatten(0, 1)
            hits.append((logits.topk(TOP, -1).indices == needle.at).any(-1))
            return plain(call)

        active.attend = attend_and_look  # type: ignore[method-assign]
        out = model(input_ids=torch.tensor([needle.ids], device=model.device), use_cache=False, logits_to_keep=1)
    logprobs = out.logits[0, -1].float().log_softmax(-1)
    return torch.stack([h.cpu() for h in hits]), float(logprobs[needle.answer]), int(logprobs.argmax()) == needle.answer


def under(model: Any, transform: WeightTransform | None, prompts: list[Needle]) -> dict[str, Any]:
    """Success rate of every head, accuracy and mean log-probability while the model's weights are changed."""
    with transform.on(model) if transform is not None else nullcontext():
        seen = [look_up(model, prompt) for prompt in prompts]
    return {"success": torch.stack([hits for hits, _, _ in seen]).float().mean(0),
            "logprob": float(np.mean([logprob for _, logprob, _ in seen])),
            "accuracy": float(np.mean([right for _, _, right in seen]))}


def kept_logprob(loaded: Any, recipe: Recipe, prompts: list[Needle]) -> float:
    """Mean log-probability of the answer when the text is compressed before the question is read."""
    contexts = ((Context.from_ids(loaded, p.ids[: p.cut], recipe), p) for p in prompts)
    return -float(np.mean([context.nlls(p.ids[p.cut :], [p.answer])[0] for context, p in contexts]))


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Score the heads, look needles up, silence heads."""
    size = SIZES[scale]
    loaded = load(size["model"], dtype="float32" if size["model"] is None else None)
    model, tokenizer = loaded
    parts = find_parts(model)
    scores = head_scores(parts, size["distance"])
    prompts = needles(tokenizer, size["text"], size["cities"], size["depths"], size["tokens"])
    progress(f"{len(prompts)} prompts of about {size['tokens']} tokens")
    plain = under(model, None, prompts)
    changed: dict[str, dict[str, Any]] = {"nothing": plain}
    progress("without the best heads")
    changed["best heads silenced"] = under(model, HeadAblation(heads=TOP, distance=size["distance"]), prompts)  # type: ignore[call-arg]
    for seed in range(size["random"]):
        progress(f"without random heads, draw {seed + 1} of {size['random']}")
        chance = HeadAblation(heads=TOP, score="random", seed=seed)  # type: ignore[call-arg]
        changed[f"random heads silenced, draw {seed + 1}"] = under(model, chance, prompts)
    progress("with the best heads enhanced")
    changed["best heads enhanced"] = under(model, HeadEnhancement(heads=TOP, distance=size["distance"]), prompts)  # type: ignore[call-arg]
    progress("with 30 % of the cache")
    recipes = (EVEN, BY_HEADS.format(distance=size["distance"]))
    kept = {text: kept_logprob(loaded, Recipe.parse(text), prompts) for text in recipes}
    return judged(scale, scores, reversed_s_dist(parts, size["distance"]), changed, kept)


def reversed_s_dist(parts: Any, distance: int) -> Tensor:
    """s_dist with the frequency axis the wrong way round: what a mistaken order of pairs would give."""
    found = []
    for layer in range(parts.n_layers):
        wq, wk = rotary_rows(parts, layer)
        found.append(energy_scores(kernel_energy(wq, wk, *rotation(parts, layer, distance, wq)).flip(-1))[0])
    return torch.stack(found)


def pearson(a: Tensor, b: Tensor) -> float:
    """Correlation over all heads."""
    return float(np.corrcoef(a.flatten().double().cpu().numpy(), b.flatten().double().cpu().numpy())[0, 1])


def judged(scale: str, scores: HeadScores, backwards: Tensor, changed: dict[str, dict[str, Any]],
           kept: dict[str, float]) -> Outcome:
    """Correlations, the best heads' success, what silencing does."""
    success = changed["nothing"]["success"]
    along = {name: pearson(getattr(scores, name), success) for name in ("rps", "lps", "s_dist", "s_erank", "sym")}
    along["s_dist, frequencies reversed"] = pearson(backwards, success)
    best = {name: best_heads(scores.by(name))[:TOP] for name in ("rps", "lps")}
    best_success = {name: float(np.mean([float(success[head]) for head in heads])) for name, heads in best.items()}
    draws = [line["accuracy"] for name, line in changed.items() if name.startswith("random")]
    checks = {
        "rps goes along with success (Pearson at least 0.52)": along["rps"] >= 0.52,
        "s_dist goes along with success (Pearson at least 0.4)": along["s_dist"] >= 0.4,
        f"the {TOP} best heads by rps succeed (at least 0.7)": best_success["rps"] >= 0.7,
        "without them needles are lost (accuracy at most 0.2)": changed["best heads silenced"]["accuracy"] <= 0.2,
        "without random heads they are not (at least 0.6)": float(np.mean(draws)) >= 0.6,
    }
    table = [{"weights": name, "accuracy": line["accuracy"], "answer_logprob": line["logprob"],
              "mean head success": float(line["success"].mean())} for name, line in changed.items()]
    measured = {"pearson with success": {name: round(r, 3) for name, r in along.items()},
                "mean head success": round(float(success.mean()), 3),
                f"success of the {TOP} best": {name: round(s, 3) for name, s in best_success.items()},
                "best heads (layer, head)": [list(head) for head in best["rps"][:5]],
                "accuracy": {line["weights"]: round(line["accuracy"], 3) for line in table},
                "answer log-probability": {line["weights"]: round(line["answer_logprob"], 3) for line in table},
                "answer log-probability on what was kept": {text: round(found, 3) for text, found in kept.items()}}
    table += [{"recipe": text, "answer_logprob": found} for text, found in kept.items()]
    table += [{"score": name, "pearson": r, "success of the best": best_success.get(name)} for name, r in along.items()]
    expected = {"pearson with success": "rps at least 0.52, s_dist at least 0.4",
                f"success of the {TOP} best": "rps at least 0.7",
                "accuracy": "best silenced at most 0.2, random silenced at least 0.6"}
    if scale == "smoke":
        verdict, reason = "mechanism-only", "two short prompts give no success rates."
    else:
        verdict, reason = by_checks(checks)
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table)


EXPERIMENT = Experiment(
    id="long-context-heads", system="long-context-heads", run=measure,
    claim="Scores of the weights alone tell which heads find far-away needles, and needles are lost without those heads.",
)
