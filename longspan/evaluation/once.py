"""Many recipes on one example from a single reading: quality and bytes, without times.

For sweeps over scores, budgets and allocators, where reading the context is most of the work and its time says nothing
about the recipes. Nothing is generated either: an answer counts as right if every one of its tokens is the likeliest in
its place, for then greedy decoding writes exactly this answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from longspan.context import read_once
from longspan.context.document import check_window
from longspan.evaluation.base import Example, answer_ids, prompt_parts, token_spans
from longspan.evaluation.measure import SPANS, Row
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused

VERBATIM = "verbatim"
"""The score's name: whether greedy decoding would write the right answer word for word."""


def measure_once(loaded: Loaded, recipes: Sequence[Recipe], example: Example) -> Iterator[tuple[Recipe, Row | Refused]]:
    """One row per recipe for an example that is compressed before its question is read; or the recipe's refusal.

    Rows look like those of `measure`; `score` is None for an example without an answer to write.
    """
    tokenizer = loaded.tokenizer
    parts, wanted = prompt_parts(example, tokenizer), answer_ids(example, tokenizer)
    check_window(loaded, len(parts.ids) + len(wanted), "prompt and answer")
    spans = {name: token_spans(example, tokenizer, name) for name in SPANS if example.meta.get(name)}
    for recipe, context in read_once(loaded, parts.context_ids, recipes, spans=spans):
        if isinstance(context, Refused):
            yield recipe, context
            continue
        nlls, likeliest = context.forced(parts.question_ids, wanted)
        held = context.achieved
        yield recipe, {
            "score": float(all(likeliest)) if example.max_new_tokens else None,
            "answer_nll": float(np.mean(nlls)), "answer_tokens": len(nlls),
            "prompt_tokens": len(parts.ids), "context_tokens": len(parts.context_ids),
            "cache_bytes": held.cache_bytes, "full_cache_bytes": held.full_bytes,
            "kept_tokens": held.kept_fraction * held.seen, "ttft_s": None, "decode_s": None, "new_tokens": 0,
            "tokens_per_s": None, "meta": json.dumps(example.meta, ensure_ascii=False),
            "achieved": json.dumps(held.as_json()),
        }
