"""One example under one recipe: read, compress, answer, and say what it took."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool

from longspan.context import Context, DiffusionContext, ReusedContext, open_context
from longspan.context.document import check_window
from longspan.evaluation.base import Example, Task, answer_ids, prompt_parts, token_spans
from longspan.models import Loaded
from longspan.recipe import Recipe

BEFORE, AFTER = "before-question", "after-question"
SPANS = ("documents", "shots", "turns")
"""Character ranges that examples may name, and that methods are told as ranges of tokens."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A result row, and which prompt tokens were kept."""

    row: Row
    kept: Bool[np.ndarray, "L H N"] | None = None


def measure(loaded: Loaded, recipe: Recipe, task: Task, example: Example, *, compress: str = BEFORE,
            want_kept: bool = False) -> Measured:
    """Run one example.

    The time to the first token is that of reading the context, compressing it and reading the question. The answer's
    likelihood is measured on the same compressed context, teacher forced, before anything is generated.
    """
    tokenizer = loaded.tokenizer
    parts = prompt_parts(example, tokenizer)
    wanted = answer_ids(example, tokenizer)
    check_window(loaded, len(parts.ids) + max(example.max_new_tokens, len(wanted)), "prompt and answer", recipe)
    # Compressing after the question means that the question is part of what is read before the cut.
    first, rest = (parts.context_ids, parts.question_ids) if compress == BEFORE else (parts.ids, [])
    spans = {name: token_spans(example, tokenizer, name) for name in SPANS if example.meta.get(name)}
    context = open_context(loaded, first, recipe, spans=spans)
    kept = kept_tokens(context) if want_kept else None
    nlls = context.nlls(rest, wanted, chunk=example.meta.get("stride") if example.meta.get("mode") == "streaming" else None)
    done, ttft = context.answer_ids(rest, example.max_new_tokens, stop=example.meta.get("stop", ()))
    prediction = tokenizer.decode(done.ids, skip_special_tokens=True)
    achieved = context.achieved
    timed = len(done.ids) - 1 + done.stopped
    return Measured({
        "prediction": prediction,
        "answers": json.dumps(list(example.answers), ensure_ascii=False),
        # A task that generates nothing has no score, only a likelihood.
        "score": task.metric(prediction, example) if example.max_new_tokens else None,
        "answer_nll": float(np.mean(nlls)) if nlls else None, "answer_tokens": len(nlls),
        "prompt_tokens": len(parts.ids), "context_tokens": len(parts.context_ids),
        "cache_bytes": achieved.cache_bytes, "full_cache_bytes": achieved.full_bytes,
        "kept_tokens": achieved.kept_fraction * achieved.seen,
        "ttft_s": context.read_s + ttft, "decode_s": done.seconds, "new_tokens": len(done.ids),
        "tokens_per_s": timed / done.seconds if timed > 0 and done.seconds > 0 else None,
        "depth": _depth(example), "meta": json.dumps(example.meta, ensure_ascii=False),
        "achieved": json.dumps(achieved.as_json() | done.written),
    }, kept)


def kept_tokens(context: Context | ReusedContext | DiffusionContext) -> Bool[np.ndarray, "L H N"]:
    """Which of the context's tokens each layer and KV head still holds."""
    layers = context.cache.kept_positions()
    mask = np.zeros((len(layers), len(layers[0]), len(context.ids)), dtype=bool)
    for i, heads in enumerate(layers):
        for h, positions in enumerate(heads):
            mask[i, h, positions.cpu().numpy()] = True
    return mask


def _depth(example: Example) -> float | None:
    depth = example.meta.get("depth")
    return float(depth) if isinstance(depth, (int, float)) and math.isfinite(depth) else None
