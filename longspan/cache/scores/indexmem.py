"""IndexMem's indexer: small trained projections predict which entries will be attended to.

1. Every query row s gets H_i short queries of its unrotated queries and a signed gate; every token t one short key of
   the layer's input. A[s,t] is the gated sum of ReLU(q_s k_t).
2. An entry's importance is the most that any row has given it so far. Rows are seen as they pass, block by block, so
   nothing of the size of the attention matrix is ever held; short keys stay with their entries through evictions.
3. All heads of a layer keep the same entries; with ``group=4`` four layers do, and only the first of them is scored.

What is evicted can go on in a memory: ``indexmem(store=latent-memory)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.base import LayerContext, Score, oldest, protect
from longspan.cache.index_memory import FAMILY, TRAINER, Indexer, index_scores, pooled_max, trained_weights
from longspan.models import profiles
from longspan.registry import Refused, knob, method

IMPORTANCE, KEY = "indexmem.importance", "indexmem.key"


@method("indexmem", kind="score", system="indexer-memory", paper="arXiv:2605.25475",
        capabilities=("all-queries", "pre-rope-queries", "hidden-states", "shares-heads", "profile", "trains"),
        summary="A small trained indexer per layer predicts which entries will be attended to.")
class IndexMem(Score):
    """Needs weights trained for the model, which `longspan profile "indexmem"` makes in minutes; those of the bundled
    model come with the package."""

    family: ClassVar[str] = FAMILY
    trainer: ClassVar[str] = TRAINER

    n_sink: int = knob(4, "first tokens that always stay", low=0)
    group: int = knob(1, "layers in a row that share what the first of them keeps", low=1)
    weights: str = knob(profiles.AUTO, 'file of the trained weights; "auto" finds those of the model')

    # -- trained weights

    def profile_settings(self) -> dict[str, Any]:
        return {}

    def profile_tensors(self) -> tuple[str, ...]:
        return ("layers", "indexer.query", "indexer.key", "indexer.gate")

    def profile_recipe(self) -> str:
        return "indexmem"

    def _indexer(self, x: LayerContext) -> Indexer:
        held = x.across.setdefault(self._note("weights"), {})  # looked up once a cache
        if "all" not in held:
            held["all"] = trained_weights(self, x.parts.model, self.weights)
        if x.layer not in held:
            held[x.layer] = held["all"].indexer(x.parts, x.layer, x.k.device)
        return held[x.layer]

    def _note(self, what: str) -> str:
        return f"{self} {what}"

    # -- seeing

    def protected(self, x: LayerContext) -> int:
        return self.n_sink

    def observe(self, x: LayerContext) -> None:
        """Raise every entry's importance to the most that the new rows give it."""
        if not x.q.shape[2]:
            return
        first = x.layer - x.layer % self.group
        if x.layer != first:
            self._follow(x, first)
            return
        indexer = self._indexer(x)
        keys = self._keys(x, indexer)
        found = importance(x, indexer, keys)
        before = x.per_key.get(IMPORTANCE)
        if before is not None:
            found = torch.maximum(found, F.pad(before, (0, found.shape[-1] - before.shape[-1]), value=-torch.inf))
        x.per_key[IMPORTANCE] = found
        x.per_key.update({f"{KEY}.{j}": keys[..., j] for j in range(keys.shape[-1])})
        if self.group > 1:
            self._tell(x, found)

    def _keys(self, x: LayerContext, indexer: Indexer) -> Float[Tensor, "B H S di"]:
        """Short keys of all held entries, each kept as one statistic a channel, so that they follow evictions."""
        if x.hidden is None:
            raise ValueError(f"{self.card.name} reads the layer's input, and was shown none")
        new = indexer.keys(x.hidden)[:, None].expand(-1, x.k.shape[1], -1, -1)
        older = x.k.shape[2] - new.shape[2]
        if not older:
            return new
        held = [x.per_key.get(f"{KEY}.{j}") for j in range(new.shape[-1])]
        if any(t is None or t.shape[-1] != older for t in held):
            raise ValueError(f"{self.card.name} has no short keys of the {older} entries read before")
        return torch.cat([torch.stack(held, -1), new], 2)  # type: ignore[arg-type]

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        return protect(x.per_key[IMPORTANCE], oldest(x, self.n_sink))

    # -- layers that share

    def _tell(self, x: LayerContext, found: Float[Tensor, "B H S"]) -> None:
        """Leave the importance for the layers of the group, under the number of tokens seen.

        They read only after this layer has gone through the whole call, so notes that were read are of an earlier one.
        """
        windows = [x.parts.window(layer) for layer in range(x.layer, min(x.layer + self.group, x.n_layers))]
        if len(windows) == 1 or (windows[0] is None and all(w is not None for w in windows[1:])):
            return  # nobody follows
        told: dict[Any, _Told] = x.across.setdefault(self._note(f"layer {x.layer}"), {})
        for seen in [s for s, note in told.items() if note.read]:
            del told[seen]
        told[tuple(x.seen.tolist())] = _Told(x.positions, x.valid, found)

    def _follow(self, x: LayerContext, first: int) -> None:
        """Take over what the group's first layer found, entry by entry, by their positions."""
        note: _Told | None = x.across.get(self._note(f"layer {first}"), {}).get(tuple(x.seen.tolist()))
        if note is None:
            raise Refused(f"indexmem(group={self.group}): layer {x.layer} shares the choice of layer {first}, which keeps a "
                          "sliding window of its own and chooses nothing; expected group=1.")
        note.read = True
        x.per_key[IMPORTANCE] = note.at(x.positions, x.valid)


@dataclass
class _Told:
    """What a layer found, with the positions of its entries."""

    positions: Int[Tensor, "B H S"]
    valid: Bool[Tensor, "B H S"]
    importance: Float[Tensor, "B H S"]
    read: bool = False

    def at(self, positions: Int[Tensor, "B H n"], valid: Bool[Tensor, "B H n"]) -> Float[Tensor, "B H n"]:
        """The importance of entries at other positions; below all others where this layer has dropped them."""
        lowest = self.importance.masked_fill(~self.valid, torch.inf).amin(-1, keepdim=True) - 1
        size = int(max(t.masked_fill(~v, 0).max() for t, v in ((self.positions, self.valid), (positions, valid)))) + 1
        table = lowest.expand(*lowest.shape[:2], size + 1)
        table = table.scatter(-1, torch.where(self.valid, self.positions, size).long(), self.importance)
        return table.gather(-1, torch.where(valid, positions, size).long())


def importance(x: LayerContext, indexer: Indexer, keys: Float[Tensor, "B H S di"], *, rows: int = 128,
               columns: int = 1024) -> Float[Tensor, "B H S"]:
    """The most that the query rows of `x` give every entry, (float32); -inf where none of them sees it."""
    assert x.hidden is not None
    q = indexer.queries(x.parts.unrotate(x.q, *x.parts.rope(x.q_positions, x.layer)))
    gates = indexer.gates(x.hidden)
    T, (B, H, S, _) = x.q.shape[2], keys.shape
    # Until heads have kept different entries their short keys are the same, and one of them speaks for all.
    same = keys.stride(1) == 0 or (T > 1 and bool((keys == keys[:, :1]).all() and (x.positions == x.positions[:, :1]).all()
                                                 and (x.valid == x.valid[:, :1]).all()))
    found = []
    for h in range(1 if same else H):
        def block(r: slice, c: slice, h: int = h) -> Tensor:
            return index_scores(q[:, r], gates[:, r], keys[:, h, c])

        def allowed(r: slice, c: slice, h: int = h) -> Tensor:
            seen = x.positions[:, h, None, c] <= x.q_positions[:, r, None]
            return seen & x.valid[:, h, None, c] & x.q_valid[:, r, None]

        found.append(pooled_max(block, allowed, T, S, rows=rows, columns=columns))
    return torch.stack(found, 1).expand(B, H, S)
