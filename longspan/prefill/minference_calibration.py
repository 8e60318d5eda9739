"""Finding each head's MInference pattern: the candidate that retains most of its attention on one sample.

The sample is read once, densely. For the rows after the first 2,500 tokens (or the later half of a shorter sample) the
true attention of every head is computed in strips of rows, and each candidate's share of it is summed, over single
pairs of tokens: columns and diagonals as the last queries of the sample show them, blocks of 32 by their means, an
eighth of all of them per row. Use one long sample: ``longspan profile minference --contexts 1 --length 4096``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.models import LayerCall, attached, find_parts
from longspan.models.call import plain_attention
from longspan.prefill.base import ReadContext, keep_top_k, pooled_map
from longspan.prefill.minference import CANDIDATES, Candidate
from longspan.prefill.vertical_slash import FIRST_COLUMNS, FIRST_OFFSETS, vertical_slash_scores
from longspan.registry import Refused

FIRST_ROW = 2500
STRIP = 128
"""Query rows whose full attention is held at once."""
SEARCH_BLOCK, SEARCH_SHARE = 32, 8
LEAST_TOKENS = 256
Progress = Callable[[int, int, str], None]


def train(model: Any, texts: Sequence[Sequence[int]], methods: Iterable[Any], found: dict[str, Tensor], *, again: bool = False,
          seed: int = 0, progress: Progress | None = None) -> dict[str, Tensor]:
    """Patterns (N,Hq) as places in `CANDIDATES`, and the share of attention that each retains, "retained" (N,Hq,candidates).

    Args:
        texts: token ids; the longest is the sample.

    Raises:
        Refused: no sample of at least 256 tokens.
    """
    if "pattern" in found and not again:
        return found
    sample = max(texts, key=len, default=())
    if len(sample) < LEAST_TOKENS:
        raise Refused(f"a sample of {len(sample)} tokens shows no patterns; expected at least {LEAST_TOKENS}, better 4096.")
    settings = next(iter(methods)).profile_settings()
    watching = _Watching(settings["last_q"], len(sample) / settings["scaled_to"], find_parts(model).n_layers, progress)
    with attached(model, watching) as parts, torch.no_grad():
        parts.decoder(input_ids=torch.tensor([list(sample)], device=model.device), use_cache=False)
    retained = torch.stack([watching.found[layer] for layer in range(parts.n_layers)])
    if progress is not None:
        progress(parts.n_layers, parts.n_layers, "")
    return {"pattern": retained.argmax(-1), "retained": retained}


class _Watching:
    """Reads as the plain model does, and weighs the candidates in every layer."""

    needs_hidden = False

    def __init__(self, last_q: int, share: float, n_layers: int, progress: Progress | None) -> None:
        self.last_q, self.share, self.n_layers, self.progress = last_q, share, n_layers, progress
        self.found: dict[int, Tensor] = {}

    def attend(self, call: LayerCall) -> Tensor:
        if self.progress is not None:
            self.progress(call.layer, self.n_layers, f"layer {call.layer}")
        x = ReadContext(call.q, call.k, call.v, call.scale)
        self.found[call.layer] = retained_attention(x, self.last_q, self.share).cpu()
        return plain_attention(call.q, call.k, call.v, call.padding, call.scale, call.window, call.softcap)

    def new_cache(self, prompt: Any) -> Any:
        raise AssertionError("the sample is read without a cache")

    def owns(self, cache: Any) -> bool:
        return False

    def before_generate(self, arguments: dict[str, Any]) -> None:
        """Nothing is generated."""

    def left(self) -> None:
        """Nothing is held."""


def retained_attention(x: ReadContext, last_q: int, share: float) -> Float[Tensor, "Hq candidates"]:
    """Share of the attention of the judged rows of one sequence (B = 1) that each candidate's pairs hold."""
    S = x.k_len
    first = min(FIRST_ROW, S // 2)
    masks = [pairs_of(candidate, x, last_q, share) for candidate in CANDIDATES]
    total = x.q.new_zeros(x.heads, len(CANDIDATES), dtype=torch.float32)
    for start in range(first, S, STRIP):
        rows = torch.arange(start, min(start + STRIP, S), device=x.q.device)
        weights = _attention(x, rows)
        total += torch.stack([weights.masked_fill(~mask(rows), 0.0).sum((-1, -2)) for mask in masks], -1)
    return total / (S - first)


def _attention(x: ReadContext, rows: Tensor) -> Float[Tensor, "Hq r S"]:
    queries = x.q[0, :, rows].float().reshape(x.k.shape[1], -1, x.q.shape[-1]) * x.scale
    logits = (queries @ x.k[0].float().mT).view(x.heads, len(rows), x.k_len)
    return logits.masked_fill(torch.arange(x.k_len, device=rows.device) > rows[:, None], -torch.inf).softmax(-1)


Mask = Callable[[Tensor], Bool[Tensor, "#Hq r S"]]


def pairs_of(candidate: Candidate, x: ReadContext, last_q: int, share: float) -> Mask:
    """The candidate's pairs as a function of query rows; pairs after the query don't matter and may be true."""
    keys = torch.arange(x.k_len, device=x.q.device)
    one, other = (min(size, x.k_len) for size in candidate.scaled(share))
    if candidate.pattern == "a-shape":
        return lambda rows: ((keys < one) | (rows[:, None] - keys < other))[None]
    if candidate.pattern == "vertical-slash":
        columns, offsets = vertical_slash_scores(x, last_q)
        best = keep_top_k(columns[0].masked_fill(keys < FIRST_COLUMNS, torch.inf), one)
        near = keep_top_k(offsets[0].masked_fill(keys < FIRST_OFFSETS, torch.inf), other)
        return lambda rows: best[:, None] | near[:, (rows[:, None] - keys).clamp(min=0)]
    weights = pooled_map(x, SEARCH_BLOCK)[0]
    blocks = keep_top_k(weights, -(-weights.shape[-1] // SEARCH_SHARE))
    return lambda rows: blocks[:, rows // SEARCH_BLOCK][..., keys // SEARCH_BLOCK]


__all__ = ["pairs_of", "retained_attention", "train"]
