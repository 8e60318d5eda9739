"""Reading a transformers model at position indices of one's own, with everything else as at the standard ones.

transformers reads two things out of position ids besides angles. Without an attention mask, ids that jump mean packed
documents, so a mask is always given here, one made from the true documents. And some rotary embeddings ("dynamic",
"longrope") choose their frequencies by the largest id, so these are chosen by the standard ids and held. Angles
themselves are computed from the ids when asked, at any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from longspan.layers import Context
from longspan.registry import Refused


def explicit_mask(model: Any, ctx: Context) -> Any:
    """An attention mask that says all about causality, padding and documents, whatever the position ids are.

    Rows of one document need the padding only, (B,T). Packed ones need a mask for every pair of tokens, or one for each type
    of layer where a model has several.

    Raises:
        Refused: flash attention, which takes no such mask and looks for documents in position ids itself.
    """
    kind = str(getattr(model.config, "_attn_implementation", ""))
    if "flash" in kind:
        raise Refused(f"attn_implementation={kind!r} reads documents out of position ids, which are perturbed here; expected "
                      "'sdpa' or 'eager'.")
    valid = torch.ones_like(ctx.order, dtype=torch.bool) if ctx.valid is None else ctx.valid
    if ctx.segments is None:
        return valid.long()
    from transformers.masking_utils import create_masks_for_generate, packed_sequence_mask_function

    like = model.get_input_embeddings().weight.new_empty(*valid.shape, 1)
    return create_masks_for_generate(config=model.config, inputs_embeds=like, attention_mask=valid, past_key_values=None,
                                     and_mask_function=packed_sequence_mask_function(ctx.segments))


@contextmanager
def frozen_frequencies(model: Any, standard: Int[Tensor, "B T"]) -> Iterator[None]:
    """Rotary frequencies are those that the indices `standard` choose, and stay so within the block."""
    changing = [m for m in model.modules() if _changes(getattr(m, "rope_type", None))]
    before = [m.rope_type for m in changing]
    like = torch.empty(1, device=standard.device)
    try:
        for module in changing:
            kinds = module.rope_type
            for layer_type in kinds if isinstance(kinds, dict) else [None]:
                module(like, standard, **({} if layer_type is None else {"layer_type": layer_type}))
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        yield
    finally:
        for module, kind in zip(changing, before):
            module.rope_type = kind


def _changes(kind: Any) -> bool:
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)
