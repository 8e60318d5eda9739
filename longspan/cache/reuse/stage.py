"""One forward in which a stage of the engine answers every layer's attention call.

A stage is an object with ``attend(call)``. The model runs unchanged under the attention hook: its layers hand their new
keys and values to a cache that keeps nothing, and the hook hands each call to the stage. Tokens may stand at any
positions, in any order: the stage masks by position, never by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from longspan.kernels import attend
from longspan.models.call import LayerCall
from longspan.models.hook import attached, cache_keyword
from longspan.models.parts import Parts

ROWS = 256
"""Query rows whose mask is held at once."""


class Stage(Protocol):
    """What one forward does at each layer's attention."""

    def attend(self, call: LayerCall) -> Float[Tensor, "1 Hq T D"]: ...


class Enough(Exception):
    """Raised by a stage that has seen what it wanted: the layers above are not run."""


class StageLayer(CacheLayerMixin):
    """A cache layer that keeps nothing and marks what passes through it as its stage's."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        marked = key_states.view_as(key_states)
        marked._longspan = self  # type: ignore[attr-defined]
        return marked, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StageCache(Cache):
    """What the model is given as its cache."""

    def __init__(self, stage: Stage, n_layers: int) -> None:
        super().__init__(layers=[StageLayer(stage) for _ in range(n_layers)])


class _Handler:
    needs_hidden = drops_tokens = False

    def new_cache(self, prompt: Any) -> Any:
        raise RuntimeError("a stage brings its own cache")

    def owns(self, cache: Any) -> bool:
        return isinstance(cache, StageCache)

    def attend(self, call: LayerCall) -> Tensor:
        return call.store.stage.attend(call)

    def before_generate(self, arguments: dict[str, Any]) -> None:
        raise RuntimeError("generate() can't run inside a stage")

    def left(self) -> None:
        pass


@torch.inference_mode()
def forward(model: nn.Module, stage: Stage, ids: Int[Tensor, " T"] | Sequence[int], positions: Int[Tensor, " T"], *,
            last: int = 0) -> Float[Tensor, "last V"] | None:
    """Run tokens at the given positions through the layers, until the stage has enough.

    Args:
        last: rows at the end whose logits are wanted.

    Returns:
        Logits in float32; None where none were wanted or the stage stopped the forward.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    device = decoder.get_input_embeddings().weight.device
    given = {"input_ids": torch.as_tensor(ids, device=device)[None], "position_ids": positions.to(device)[None],
             "use_cache": True}
    with attached(model, _Handler()) as parts:
        cache = StageCache(stage, parts.n_layers)
        try:
            if not last:
                decoder(**given, **{cache_keyword(decoder): cache})
                return None
            out = model(**given, **{cache_keyword(model): cache}, logits_to_keep=last)
            return out.logits[0, -last:].float()
        except Enough:
            return None


def attend_at(call: LayerCall, k: Float[Tensor, "1 H S D"], v: Float[Tensor, "1 H S D"],
              positions: Int[Tensor, " T"]) -> Float[Tensor, "1 Hq T D"]:
    """Attention of a call's rows to all keys at positions up to their own; key slot s stands at position s.

    A few rows at a time, each over no more keys than its latest row sees.
    """
    outs = []
    for start in range(0, len(positions), ROWS):
        part = slice(start, start + ROWS)
        own = positions[part]
        stop = int(own.max()) + 1
        mask = visible(own, 0, stop, call.window)
        outs.append(attend(call.q[:, :, part], k[:, :, :stop], v[:, :, :stop], scale=call.scale, causal=False,
                           mask=mask[None, None], softcap=call.softcap, return_lse=False)[0])
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def visible(positions: Int[Tensor, " T"], start: int, stop: int, window: int | None) -> Bool[Tensor, "T S"]:
    """Which keys at positions start to stop each row may see: none later than itself, none outside its window."""
    distance = positions[:, None] - torch.arange(start, stop, device=positions.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def parts_of(model: nn.Module) -> Parts:
    """The parts of a model, which need not be under the hook now."""
    with attached(model, _Handler()) as parts:
        return parts
