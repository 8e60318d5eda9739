"""Whether a model turns queries and keys by indices it is given, which objectives with perturbed indices rely on."""

from __future__ import annotations

from typing import Any

from torch import nn

from longspan.models.decoder import Decoder
from longspan.registry import Method, Refused
from longspan.training.retrofits.base import Tuned


def require_rotary(method: Method, model: Any) -> None:
    """Refuse a model in which other indices change nothing, or can't go beyond a table made once.

    A small decoder needs a position scheme that rotates; a transformers model needs a rotary embedding that computes its
    angles from frequencies (``inv_freq``) when called. What is neither is taken at its word.
    """
    if not isinstance(model, nn.Module):
        return
    for module in model.modules():
        if isinstance(module, Decoder):
            position: Any = module.config.position
            if "rotate" not in position.hooks:
                raise Refused(f"{method.card.name}: the model's positions are {position}, which rotate nothing; expected a "
                              "scheme that does, such as position='rope'.")
        elif isinstance(module, Tuned) and not _computes_angles(module.model):
            raise Refused(f"{method.card.name}: {type(module.model).__name__} has no rotary embedding that computes its angles "
                          "from the indices given; expected one with inv_freq, such as Llama's.")


def _computes_angles(model: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())
