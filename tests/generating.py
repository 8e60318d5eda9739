"""Unchanged `generate` on tiny models, without an end token, so that every run is as long as asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def new_tokens(model: Any, ids: Tensor, n: int = 8, **more: Any) -> list[list[int]]:
    """The tokens that `generate` adds, row by row; greedy unless told otherwise."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | more
    out = model.generate(ids, max_new_tokens=n, **options)
    out = out if isinstance(out, Tensor) else out.sequences
    return out[:, ids.shape[1] :].tolist()


def left_padded(*rows: Tensor, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts (1,n) of several lengths as one left-padded batch: ids and attention mask."""
    longest = max(r.shape[1] for r in rows)
    ids = torch.cat([torch.nn.functional.pad(r, (longest - r.shape[1], 0), value=pad) for r in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (longest - r.shape[1], 0)) for r in rows])
    return ids, mask


def check_generate(model: Any, ids: Tensor) -> None:
    """`generate` writes what uncached forwards would, greedily and with beams."""
    plain = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    want = ids
    for _ in range(6):
        want = torch.cat((want, model(want, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(ids, max_new_tokens=6, **plain), want)
    beams = {"max_new_tokens": 5, "num_beams": 3} | plain
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))
