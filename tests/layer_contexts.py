"""Random `LayerContext`s for tests of scores and budgets: real text lengths, causal positions, a real model's rotations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny_models import tiny

from longspan.cache.base import LayerContext
from longspan.models.parts import Parts, find_parts


@functools.lru_cache(maxsize=4)
def parts_of(heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> Parts:
    return find_parts(tiny("llama", heads=heads, kv_heads=kv_heads, head_dim=head_dim))


def random_context(length: int = 20, *, rows: int = 1, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, window: int = 20,
                   pads: tuple[int, ...] = (), seed: int = 0, **more: Any) -> LayerContext:
    """`length` slots per row, of which the first ``pads[row]`` are padding; the newest `window` query rows."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    pad = torch.tensor(pads or (0,) * rows)
    real = torch.arange(length) >= pad[:, None]
    positions = (torch.arange(length) - pad[:, None]).clamp(min=0)
    window = min(window, length)
    return LayerContext(**({
        "k": draw(rows, kv_heads, length, head_dim), "v": draw(rows, kv_heads, length, head_dim),
        "valid": real[:, None].expand(rows, kv_heads, length).clone(),
        "positions": positions[:, None].expand(rows, kv_heads, length).to(torch.int32).clone(),
        "seen": real.sum(1), "q": 2 * draw(rows, heads, window, head_dim), "q_valid": real[:, length - window :],
        "q_positions": positions[:, length - window :], "scale": head_dim**-0.5, "layer": 0, "n_layers": 2,
        "parts": parts_of(heads, kv_heads, head_dim),
    } | more))


def plain_attention(x: LayerContext) -> torch.Tensor:
    """(B,Hq,w,S) softmax attention of the context's query rows, written out plainly in float64."""
    k = x.k.double().repeat_interleave(x.group, 1)
    scores = x.q.double() @ k.mT * x.scale
    allowed = (x.positions[:, :1, None] <= x.q_positions[:, None, :, None]) & x.valid[:, :1, None]
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) * x.q_valid[:, None, :, None]
