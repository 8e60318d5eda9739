"""The cache of one document, read alone: keys and values of every layer at positions 0, 1, 2 …

That is all a later prompt needs of it: keys can be moved to any other place (see `assemble`), values have no place.
What it was made with is kept beside it: the model, the dtype, and how that model turned its keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.cache.reuse.stage import Enough, forward, parts_of
from longspan.models.call import LayerCall, plain_attention
from longspan.models.load import context_window
from longspan.models.parts import Parts
from longspan.models.profiles import model_key
from longspan.registry import Refused

PROBED = (1, 3, 17, 257, 4099)
"""Positions whose rotation tells two sets of rotary parameters apart."""
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class DocumentCache:
    """Keys (after rotary positions) and values of one document read alone. Nothing ever writes into it."""

    ids: Int[Tensor, " n"]
    k: Float[Tensor, "L H n D"]
    v: Float[Tensor, "L H n D"]
    model: str
    """Fingerprint."""
    rotary: str
    """Digest of the rotary parameters that turned the keys."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.ids, self.k, self.v))


def read_alone(model: nn.Module, ids: Sequence[int] | Int[Tensor, " n"]) -> DocumentCache:
    """Read a document with nothing before it.

    Raises:
        Refused: no tokens, or more than the model's window.
    """
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    if not len(tokens):
        raise Refused("a document has no tokens; expected at least one.")
    if len(tokens) > (window := context_window(model)):
        raise Refused(f"a document has {len(tokens)} tokens, but the model reads at most {window}; cut it into shorter ones.")
    stage = _Reading()
    forward(model, stage, tokens, torch.arange(len(tokens)))
    if len(places := {str(k.device) for k in stage.k}) > 1:
        raise Refused(f"the model's layers lie on {', '.join(sorted(places))}, and documents' caches are kept in one place; "
                      "load it on one device.")
    k, v = (torch.stack(found) for found in (stage.k, stage.v))
    return DocumentCache(tokens, k, v, model_key(model), rotary_digest(parts_of(model)))


class _Reading:
    """A plain forward that remembers every layer's keys and values."""

    def __init__(self) -> None:
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def attend(self, call: LayerCall) -> Tensor:
        self.k.append(call.k[0])
        self.v.append(call.v[0])
        return plain_attention(call.q, call.k, call.v, None, call.scale, call.window, call.softcap)


def rotary_digest(parts: Parts) -> str:
    """A key of how the model turns keys now: pairing, frequencies and scaling of every layer."""
    positions = torch.tensor(PROBED, device=parts.decoder.get_input_embeddings().weight.device)
    tables = [table.float().flatten() for layer in range(parts.n_layers) for table in parts.rope(positions, layer)]
    return hashlib.sha256(parts.pairing.encode() + torch.cat(tables).cpu().numpy().tobytes()).hexdigest()


def settle(model: nn.Module) -> None:
    """Let a model whose frequencies follow the length of its input forget the long prompt it has read before."""
    if depends_on_length(model):
        forward(model, _Settling(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


class _Settling:
    def attend(self, call: LayerCall) -> Tensor:
        raise Enough


def depends_on_length(model: nn.Module) -> bool:
    """Whether the model's rotary frequencies change with the length of its input."""
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    told = str(getattr(config, "rope_parameters", None)) + str(getattr(config, "rope_scaling", None))
    return any(name in told for name in LENGTH_DEPENDENT)
