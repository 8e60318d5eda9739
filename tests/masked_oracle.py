"""The masked dense oracle: attention over everything ever read, in which evicted entries are masked.

`watch_compressions` notes what every layer still holds after each compression; `oracle_logits` then reads the whole
text once, plainly, and hides from every row what had been evicted before it. A compressed cache must give the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from longspan.cache.layer import PolicyLayer
from longspan.models.hook import Prompt
from longspan.recipe import Recipe, Run

Log = dict[int, list[tuple[int, Any]]]
"""Per layer: tokens seen at a compression, and the view of what was held after it."""


@contextlib.contextmanager
def watch_compressions() -> Iterator[Log]:
    """Log every compression that happens inside."""
    log: Log = {}
    before = PolicyLayer.compress

    def compress(layer: PolicyLayer) -> None:
        before(layer)
        log.setdefault(layer.layer, []).append((layer.seen, layer.store.view()))

    PolicyLayer.compress = compress
    try:
        yield log
    finally:
        PolicyLayer.compress = before


@dataclass
class _Reading:
    """One oracle pass: the log, which slots are real, and whether keys and values are those held (lossy stores)."""

    log: Log
    real: Tensor
    held_values: bool
    calls: int = field(default=0)


_reading: list[_Reading] = []


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float,
               sliding_window: int | None = None, softcap: float | None = None, **_: Any) -> tuple[Tensor, None]:
    """Eager attention, float64, one stretch between two compressions at a time."""
    now = _reading[-1]
    now.calls += 1
    group, N = q.shape[1] // k.shape[1], k.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    slots = torch.arange(N)
    compressions = now.log.get(module.layer_idx, [])
    edges = [0, *(seen for seen, _ in compressions), N]
    out = torch.zeros_like(q)
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        keys, values = k, v
        allowed = (slots <= torch.arange(start, stop)[:, None]) & now.real[:, None, None, :]
        allowed = allowed.expand(-1, k.shape[1], -1, -1)
        if i:
            keep, keys, values = _held(compressions[i - 1][1], now, k, v)
            allowed = allowed & (keep | (slots >= start))[:, :, None, :]
        if sliding_window is not None:
            allowed = allowed & (torch.arange(start, stop)[:, None] - slots < sliding_window)
        scores = q[:, :, start:stop] @ keys.repeat_interleave(group, 1).mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed.repeat_interleave(group, 1), -torch.inf)
        out[:, :, start:stop] = scores.softmax(-1).nan_to_num(0.0) @ values.repeat_interleave(group, 1)
    return out.float().transpose(1, 2).contiguous(), None


def _held(view: Any, now: _Reading, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which slots are held, (B,H,N), and keys and values with what is held in its place."""
    pads = (~now.real).sum(1) if now.real.shape[1] else 0
    slot = torch.where(view.valid, view.positions.long() + pads[:, None, None], k.shape[2])
    keep = torch.zeros(*k.shape[:2], k.shape[2] + 1, dtype=torch.bool).scatter(-1, slot, True)[..., :-1]
    if not now.held_values:
        return keep, k, v
    index = slot[..., None].expand(*slot.shape, k.shape[3])
    spare = torch.zeros_like(k[:, :, :1])
    swapped = [torch.cat([t, spare], 2).scatter(2, index, held.double())[:, :, :-1] for t, held in ((k, view.k), (v, view.v))]
    return keep, *swapped


AttentionInterface.register("masked_oracle", _attention)
AttentionMaskInterface.register("masked_oracle", lambda **_: None)


@torch.no_grad()
def oracle_logits(model: Any, ids: Tensor, log: Log, mask: Tensor | None = None, *, held_values: bool = False) -> Tensor:
    """Logits (B,N,V) of the whole text, every row seeing only what had not been evicted before it."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    before = model.config._attn_implementation_internal
    _reading.append(_Reading(log, real, held_values))
    model.config._attn_implementation_internal = "masked_oracle"
    try:
        out = model(input_ids=ids, position_ids=positions_of(real), use_cache=False).logits
        assert _reading[-1].calls == model.config.num_hidden_layers
        return out
    finally:
        model.config._attn_implementation_internal = before
        _reading.pop()


def positions_of(real: Tensor) -> Tensor:
    """Position ids that count real tokens."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def forced_logits(run: Run, model: Any, ids: Tensor, prompt: int, mask: Tensor | None = None, *, pieces: list[int] | None = None,
                  cache: Any = None, spans: dict[str, list[tuple[int, int]]] | None = None) -> tuple[Tensor, Any]:
    """Logits of the last prompt row and all rows after it, teacher forced under a recipe, and the cache.

    Args:
        ids: prompt and continuation, (B,N).
        prompt: tokens of the prompt.
        pieces: how many tokens each forward after the first takes; one each by default.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    positions = positions_of(real)
    cache = cache or run.new_cache(Prompt(ids[:, :prompt], prompt, spans or {}))
    pieces = pieces or [prompt] + [1] * (ids.shape[1] - prompt)
    found, at = [], 0
    for n in pieces:
        part = slice(at, at + n)
        out = model(input_ids=ids[:, part], attention_mask=None if mask is None else real[:, : at + n],
                    position_ids=positions[:, part], past_key_values=cache, use_cache=True)
        found.append(out.logits)
        at += n
    return torch.cat(found, 1)[:, prompt - 1 :], cache


def check_against_oracle(model: Any, recipe: Recipe, ids: Tensor, prompt: int, mask: Tensor | None = None,
                         tolerance: float = 2e-4, **more: Any) -> Any:
    """Run `recipe` teacher forced and compare every row with the oracle; returns the run's cache."""
    store = recipe.cache.store if recipe.cache else None
    with watch_compressions() as log, recipe.on(model) as run:
        found, cache = forced_logits(run, model, ids, prompt, mask, **more)
    wanted = oracle_logits(model, ids, log, mask, held_values=store is not None and store.card.can("lossy"))
    torch.testing.assert_close(found, wanted[:, prompt - 1 :], atol=tolerance, rtol=tolerance)
    return cache
