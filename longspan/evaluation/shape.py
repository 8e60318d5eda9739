"""What a model's cache takes under a recipe, from the model's shape alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan.cache.base import POSITION_BYTES, Held
from longspan.cache.stores.dense import Dense
from longspan.cache.stores.ragged import Ragged
from longspan.recipe import Recipe
from longspan.registry import Refused

CHOOSERS = ("budget", "policy")
"""Kinds of methods that decide how many entries a head keeps."""


@dataclass(frozen=True)
class Shape:
    """What a model's cache takes: layers, key-value heads, head dimension, bytes per number."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int

    def bytes(self, recipe: Recipe, context: int, rows: int = 1) -> int:
        """Bytes right after compression, for `rows` sequences of `context` tokens."""
        heads, policy = self.kv_heads * rows, recipe.cache
        if policy is None:
            return self.layers * context * (heads * 2 * self.head_dim * self.itemsize + rows * POSITION_BYTES)
        heads_differ, layers_differ = (any(m.card.can(what) for m in policy.methods if m.card.kind in CHOOSERS)
                                       for what in ("ragged", "layer-budgets"))
        store = policy.store or (Ragged() if heads_differ else Dense())
        held = Held(rows, heads, context, self.head_dim, self.itemsize, even=not heads_differ and not layers_differ)
        return round(self.layers * store.layer_bytes(self.entries(recipe, context, rows), held))

    def entries(self, recipe: Recipe, context: int, rows: int = 1) -> float:
        """Entries that a head keeps on average of `context` tokens."""
        policy = recipe.cache
        if policy is None:
            return context
        store = policy.store or Dense()
        entry = store.entry_bytes(self.head_dim, self.itemsize) + POSITION_BYTES
        return policy.expected(context, entry * self.kv_heads * rows * self.layers)


def model_shape(model: str | None, dtype: str | None) -> tuple[str, Shape, int]:
    """Name, cache shape and window of a model whose weights stay on disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from longspan.models.block_diffusion import is_block_diffusion
    from longspan.models.load import context_window, default_dtype, resolve

    folder, name = resolve(model)
    if is_block_diffusion(folder):
        raise Refused(f"{name} denoises blocks, and what its recipes cost hasn't been measured; expected a model that writes "
                      "token by token.")
    config = AutoConfig.from_pretrained(folder)
    wanted = default_dtype()[0] if dtype is None else getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise Refused(f"--dtype {dtype!r}: expected float32, bfloat16 or float16.")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=wanted)
    return name, shape_of(skeleton), context_window(skeleton)


def shape_of(model: Any) -> Shape:
    """The shape of a loaded model."""
    from longspan.models import find_parts

    parts = find_parts(model)
    return Shape(parts.n_layers, parts.n_kv_heads, parts.head_dim, parts.dtype.itemsize)
