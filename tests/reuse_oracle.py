"""Joined and repaired prompts by one masked forward of the unchanged model, for the tests of reuse.

Every context token stands in the sequence once as it was read alone (it sees its own document only) and, if it is
recomputed, once more at the same position: recomputed tokens and the suffix see the recomputed copies where there are
any and the others elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from tiny_models import tiny, tiny_ids

from longspan.cache.reuse import Piece, Reuse, assemble, read_alone
from longspan.cache.reuse.stage import parts_of
from longspan.models.profiles import model_key
from longspan.recipe import Recipe
from longspan.registry import Card

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0],
            "original_max_position_embeddings": 64, "factor": 4.0}
"""Rotary frequencies that change once a prompt is longer than 64 tokens."""
PREFIX, LENGTHS, SUFFIX = 6, (7, 20, 1, 15), 5
CONTEXT = PREFIX + sum(LENGTHS)


@functools.lru_cache(maxsize=8)
def model_of(family: str = "llama", seed: int = 0) -> Any:
    model = tiny(family, seed=seed, layers=3 if family == "llama" else 2)
    model.set_attn_implementation("eager")
    return model


def texts(prefix: int = PREFIX, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Any:
    """Random tokens: prefix, documents, suffix."""
    draw = lambda n, at: tiny_ids(1, n, seed=100 * seed + at)[0].tolist() if n else []  # noqa: E731
    return draw(prefix, 50), [draw(n, i) for i, n in enumerate(lengths)], draw(SUFFIX, 60)


def flat(documents: list[list[int]]) -> list[int]:
    return [i for document in documents for i in document]


@functools.lru_cache(maxsize=16)
def joined(family: str = "llama", prefix: int = PREFIX, lengths: tuple[int, ...] = LENGTHS, missing: tuple[int, ...] = ()) -> Any:
    """(model, assembled context, all context ids, suffix)."""
    model = model_of(family)
    first, documents, suffix = texts(prefix, lengths)
    pieces = [Piece(read_alone(model, d), known=i not in missing) for i, d in enumerate(documents)]
    head = read_alone(model, first) if first else None
    return model, assemble(parts_of(model), model_key(model), head, pieces), [*first, *flat(documents)], suffix


def allowed(edges: list[tuple[int, int]], chosen: list[int], N: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token sees which, and their positions: context as read alone, recomputed copies, suffix."""
    alone = torch.full((N,), -1)
    for i, (start, stop) in enumerate(edges):
        alone[start:stop] = i
    at = torch.cat([torch.arange(N), torch.tensor(chosen, dtype=torch.long), torch.arange(N, N + n)])
    first = torch.arange(len(at)) < N
    replaced = torch.zeros(N, dtype=torch.bool)
    replaced[chosen] = True
    old = torch.where(first, replaced[at.clamp(max=N - 1)], torch.zeros(()).bool())
    sees = at[:, None] >= at[None]
    within = first[:, None] & first[None] & (alone[at.clamp(max=N - 1)][:, None] == alone[at.clamp(max=N - 1)][None])
    across = ~first[:, None] & ~old[None]
    return sees & (within | across), at


@torch.inference_mode()
def oracle(model: Any, ids: list[int], edges: list[tuple[int, int]], chosen: list[int], suffix: list[int],
           **more: Any) -> Any:
    """The unchanged model's output over context, copies and suffix; logits of the suffix are the last rows."""
    N, n = len(ids), len(suffix)
    see, at = allowed(edges, chosen, N, n)
    tokens = torch.tensor(ids + [ids[i] for i in chosen] + suffix)
    mask = torch.where(see, 0.0, torch.finfo(torch.float32).min)[None, None]
    given: Any = mask
    types = getattr(model.config, "layer_types", None)
    if types and "sliding_attention" in types:
        near = see & (at[:, None] - at[None] < model.config.sliding_window)
        given = {"full_attention": mask, "sliding_attention": torch.where(near, 0.0, torch.finfo(torch.float32).min)[None, None]}
    return model(input_ids=tokens[None], position_ids=at[None], attention_mask=given, use_cache=False, **more)


def edges_of(context: Any) -> list[tuple[int, int]]:
    return [*([(0, context.prefix)] if context.prefix else []), *context.documents]


def method(text: str) -> Any:
    """The reuse part of a recipe."""
    return Recipe.parse(text).reuse


@dataclasses.dataclass(frozen=True)
class Fixed(Reuse):
    """The positions it is told."""

    positions: tuple[int, ...] = ()
    card = Card("fixed", "reuse", "", "tests", "", "Fixed positions.", __name__, "Fixed")

    def choose(self, x: Any) -> torch.Tensor:
        return torch.tensor(self.positions, dtype=torch.int64)


def full(model: Any, ids: list[int], suffix: list[int]) -> torch.Tensor:
    """Logits of a plain forward over everything."""
    with torch.inference_mode():
        return model(torch.tensor([ids + suffix])).logits[0]
