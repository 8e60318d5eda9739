"""What the layers of a frozen model make of texts, noted once: add-ons are trained on these tensors, not on the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.models import LayerCall, Prompt, attached, find_parts
from longspan.models.hook import cache_keyword
from longspan.recipe import Recipe, Run
from longspan.registry import Refused

NOTED_BYTES = 1 << 30
"""What may be noted of all texts at once; further layers are noted in another reading."""


@dataclass(frozen=True, eq=False)
class LayerText:
    """What one layer made of one text of N tokens, in the model's dtype."""

    hidden: Float[Tensor, "N C"]
    q: Float[Tensor, "Hq N D"]
    """After rotation."""
    flat: Float[Tensor, "Hq N D"]
    """Queries before rotation."""
    k: Float[Tensor, "H N D"]
    flat_k: Float[Tensor, "H N D"]
    v: Float[Tensor, "H N D"]
    scale: float
    softcap: float | None

    @property
    def length(self) -> int:
        return self.k.shape[1]

    def first(self, n: int) -> LayerText:
        """The same of the first `n` tokens alone."""
        cut = {name: getattr(self, name)[:, :n] for name in ("q", "flat", "k", "flat_k", "v")}
        return replace(self, hidden=self.hidden[:n], **cut)


class _Noting(Run):
    """A run that keeps everything and notes the calls of some layers (None: only which layers there are)."""

    def __init__(self, layers: set[int] | None) -> None:
        super().__init__([Recipe()])
        self.needs_hidden = layers is not None
        self.layers, self.calls, self.called = layers, {}, []  # type: ignore[var-annotated]

    def attend(self, call: LayerCall) -> Float[Tensor, "B Hq T D"]:
        if call.store is not None:  # otherwise transformers' own sliding layer holds the keys
            self.called.append(call.layer)
        if self.layers is not None and call.layer in self.layers:
            self.calls[call.layer] = text_of(call)
        return super().attend(call)


def text_of(call: LayerCall) -> LayerText:
    """What training reads of a layer's call over a whole text (one sequence)."""
    assert call.hidden is not None
    flat_k = call.parts.unrotate(call.k, *call.parts.rope(call.positions, call.layer))
    t = {"hidden": call.hidden, "q": call.q, "flat": call.q_pre_rope, "k": call.k, "flat_k": flat_k, "v": call.v}
    return LayerText(**{n: x[0].detach().clone() for n, x in t.items()}, scale=call.scale, softcap=call.softcap)


@torch.no_grad()
def _run(model: Any, ids: Sequence[int], layers: set[int] | None) -> _Noting:
    tensor = torch.tensor([list(ids)], device=model.device)
    run = _Noting(layers)
    with attached(model, run) as run.parts:
        cache = run.new_cache(Prompt(tensor, len(ids)))
        model(input_ids=tensor, **{cache_keyword(model): cache}, use_cache=True, logits_to_keep=1)
    return run


def note(model: Any, texts: Sequence[Sequence[int]], layers: Iterable[int]) -> dict[int, list[LayerText]]:
    """Read the texts once and note what the given layers make of them."""
    wanted = set(layers)
    runs = [_run(model, ids, wanted).calls for ids in texts]
    return {layer: [calls[layer] for calls in runs] for layer in sorted(wanted)}


def seeing_layers(model: Any, ids: Sequence[int]) -> list[int]:
    """Layers that see the whole text; those with a shorter window evict by themselves and are not trained."""
    found = sorted(set(_run(model, ids, None).called))
    if not found:
        raise Refused("every layer of this model has a sliding window shorter than the training texts and evicts by itself; "
                      f"ask for texts shorter than the window (they had {len(ids)} tokens).")
    return found


def groups_of(model: Any, layers: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The layers in runs whose notes fit into `NOTED_BYTES` together."""
    parts = find_parts(model)
    channels = model.get_input_embeddings().weight.shape[1] + (2 * parts.n_heads + 3 * parts.n_kv_heads) * parts.head_dim
    one = channels * parts.dtype.itemsize * sum(map(len, texts))
    n = max(1, NOTED_BYTES // one)
    return [list(layers[i : i + n]) for i in range(0, len(layers), n)]
