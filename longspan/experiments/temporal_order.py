"""Does one head bring back when things were read, and do order judgements need it?

First a model trained here from nothing (`longspan.experiments.ordering`), with learned absolute positions and again with
rotary ones: the head that tells time best is found, its code's dimension is measured, and it is ablated, erased and steered.

Then the bundled model on texts of plain sentences: which of two segments came first, by distance, with the text, without it,
and with blocks of its sentences shuffled; and the map of time information over its heads. A model of this size is expected
near chance; what has to hold are the invariances, and chance without the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from longspan.evaluation.order import (
    Margins,
    Pair,
    ask,
    averaging,
    changed,
    dimension_share,
    find_heads,
    find_segments,
    opened,
    prepare,
    recorded,
    sample_pairs,
    shuffled,
    steer,
    suffix,
    summary,
    time_code,
    time_map,
)
from longspan.evaluation.order.asking import Asked, by_head
from longspan.evaluation.order.heads import Heads
from longspan.evaluation.order.information import TimeCode, r2
from longspan.evaluation.order.prompts import Prepared, orders
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.hidden import plain_prose
from longspan.experiments.ordering import Course, fit, interventions, knowledge
from longspan.models import Loaded, load
from longspan.registry import Refused

SEED, WORDS, BLOCK = 0, 20, 4
ARMS = {"absolute": True, "rope": False}
LEAST = {"accuracy": 0.98, "R2": 0.9, "dimension share": 0.8, "random directions, mean": 0.95}
MOST = {"head ablated": 0.6, "exact erasure": 0.6}
OTHER_HEADS, EXCEPT, ABSENT, SAME = 0.95, 2, 0.13, 1e-4
"""Accuracy that every other ablated head but two leaves; how far from 0.5 accuracy without the text may be; logits."""
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"course": Course(steps=8, batch=8, read=24, judge=16, permutations=4, every=4), "arms": ["rope"],
              "texts": 1, "tokens": 260, "pairs": 1, "shuffled": 0, "foils": 0},
    "small": {"course": Course(), "arms": list(ARMS), "texts": 5, "tokens": 2000, "pairs": 12, "shuffled": 6, "foils": 3},
}
Part = tuple[dict[str, Any], dict[str, bool], list[dict[str, Any]]]
"""Figures, what has to hold, and rows."""
EXPECTED: dict[str, Any] = {
    "absolute / rope": {"R2": [0.986, 0.980], "dimension share": [0.92, 0.998], "head ablated": [0.50, 0.50],
                        "exact erasure": [0.505, 0.498], "orthogonal removal": [0.94, 0.99],
                        "random directions, mean": [0.999, 1.0]},
    "rope, step 600, by distance 1, 2-3, 4-7, 8-15": [0.56, 0.61, 0.79, 0.94],
    "bundled model": "near chance at short distances; without the text within 0.13 of 0.5",
}


# ----------------------------------------------------------------------------------------------------- the model trained here


def trained(size: dict[str, Any], progress: Callable[[str], None]) -> Part:
    """Every arm's figures, what has to hold of them, and accuracy by distance while they learn."""
    measured: dict[str, Any] = {}
    checks: dict[str, bool] = {}
    rows = []
    for arm in size["arms"]:
        progress(f"training, {arm} positions")
        model, course = fit(size["course"], ARMS[arm], SEED, lambda what, arm=arm: progress(f"{arm}, {what}"))  # type: ignore[misc]
        known = knowledge(model, size["course"], SEED)
        found = known.found | interventions(model, known, size["course"], SEED)
        partial = [row for row in course if row["accuracy"] >= 0.6]
        found["by distance while partial"] = partial[0] if partial else None
        measured[arm] = found
        checks |= {f"{arm}: {name} at least {least}": found[name] >= least for name, least in LEAST.items()}
        checks |= {f"{arm}: {name} at most {most}": found[name] <= most for name, most in MOST.items()}
        weak = [name for name, value in found["other heads ablated"].items() if value < OTHER_HEADS]
        checks[f"{arm}: all but {EXCEPT} other heads leave {OTHER_HEADS}"] = len(weak) <= EXCEPT
        rows += [{"part": "training", "arm": arm} | row for row in course]
    return measured, checks, rows


# ---------------------------------------------------------------------------------------------------------- the bundled model


def texts(count: int, tokens: int, tokenizer: Any) -> tuple[list[list[str]], list[str]]:
    """Stretches of different sentences, `tokens` or a little more each, and the sentences left over."""
    prose, found = list(dict.fromkeys(plain_prose())), []
    for _ in range(count):
        body: list[str] = []
        length = 0
        while length < tokens:
            body.append(prose.pop(0))
            length += len(tokenizer(" " + body[-1], add_special_tokens=False)["input_ids"])
        found.append(body)
    return found, prose


def pairs_of(tokenizer: Any, sentences: list[str], count: int, rng: random.Random) -> tuple[Prepared, list[Pair]]:
    """A text made ready, and pairs of its segments."""
    ready = prepare(tokenizer, " ".join(sentences))
    return ready, sample_pairs(find_segments(ready.text, WORDS, ready.starts), ready.n, count, rng)


def joined(found: list[Asked]) -> Margins:
    return Margins(*(np.concatenate([getattr(one.margins, name) for one in found]) for name in ("d1", "d2")))


def told(found: list[Asked], pairs: list[list[Pair]]) -> dict[str, Any]:
    """The summary over all texts."""
    flat = [p for own in pairs for p in own]
    index = np.repeat(np.arange(len(pairs)), [len(own) for own in pairs])
    return summary(joined(found), np.array([p.distance for p in flat]), np.array([p.bin for p in flat]), index)


def bundled(size: dict[str, Any], progress: Callable[[str], None]) -> Part:
    """Order judgements of the bundled model, the map of its heads, and the invariances."""
    loaded = load(dtype="float32")
    heads, rng = find_heads(loaded.model), random.Random(f"temporal-order/{SEED}")
    bodies, rest = texts(size["texts"], size["tokens"], loaded.tokenizer)
    asked: dict[str, list[Asked]] = {"text": [], "no text": [], "shuffled": []}
    of: dict[str, list[list[Pair]]] = {name: [] for name in asked}
    for i, body in enumerate(bodies):
        progress(f"bundled model, text {i + 1} of {len(bodies)}")
        ready, pairs = pairs_of(loaded.tokenizer, body, size["pairs"], rng)
        asked["text"].append(ask(loaded, ready, pairs, heads=heads))
        asked["no text"].append(ask(loaded, prepare(loaded.tokenizer, ""), pairs))
        of["text"].append(pairs)
        of["no text"].append(pairs)
        if not i:
            difference, moved = invariances(loaded, heads, ready, pairs[0])
        if size["shuffled"]:
            other, mixed = pairs_of(loaded.tokenizer, shuffled(body, BLOCK, rng), size["shuffled"], rng)
            asked["shuffled"].append(ask(loaded, other, mixed))
            of["shuffled"].append(mixed)
    measured: dict[str, Any] = {name: told(found, of[name]) for name, found in asked.items() if found}
    absent = measured["no text"]["accuracy"]
    checks = {f"over the cached text logits are those of a full prefill to {SAME}": difference <= SAME,
              "steering by 0 changes no logit": moved == 0.0,
              f"without the text accuracy is within {ABSENT} of 0.5": abs(absent - 0.5) <= ABSENT}
    measured["largest difference of logits to a full prefill"] = difference
    if size["foils"]:
        progress("bundled model, time map")
        measured["time"] = head_map(loaded, heads, asked["text"], of["text"], bodies, rest, size["foils"])
    rows = [{"part": "bundled", "asked": name} | row for name in measured if isinstance(measured[name], dict)
            for row in measured[name].get("by distance", [])]
    return measured, checks, rows


@torch.inference_mode()
def invariances(loaded: Loaded, heads: Heads, text: Prepared, pair: Pair) -> tuple[float, float]:
    """The largest difference of logits between a question over the cached text and a full prefill, and what
    steering by 0 changes."""
    question = suffix(loaded.tokenizer, orders(pair)[0])
    code = TimeCode(torch.ones(heads.head_dim), torch.ones(heads.head_dim), torch.zeros(heads.head_dim), 0.0, 1.0)
    places = torch.zeros(1, len(question.ids), dtype=torch.bool)
    places[0, question.spans[0][0] : question.spans[0][1]] = True
    with opened(loaded, text.ids) as reader:
        over = reader.logits(question.ids)
        with changed(heads, len(heads.projections) // 2, 0, steer(code, 0.0), places):
            steered = reader.logits(question.ids)
    whole = loaded.model(torch.tensor([text.ids + question.ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return float((over - whole).abs().max()), float((steered - over).abs().max())


def head_map(loaded: Loaded, heads: Heads, found: list[Asked], pairs: list[list[Pair]], bodies: list[list[str]], rest: list[str],
             foils: int) -> dict[str, Any]:
    """Time information of all heads at the copies and at the originals, and the best head's code on foils."""
    copies = torch.cat([one.copies for one in found if one.copies is not None], 2)
    originals = torch.cat([one.originals for one in found if one.originals is not None], 2)
    count = sum(len(own) for own in pairs)
    tau = torch.tensor([t for own in pairs for p in own for t in p.times], dtype=torch.float64)
    text_of = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor([2 * len(own) for own in pairs]))
    retrieval = time_map(copies, tau, text_of, count, seed=SEED)
    encoding = time_map(originals, tau, text_of, count, 0, SEED)
    best = copies[retrieval.layer, retrieval.head]
    code = time_code(best, tau, text_of, SEED)
    unseen, drawn = foil_outputs(loaded, heads, bodies, rest, foils)
    top = retrieval.r2.flatten().topk(5)
    return {"best head": [retrieval.layer, retrieval.head], "R2": retrieval.best, "chance": retrieval.chance,
            "exceeds chance": retrieval.reinstates,
            "dimension share": dimension_share(best, tau, seed=SEED, units=torch.arange(len(tau)) // 2),
            "five best": {f"{i // heads.n_heads}.{i % heads.n_heads}": round(x, 3)
                          for i, x in zip(top.indices.tolist(), top.values.tolist(), strict=True)},
            "R2 of foils": r2(code.decode(unseen[retrieval.layer, retrieval.head]), drawn),
            "encoding: best head": [encoding.layer, encoding.head], "encoding: R2": encoding.best,
            "retrieval map": [[round(x, 2) for x in row] for row in retrieval.r2.tolist()]}


def foil_outputs(loaded: Loaded, heads: Heads, bodies: list[list[str]], rest: list[str],
                 each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Head outputs over segments that no text holds, and times drawn for them."""
    rng = random.Random(f"temporal-order/foils/{SEED}")
    strange = " ".join(rest)
    segments = find_segments(strange, WORDS)
    outputs = []
    for body in bodies:
        ready = prepare(loaded.tokenizer, " ".join(body))
        with opened(loaded, ready.ids) as reader:
            for a, b in (rng.sample(segments, 2) for _ in range(each)):
                question = suffix(loaded.tokenizer, (a.text, b.text, True))
                with recorded(heads, averaging([question.spans], len(question.ids))) as noted:
                    reader.logits(question.ids)
                outputs.append(by_head(noted))
    found = torch.cat(outputs, 2)
    return found, torch.tensor([rng.random() for _ in range(found.shape[2])], dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------------- the experiment


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Both parts."""
    if scale == "paper":
        raise Refused("the published figures need Llama-3.1-8B and 70B on a whole novel and answers of people; ask `longspan "
                      "compare -t temporal-order` with such a model on a machine for it.")
    size = SIZES[scale]
    measured, checks, rows = trained(size, progress)
    of_model, holds, more = bundled(size, progress)
    checks |= holds
    if scale == "smoke":
        verdict, reason = "mechanism-only", "a few steps teach nothing; only the machinery is tried."
    else:
        verdict, reason = by_checks(checks)
        if verdict == "reproduced":
            verdict, reason = "mechanism-only", ("the head, its one-dimensional code and what erasing it does are shown in a "
                                                 "model trained here, not the order judgements of large models and people.")
    return Outcome(measured | {"bundled": of_model}, EXPECTED, checks, verdict, reason, [SEED], rows + more)


EXPERIMENT = Experiment(
    id="temporal-order", system="temporal-order", run=measure,
    claim="A single head brings back when a segment was read, in a one-dimensional code that order judgements need.",
)
