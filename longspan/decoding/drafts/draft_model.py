"""Another, smaller model as the draft (speculative decoding, arXiv:2211.17192 and arXiv:2302.01318).

It must read the same tokens as the target. It reads the prompt itself, which is part of what drafting costs.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from transformers import DynamicCache

from longspan.decoding.base import Draft, Target
from longspan.decoding.drafts.model import ModelDrafter
from longspan.models import Loaded, load
from longspan.registry import Refused, knob, method


@method("draft-model", kind="draft", paper="arXiv:2211.17192", summary="Propose with another, smaller model.",
        capabilities=("draft-model",))
class DraftModel(Draft):
    """Speculative decoding with a model of the same vocabulary."""

    model: str = knob("", "folder, .gguf file or hub id of the draft model")
    gamma: int = knob(4, "tokens proposed at once", low=1)

    def check(self) -> None:
        if not self.model.strip():
            raise Refused('draft-model: expected a model to draft with, as in draft-model(model="path/to/folder").')

    def begin(self, target: Target) -> ModelDrafter:
        loaded = _loaded(self.model, next(target.model.parameters()).dtype)
        check_vocabulary(loaded, target)
        inside = contextlib.ExitStack()
        cache = DynamicCache() if target.attach is None else inside.enter_context(target.attach(loaded.model)).new_cache(None)
        return ModelDrafter(target, loaded.model, cache, gamma=self.gamma, rule=self.rule, inside=inside)


@functools.lru_cache(maxsize=2)
def _loaded(source: str, dtype: torch.dtype) -> Loaded:
    return load(source, dtype=dtype)


def check_vocabulary(draft: Loaded, target: Target) -> None:
    """Refuse a draft whose tokens aren't the target's."""
    models: tuple[Any, Any] = (target.model, draft.model)
    wanted, got = (m.config.get_text_config(decoder=True).vocab_size for m in models)
    if wanted != got:
        raise Refused(f"draft model {draft.name} has {got} tokens and the target {wanted}; expected a draft of the same "
                      "vocabulary.")
    tokenizer = target.tokenizer
    if tokenizer is not None and hasattr(tokenizer, "get_vocab") and tokenizer.get_vocab() != draft.tokenizer.get_vocab():
        raise Refused(f"draft model {draft.name} cuts text into other tokens than the target; expected the same tokenizer.")
