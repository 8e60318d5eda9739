"""What attention is given in some layers of a model while it reads a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.models import LayerCall
from longspan.prefill import ReadContext
from longspan.recipe import Recipe


@torch.inference_mode()
def noted(model: Any, ids: list[int], layers: tuple[int, ...]) -> dict[int, ReadContext]:
    """Rotated queries and keys, values and scale of these layers, by layer."""
    found: dict[int, ReadContext] = {}
    with Recipe().on(model) as active:
        plain = active.attend

        def attend_and_note(call: LayerCall) -> Tensor:
            if call.layer in layers:
                found[call.layer] = ReadContext(call.q, call.k, call.v, call.scale, layer=call.layer)
            return plain(call)

        active.attend = attend_and_note  # type: ignore[method-assign]
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    return found
