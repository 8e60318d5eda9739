"""The L2A layer inside a transformers model: an attention module that is two, and a cache with two stores a layer.

A pre-norm decoder layer of transformers computes ``x + self_attn(input_layernorm(x))``. The converted layer's
``input_layernorm`` does nothing, so that ``self_attn`` sees the residual stream itself: it applies the norm, runs the
mixer of `longspan.layers.attention.l2a` with the model's own projections and rotations, and returns what both
attentions add. A hook before each forward of the decoder puts a cache of ours in place of an empty one of transformers'
and says which tokens are padding, where documents begin, and where each row stands.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from longspan.layers import Context, Cursor, PositionModule
from longspan.layers.attention.l2a import L2AModule, L2AState
from longspan.models import Parts
from longspan.models.hook import cache_keyword
from longspan.registry import Refused
from longspan.training.retrofits.base import CONTEXT


class Rotary(PositionModule):
    """The rotations a transformers model computed for the tokens of this call."""

    hooks = frozenset({"rotate"})

    def __init__(self, turn: Parts, cos: Tensor, sin: Tensor):
        super().__init__()
        self.turn, self.cos, self.sin = turn, cos, sin

    def rotate(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn.rotate(q, self.cos, self.sin), self.turn.rotate(k, self.cos, self.sin)


class TwoAttentions(nn.Module):
    """Takes the place of a layer's ``self_attn``; reads the residual stream and returns what is added to it."""

    def __init__(self, norm: nn.Module, mixer: L2AModule, parts: Parts, layer_idx: int):
        super().__init__()
        self.norm, self.mixer, self.layer_idx = norm, mixer, layer_idx
        self.turn = dataclasses.replace(parts, model=None, decoder=None, layers=())  # rotations only, no second model

    def forward(
        self, hidden_states: Float[Tensor, "B T C"], position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Float[Tensor, "B T C"], None]:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        here = dataclasses.replace(
            kwargs[CONTEXT], residual=hidden_states, position=Rotary(self.turn, *position_embeddings)
        )
        store = None if cache is None else cache.layers[self.layer_idx]
        out, state = self.mixer(self.norm(hidden_states), here, None if store is None else store.state)
        if store is not None:
            store.put(state, hidden_states.shape[1])
        return out, None


class NormedProjection(nn.Module):
    """A projection whose heads are normalised one by one, as queries and keys are in Qwen3."""

    def __init__(self, projection: nn.Module, norm: nn.Module, head_dim: int):
        super().__init__()
        self.projection, self.norm, self.head_dim = projection, norm, head_dim

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T HD"]:
        return self.norm(self.projection(x).unflatten(-1, (-1, self.head_dim))).flatten(-2)


# ------------------------------------------------------------------------------------------------------------ the cache


class TwoStores(CacheLayerMixin):
    """One layer's keys and values: the local ones within the window, the global ones of every token."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: L2AState | None = None
        self.seen = 0

    def put(self, state: L2AState, new: int) -> None:
        """Hold `state`, which knows `new` more tokens."""
        self.state, self.seen, self.is_initialized = state, self.seen + new, True

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Int[Tensor, " B2"]) -> None:
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Int[Tensor, " B2"]) -> None:
        self.reorder_cache(indices)

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise Refused(f"a local store can't give back the {tokens_to_remove} tokens a rollback drops, since older ones "
                          "left its window; expected generation without an assistant model.")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("the layer fills its two stores itself")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the layer fills its two stores itself")


class TwoStoreCache(DynamicCache):
    """A cache of a converted model: `TwoStores` for converted layers, transformers' own for the others."""

    def __init__(self, decoder: Any):
        super().__init__(config=decoder.config)
        for layer in converted(decoder):
            self.layers[layer] = TwoStores()
        self.cursor: Cursor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(_layer_bytes(layer) for layer in self.layers)

    def layer_bytes(self) -> list[int]:
        """Bytes held, layer by layer."""
        return [_layer_bytes(layer) for layer in self.layers]

    def reorder_cache(self, beam_idx: Int[Tensor, " B2"]) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.cursor = None if self.cursor is None else self.cursor.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.cursor = None if self.cursor is None else self.cursor.map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Int[Tensor, " B2"]) -> None:
        super().batch_select_indices(indices)
        self.cursor = None if self.cursor is None else self.cursor.reorder(indices)

    def reset(self) -> None:
        super().reset()
        self.cursor = None


def _layer_bytes(layer: Any) -> int:
    if isinstance(layer, TwoStores):
        return layer.nbytes
    return sum(t.untyped_storage().nbytes() for t in (layer.keys, layer.values) if t is not None)


def converted(decoder: Any) -> list[int]:
    """The layers of a decoder that hold two attentions."""
    return [i for i, layer in enumerate(decoder.layers) if isinstance(layer.self_attn, TwoAttentions)]


# ------------------------------------------------------------------------------------------------------------- the hook


def prepare(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a forward of the decoder: the cache, and the context of the tokens given."""
    if _or_config(decoder, kwargs, "output_attentions"):
        raise Refused("output_attentions=True can't be served by a model with two attentions a layer; leave it out.")
    kwargs = dict(kwargs)
    cache = kwargs[cache_keyword(decoder)] = _cache(decoder, kwargs.get(cache_keyword(decoder)), kwargs)
    if kwargs.get(CONTEXT) is None:
        given = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs["inputs_embeds"] if given is None else given
        kwargs[CONTEXT] = _context(given, kwargs, None if cache is None else cache.cursor)
    if cache is not None:
        cache.cursor = kwargs[CONTEXT].after
    return args, kwargs


def _cache(decoder: Any, given: Any, kwargs: dict[str, Any]) -> TwoStoreCache | None:
    if isinstance(given, TwoStoreCache):
        return given
    if given is None:
        return TwoStoreCache(decoder) if _or_config(decoder, kwargs, "use_cache") else None
    if type(given) is DynamicCache and not given.get_seq_length() and not given.offloading:
        return TwoStoreCache(decoder)
    raise Refused(f"the cache given ({type(given).__name__}) doesn't know local and global stores; expected none, an empty "
                  "DynamicCache, or one that this model made.")


def _context(tokens: Tensor, kwargs: dict[str, Any], before: Cursor | None) -> Context:
    """Padding from the 2-D mask; packed documents where, without a mask, position ids start again."""
    (B, T), mask, positions = tokens.shape[:2], kwargs.get("attention_mask"), kwargs.get("position_ids")
    valid = segments = None
    if mask is not None:
        if mask.ndim != 2:
            raise Refused(f"attention_mask of shape {tuple(mask.shape)}: expected (rows, tokens), 1 for real tokens.")
        valid = mask[:, -T:].bool()
        if bool(valid.all()):
            valid = None
    elif positions is not None and before is None and T > 1:
        jumps = positions.diff(dim=1) != 1
        if bool(jumps.any()):
            segments = nn.functional.pad(jumps.cumsum(1), (1, 0)).expand(B, T)
    return Context.of(B, T, valid=valid, segments=segments, before=before, device=tokens.device)


def _or_config(decoder: Any, kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name, False) if value is None else value)


def second_projections(attention: nn.Module) -> dict[str, nn.Module]:
    """Copies of an attention's projections, the output's without a bias: a skipped token must add exactly 0."""
    made = {name: copy.deepcopy(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if getattr(made["o_proj"], "bias", None) is not None:
        made["o_proj"].bias = None  # type: ignore[assignment]
    return made

