"""A cache of transformers that also remembers what modules of ours need: where rows stand, and states of added modules.

A retrofit whose modules read a `Context` puts `prepare` before each forward of the decoder. It replaces an empty cache of
transformers' by one of ours, says which tokens are padding, where documents begin and where each row stands, and hands
that to every layer under the keyword ``longspan_context``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache

from longspan.layers import Context, Cursor, MixerState
from longspan.models.hook import cache_keyword
from longspan.registry import Refused
from longspan.training.retrofits.base import CONTEXT


class RememberingCache(DynamicCache):
    """Keys and values as transformers holds them, where each row stands, and one state for each layer that has one."""

    def __init__(self, decoder: Any):
        super().__init__(config=decoder.config)
        self.cursor: Cursor | None = None
        self.states: dict[int, MixerState] = {}
        """What added modules remember, by layer."""

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(self.layer_bytes())

    def layer_bytes(self) -> list[int]:
        """Bytes held, layer by layer."""
        return [_layer_bytes(layer) + (self.states[i].nbytes if i in self.states else 0) for i, layer in enumerate(self.layers)]

    def reorder_cache(self, beam_idx: Int[Tensor, " B2"]) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._change(lambda state: state.reorder(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda state: state.map(lambda t: t.repeat_interleave(repeats, 0)))

    def batch_select_indices(self, indices: Int[Tensor, " B2"]) -> None:
        super().batch_select_indices(indices)
        self._change(lambda state: state.reorder(indices))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.cursor is not None:
            raise Refused(f"{type(self).__name__} can't give back the {abs(tokens_to_remove)} tokens a rollback drops, since "
                          "added modules remember them; expected generation without an assistant model.")
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.cursor, self.states = None, {}

    def _change(self, change: Callable[[Any], Any]) -> None:
        self.cursor = None if self.cursor is None else change(self.cursor)
        self.states = {layer: change(state) for layer, state in self.states.items()}


def _layer_bytes(layer: Any) -> int:
    own = getattr(layer, "nbytes", None)
    if own is not None:
        return own
    held = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(t.untyped_storage().nbytes() for t in held if t is not None)


# ------------------------------------------------------------------------------------------------------------- the hook


def prepare(
    decoder: Any, args: tuple, kwargs: dict[str, Any], kind: type[RememberingCache] = RememberingCache
) -> tuple[tuple, dict[str, Any]]:
    """Before a forward of the decoder: a cache of `kind`, and the context of the tokens given."""
    if _or_config(decoder, kwargs, "output_attentions"):
        raise Refused("output_attentions=True can't be served by a model with a retrofit; leave it out.")
    kwargs = dict(kwargs)
    cache = kwargs[cache_keyword(decoder)] = _cache(decoder, kwargs.get(cache_keyword(decoder)), kwargs, kind)
    if kwargs.get(CONTEXT) is None:
        given = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs["inputs_embeds"] if given is None else given
        kwargs[CONTEXT] = _context(given, kwargs, None if cache is None else cache.cursor)
    if cache is not None:
        cache.cursor = kwargs[CONTEXT].after
    return args, kwargs


def _cache(decoder: Any, given: Any, kwargs: dict[str, Any], kind: type[RememberingCache]) -> RememberingCache | None:
    if isinstance(given, kind):
        return given
    if given is None:
        return kind(decoder) if _or_config(decoder, kwargs, "use_cache") else None
    if type(given) is DynamicCache and not given.get_seq_length() and not given.offloading:
        return kind(decoder)
    raise Refused(f"the cache given ({type(given).__name__}) doesn't know what this model's added modules remember; expected "
                  "none, an empty DynamicCache, or one that this model made.")


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
