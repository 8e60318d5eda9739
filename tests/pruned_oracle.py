"""The plain oracle of pruned prompts: everything is computed, and what was dropped or evicted is masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from masked_oracle import positions_of
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from longspan.models import Prompt


@dataclass
class _Masks:
    """Which keys, (B,H,N), rows of the prompt and rows after it may see, by layer."""

    prompt: int
    reading: list[Tensor]
    later: list[Tensor]


_now: list[_Masks] = []


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float,
               **_: Any) -> tuple[Tensor, None]:
    masks, layer = _now[-1], module.layer_idx
    group, N = q.shape[1] // k.shape[1], k.shape[2]
    slots = torch.arange(N)
    allowed = torch.where((slots < masks.prompt)[:, None], masks.reading[layer][:, :, None], masks.later[layer][:, :, None])
    allowed = (allowed & (slots <= slots[:, None])).repeat_interleave(group, 1)
    scores = q.double() @ k.double().repeat_interleave(group, 1).mT * scaling
    attention = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (attention @ v.double().repeat_interleave(group, 1)).float().transpose(1, 2).contiguous(), None


AttentionInterface.register("pruned_oracle", _attention)
AttentionMaskInterface.register("pruned_oracle", lambda **_: None)


@torch.no_grad()
def read_pruned(run: Any, model: Any, ids: Tensor, prompt: int, mask: Tensor | None = None, *, pieces: list[int] | None = None,
                cache: Any = None) -> tuple[Tensor, Any]:
    """Logits of the last prompt row and of all rows after it, teacher forced under a recipe, and the cache. Dropped rows have
    no logits, so those of the first forward are counted from its end.

    Args:
        pieces: how many tokens each forward takes, the first one at least the prompt.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    cache = cache or run.new_cache(Prompt(ids[:, :prompt], prompt))
    found, at = [], 0
    for n in pieces or [prompt] + [1] * (ids.shape[1] - prompt):
        part = slice(at, at + n)
        out = model(input_ids=ids[:, part], attention_mask=None if mask is None else real[:, : at + n],
                    position_ids=positions_of(real)[:, part], past_key_values=cache, use_cache=True).logits
        found.append(out if at else out[:, -(n - prompt + 1) :])
        at += n
    return torch.cat(found, 1), cache


@torch.no_grad()
def pruned_logits(model: Any, cache: Any, ids: Tensor, prompt: int, last: int, mask: Tensor | None = None) -> Tensor:
    """Logits (B,N,V) of the whole text. Layers after `last` see no prompt token that `cache` hasn't kept; the other layers
    see all of the prompt while it is read, and what the cache has kept of it afterwards."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    (B, N), pads = ids.shape, (~real).sum(1)
    reading, later = [], []
    for layer in cache.policy_layers:
        view = layer.store.view()
        slot = torch.where(view.valid, view.positions.long() + pads[:, None, None], N)
        kept = torch.zeros(B, view.k.shape[1], N + 1, dtype=torch.bool).scatter(-1, slot, True)[..., :N]
        kept[..., prompt:] = True
        everything = real[:, None].expand_as(kept)
        reading.append(kept if layer.layer > last else everything)
        later.append(kept)
    before = model.config._attn_implementation_internal
    _now.append(_Masks(prompt, reading, later))
    model.config._attn_implementation_internal = "pruned_oracle"
    try:
        return model(input_ids=ids, position_ids=positions_of(real), use_cache=False).logits
    finally:
        model.config._attn_implementation_internal = before
        _now.pop()
