"""The key-value cache that transformers carries through `generate`, with one compressing layer per attention layer.

The length that transformers sees is the number of tokens ever read, never the number kept. Layers whose sliding window
is shorter than the prompt already evict; they stay with transformers' own cache.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from longspan.cache.base import POSITION_BYTES, Schedule, Store
from longspan.cache.layer import PolicyLayer, SlidingLayer
from longspan.cache.policy import AnyPolicy
from longspan.cache.schedules.prompt import AtPrompt
from longspan.cache.store import LayerStore
from longspan.cache.stores.dense import Dense
from longspan.models.call import LayerCall, Prompt
from longspan.models.drop import Dropped
from longspan.registry import Refused

Reads = Callable[[LayerCall, Float[Tensor, "B Hq T D"], Int[Tensor, "B T"], LayerStore], Tensor | None]
"""``reads(call, q, positions, store)``: attention (B,Hq,T,D) of the newest rows over any part of what the store holds
(their own keys are the last T), or None to leave it to the store. Whoever only wants to look returns None."""


@dataclass
class Rows:
    """The rows of a batch that share one policy (None: keep everything)."""

    policy: AnyPolicy | None
    rows: Int[Tensor, " R"] | None = None
    """None: all rows."""


@dataclass
class Achieved:
    """What a cache really holds. Bytes are those of the live tensors' storages."""

    seen: int
    kept: list[list[float]] = field(default_factory=list)
    """Entries kept per layer and head right after the last compression, mean over rows; empty if there was none."""
    asked: str = ""
    kept_fraction: float = 1.0
    cache_bytes: int = 0
    """Right after the last compression (now, if there was none)."""
    full_bytes: int = 0
    """What all of it takes uncompressed: keys and values in the model's dtype, and the positions."""
    compressions: int = 0
    density: float = 1.0
    """Share of causal query-key pairs computed while reading the prompt."""
    tokens_computed: float = 1.0
    """Share of the prompt's tokens that a layer computed, mean over layers."""

    def as_json(self) -> dict[str, Any]:
        return {"seen": self.seen, "asked": self.asked, "kept_fraction": round(self.kept_fraction, 6),
                "cache_bytes": self.cache_bytes, "full_cache_bytes": self.full_bytes,
                "compressions": self.compressions, "density": round(self.density, 6),
                "tokens_computed": round(self.tokens_computed, 6), "kept_per_layer_and_head": self.kept}


def achieved_from_json(found: dict[str, Any]) -> Achieved:
    """The inverse of `Achieved.as_json`."""
    names = {"full_bytes": "full_cache_bytes", "kept": "kept_per_layer_and_head"}
    return Achieved(**{f.name: found[name] for f in fields(Achieved) if (name := names.get(f.name, f.name)) in found})


class RecipeCache(Cache):
    """A cache whose layers compress themselves by one policy, or by one per row.

    Args:
        rows: which policy rules which rows; one entry with ``rows=None`` for a whole batch. Where `generate` repeats
            every row (beams, several answers), the repeats follow their row.
        n_layers: attention layers of the model.
        windows: per layer the sliding window that stays with transformers' own layer, or None.
        prompt: what is being continued; None when unknown (then nothing is compressed until `commit`).
    """

    def __init__(self, rows: list[Rows], n_layers: int, windows: list[int | None], prompt: Prompt | None) -> None:
        self.rows = rows
        self.policies = [r.policy for r in rows if r.policy is not None]
        self.n_layers = n_layers
        self.windows = windows
        self.prompt = prompt
        self.active = True
        self.kin: weakref.WeakSet[RecipeCache] = weakref.WeakSet([self])
        """Caches of the same run, which deep copies join."""
        self.reads: Reads | None = None
        """Sees every attention call once its keys are held, and may answer it: `Reads`."""
        self.needs_hidden = any(p.can("hidden-states") for p in self.policies)
        self.across: dict[str, Any] = {}
        """Notes that layers share, for choices across layers."""
        self.drops = any(p.can("drops-tokens") for p in self.policies)
        if self.drops and any(windows):
            raise Refused(f"{self.policies[0]} can't drop tokens here: some of the model's layers keep a window of "
                          f"{min(w for w in windows if w)} tokens; expected layers that see the whole prompt.")
        self.dropped: Dropped | None = None
        """The tokens that later layers compute, once a layer of the latest forward has chosen some."""
        self.computed = 1.0
        """Share of the prompt's tokens that a layer computed, mean over layers."""
        self.store_method = _one({p.store for p in self.policies}, "store")
        self.schedule: Schedule = _one({p.schedule for p in self.policies}, "schedule") or AtPrompt()
        self.recodes = self.store_method is not None and self.store_method.card.can("lossy")
        self._slots: tuple[Tensor, int, int, Tensor | None] | None = None
        self._positions: tuple[Tensor, Tensor] | None = None
        layers: list[Any] = [PolicyLayer(self, i) if w is None else SlidingLayer(w) for i, w in enumerate(windows)]
        super().__init__(layers=layers)
        self.policy_layers = [layer for layer in layers if isinstance(layer, PolicyLayer)]
        self.first = next(iter(self.policy_layers), None)

    # -- what layers ask

    @property
    def prompt_length(self) -> int | None:
        return self.prompt.length if self.prompt else None

    def cuts(self, start: int, stop: int) -> list[int]:
        """Where to compress in (start, stop]; without a policy only the sizes are noted there."""
        return self.schedule.cuts(start, stop, self.prompt_length)

    def watches(self, seen: int) -> bool:
        """Whether queries must still be watched after `seen` tokens."""
        return bool(self.policies) and self.schedule.watches(seen, self.prompt_length)

    def may_take_back(self, start: int, stop: int) -> bool:
        """Whether the tokens from start to stop may be drafts, and rejecting them has more to undo than their entries."""
        prompt = self.prompt_length
        return prompt is not None and start >= prompt and stop - start > 1 and self.watches(stop)

    def real_slots(self, padding: Bool[Tensor, "B N"] | None, start: int, stop: int) -> Bool[Tensor, "B n"] | None:
        """Which slots from start to stop hold real tokens; None where all do.

        Every layer asks the same, and the answer waits for the device: it is looked up once.
        """
        if padding is None:
            return None
        if self._slots is None or self._slots[0] is not padding or self._slots[1:3] != (start, stop):
            valid = padding[:, start:stop]
            if valid.shape[1] != stop - start:
                raise Refused(f"the attention mask has {padding.shape[1]} columns, expected {stop}: one for every token "
                              "read so far and now.")
            self._slots = (padding, start, stop, None if bool(valid.all()) else valid)
        return self._slots[3]

    def own_positions(self, layer: PolicyLayer, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """A copy that nobody writes into: callers may count their position ids up in place. All layers share one."""
        if self._positions is None or layer is self.first or self._positions[0] is not positions:
            self._positions = positions, positions.to(torch.int32, copy=True)
        return self._positions[1]

    def entry_bytes(self, head_dim: int, itemsize: int) -> float:
        """Bytes that one kept entry of one head takes."""
        store: Store = self.store_method or Dense()
        return store.entry_bytes(head_dim, itemsize) + POSITION_BYTES

    def rows_of_one(self, batch: int) -> int:
        """Batch rows that share a budget in bytes: all, or those that repeat one row where rows have their own recipes."""
        given = sum(1 if r.rows is None else len(r.rows) for r in self.rows)
        if self.rows[0].rows is None:
            return batch
        if batch % given:
            raise Refused(f"{given} recipes were given for {batch} rows; expected one recipe a row.")
        return batch // given

    def batch_rows(self, rows: Int[Tensor, " R"], batch: int) -> Int[Tensor, " R_repeats"]:
        """Where the given rows stand in the batch, their repeats included."""
        repeats = self.rows_of_one(batch)
        return (rows[:, None] * repeats + torch.arange(repeats)).flatten()

    def check_whole(self, start: int, stop: int) -> None:
        """Refuse a prompt that comes in pieces where tokens are to be dropped: the first ones have been through all layers."""
        prompt = self.prompt_length
        if prompt is not None and start < prompt and (start or stop < prompt):
            raise Refused(f"{self.policies[0]} drops prompt tokens while the whole prompt of {prompt} tokens is read at once, "
                          f"but tokens {start} to {stop} came alone; leave prefill_chunk_size unset, or choose a recipe that "
                          "drops none.")

    def drop(self, dropped: Dropped, share: float) -> None:
        """Go on with a `share` of the prompt's tokens after a layer."""
        self.dropped = dropped
        self.computed = 1 - (1 - share) * (self.n_layers - 1 - dropped.layer) / self.n_layers

    # -- what users ask

    def commit(self) -> None:
        """Compress now: for bare forwards, where the prompt's end is known to the caller alone.

        Raises:
            Refused: nothing was read, or the prompt was compressed before and the schedule ends there.
        """
        seen = self.get_seq_length()
        if not seen:
            raise Refused("nothing was read yet, so there is nothing to compress.")
        if self.drops:
            raise Refused(f"{self.policies[0]} drops prompt tokens while they are read, which is over; expected a cache that "
                          "knows its prompt beforehand, as generate() or run.new_cache(Prompt(ids, length)) makes it.")
        records = [layer.record for layer in self.policy_layers]
        if all(record is not None and record.seen == seen for record in records):
            return
        if self.policies and self.prompt is not None and not self.watches(seen):
            raise Refused(f"the prompt of {self.prompt.length} tokens was compressed when it ended, and "
                          f"schedule={self.schedule} compresses no later; expected one that does, such as every(steps=128).")
        self.prompt = self.prompt or Prompt(None, seen)
        for layer in self.policy_layers:
            layer.compress()

    def reset(self) -> None:
        """Forget everything that was read, the prompt too."""
        super().reset()
        self.prompt, self.dropped, self.computed = None, None, 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> RecipeCache:
        """A cache of its own that goes on from here: what transformers' users do to reuse a prompt."""
        twin = RecipeCache(self.rows, self.n_layers, self.windows, self.prompt)
        twin.active, twin.kin, twin.computed = self.active, self.kin, self.computed
        self.kin.add(twin)
        own: Any
        for layer, own in zip(self.layers, twin.layers):
            if isinstance(layer, PolicyLayer):
                own.restore(copy.deepcopy(layer.snapshot(), memo))
                own.facts, own.token_bytes, own.is_initialized = layer.facts, layer.token_bytes, layer.is_initialized
            else:
                own.__dict__.update(copy.deepcopy(layer.__dict__, memo))
        return twin

    def snapshot(self) -> list[Any]:
        """A point to come back to, whatever is read or evicted in between. Costs no copy of keys and values."""
        # A sliding layer of transformers replaces its tensors, never writes into them: references are enough.
        return [layer.snapshot() if isinstance(layer, PolicyLayer) else dict(layer.__dict__) for layer in self.layers]

    def restore(self, point: list[Any]) -> None:
        """Go back to a `snapshot`, which stays good for another time."""
        for layer, state in zip(self.layers, point):
            layer.restore(state) if isinstance(layer, PolicyLayer) else layer.__dict__.update(state)

    def kept_positions(self) -> list[list[Int[Tensor, " n"]]]:
        """Positions held per layer and KV head in the first row (layers that keep transformers' own cache: none)."""
        views = [layer.store.view() for layer in self.policy_layers]
        return [[view.positions[0, h][view.valid[0, h]] for h in range(view.k.shape[1])] for view in views]

    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(layer.store.nbytes() for layer in self.policy_layers) + self._stock_bytes()[0]

    def _stock_bytes(self) -> tuple[int, int]:
        """Bytes that transformers' own layers hold, and those of one token in all of them and all rows."""
        stock = [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized]
        tensors = [t for layer in stock for t in (layer.keys, layer.values) if t is not None]
        held = sum(t.untyped_storage().nbytes() for t in tensors)
        return held, sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    def achieved(self) -> Achieved:
        """What was kept and what it takes."""
        asked = "; ".join(str(p) for p in self.policies)
        seen, layers = self.get_seq_length(), self.policy_layers
        if not seen:
            return Achieved(0, asked=asked)
        stock, stock_token = self._stock_bytes()
        rows = layers[0].store.lengths().shape[0] if layers else 0
        per_token = sum(layer.token_bytes + POSITION_BYTES for layer in layers) * rows + stock_token
        last = [layer.record for layer in layers if layer.record is not None]
        if not last:
            return Achieved(seen, [], asked, 1.0, self.nbytes(), per_token * seen)
        kept = [record.kept.float().mean(0).tolist() for record in last]
        fraction = sum(int(r.kept.sum()) for r in last) / max(1, sum(r.real for r in last))
        return Achieved(last[0].seen, kept, asked, fraction, sum(r.bytes for r in last) + stock, per_token * last[0].seen,
                        layers[0].compressions if self.policies else 0, tokens_computed=self.computed)


def check_drops(policies: list[AnyPolicy | None]) -> None:
    """Tokens are dropped while the prompt is read and at no other time, and for all rows of a batch in the same way.

    Raises:
        Refused: another schedule, or rows with other policies.
    """
    for policy in policies:
        if policy is None or not policy.can("drops-tokens"):
            continue
        if not isinstance(policy.schedule or AtPrompt(), AtPrompt):
            raise Refused(f"{policy}: it drops prompt tokens once, when the prompt ends, which schedule={policy.schedule} "
                          "doesn't fit; leave schedule= out.")
        other = next((p for p in policies if str(p) != str(policy)), policy)
        if other is not policy:
            raise Refused(f"{policy} and {other or 'full'}: all rows of a batch must go on with tokens of the same recipe where "
                          "one drops some; give each recipe a batch of its own.")


def _one(found: set[Any], what: str) -> Any:
    if len(found) > 1:
        raise Refused(f"rows of one batch must share a {what}, got {', '.join(sorted(map(str, found)))}.")
    return next(iter(found), None)
