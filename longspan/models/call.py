"""What passes between the attention hook and a recipe: the prompt, one layer's attention call, and what answers it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels import attend
from longspan.models.parts import Parts


@dataclass(frozen=True)
class Prompt:
    """What `generate` was asked to continue."""

    ids: Int[Tensor, "B P"] | None
    length: int
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Token ranges with a meaning: ``question``, ``documents``, ``shots``, ``turns``."""


@dataclass
class LayerCall:
    """One attention call of one layer, with everything a method may ask for."""

    layer: int
    q: Float[Tensor, "B Hq T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S D"]
    scale: float
    positions: Int[Tensor, "B T"]
    padding: Bool[Tensor, "B N"] | None
    """True for real tokens, one column per slot ever seen; None when there is no padding."""
    window: int | None
    softcap: float | None
    parts: Parts
    store: Any
    """The cache layer that staged `k` and `v`, or None when the model runs without our cache."""
    hidden: Float[Tensor, "B T C"] | None = None

    @functools.cached_property
    def q_pre_rope(self) -> Float[Tensor, "B Hq T D"]:
        """The queries before rotary positions were applied."""
        return self.parts.unrotate(self.q, *self.parts.rope(self.positions, self.layer))


class Handler(Protocol):
    """What a recipe's run offers the hook."""

    needs_hidden: bool

    def new_cache(self, prompt: Prompt | None) -> Any: ...
    def owns(self, cache: Any) -> bool: ...
    def attend(self, call: LayerCall) -> Float[Tensor, "B Hq T D"]: ...
    def before_generate(self, arguments: dict[str, Any]) -> None: ...
    def left(self) -> None:
        """No forward runs any more and none will: caches made here must not be used from now on."""


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float,
                    window: int | None = None, softcap: float | None = None) -> Float[Tensor, "B Hq T D"]:
    """Dense causal attention with an optional padding mask (B,N), ready-made mask (B,1,T,S), window and softcap.

    Query row i stands at key slot S-T+i; a padding mask is read in its last S columns.
    """
    T, S = q.shape[2], k.shape[2]
    if mask is not None and mask.dim() == 4:
        return attend(q, k, v, scale=scale, causal=False, mask=mask[..., -S:], softcap=softcap, return_lse=False)[0]
    allowed = None
    if window is not None and window < S:
        rows = torch.arange(S - T, S, device=q.device)[:, None]
        allowed = (rows - torch.arange(S, device=q.device) < window)[None, None]
    if mask is not None:
        valid = mask[:, None, None, -S:]
        allowed = valid if allowed is None else allowed & valid
    return attend(q, k, v, scale=scale, causal=True, mask=allowed, softcap=softcap, return_lse=False)[0]
