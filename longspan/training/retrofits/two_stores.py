"""The L2A layer inside a transformers model: an attention module that is two, and a cache with two stores a layer.

A pre-norm decoder layer of transformers computes ``x + self_attn(input_layernorm(x))``. The converted layer's
``input_layernorm`` does nothing, so that ``self_attn`` sees the residual stream itself: it applies the norm, runs the
mixer of `longspan.layers.attention.l2a` with the model's own projections and rotations, and returns what both
attentions add.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from longspan.layers import PositionModule
from longspan.layers.attention.l2a import L2AModule, L2AState
from longspan.models import Parts
from longspan.registry import Refused
from longspan.training.retrofits.base import CONTEXT
from longspan.training.retrofits.remembering import RememberingCache


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


class TwoStoreCache(RememberingCache):
    """A cache of a converted model: `TwoStores` for converted layers, transformers' own for the others."""

    def __init__(self, decoder: Any):
        super().__init__(decoder)
        for layer in converted(decoder):
            self.layers[layer] = TwoStores()


def converted(decoder: Any) -> list[int]:
    """The layers of a decoder that hold two attentions."""
    return [i for i, layer in enumerate(decoder.layers) if isinstance(layer.self_attn, TwoAttentions)]


def second_projections(attention: nn.Module) -> dict[str, nn.Module]:
    """Copies of an attention's projections, the output's without a bias: a skipped token must add exactly 0."""
    made = {name: copy.deepcopy(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if getattr(made["o_proj"], "bias", None) is not None:
        made["o_proj"].bias = None  # type: ignore[assignment]
    return made

