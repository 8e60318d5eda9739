"""The key-value cache that transformers carries through `generate`, with one compressing layer per attention layer.

A layer only *stages* new keys and values in `update`; the attention hook then calls `PolicyLayer.attend`, which appends
them piece by piece: up to each point where the schedule compresses, attend, compress, go on. That is why chunked
prefill, drafts and a prompt that ends inside a call change nothing. The length that transformers sees is the number of
tokens ever read, never the number kept.
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
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from longspan.cache.base import CachePolicy, KeepPlan, LayerContext, Schedule, Store
from longspan.cache.schedules.prompt import AtPrompt
from longspan.cache.store import LayerStore
from longspan.cache.stores.dense import Dense
from longspan.cache.stores.ragged import Ragged
from longspan.cache.watch import QueryWindow
from longspan.models.hook import LayerCall, Prompt
from longspan.registry import Refused

Reader = Callable[[LayerCall, Tensor, Tensor, Tensor, Bool[Tensor, "B S"] | None], Tensor | None]
"""Attends query rows over keys and values by a read plan, or returns None to have them attended densely."""


@dataclass
class LayerRecord:
    """What one compression of one layer achieved."""

    seen: int
    """Slots read so far, pads included."""
    real: int
    """Real tokens read so far, summed over rows and heads."""
    kept: Int[Tensor, "B H"]
    bytes: int


@dataclass
class Rows:
    """The rows of a batch that share one policy (None: keep everything)."""

    policy: CachePolicy | None
    rows: Int[Tensor, "R"] | None = None
    """None: all rows."""


class PolicyLayer(CacheLayerMixin):
    """One layer: a store, and the policies that say what stays in it."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False
    is_croppable = True

    def __init__(self, cache: RecipeCache, layer: int) -> None:
        super().__init__()
        self.cache = weakref.ref(cache)
        self.layer = layer
        self.seen = 0
        self.store: LayerStore = (cache.store_method or Dense()).make()
        self.watch = QueryWindow(max((p.score.window_rows() for p in cache.policies), default=0))
        self.per_key: dict[str, Tensor] = {}
        self.stats: dict[str, Tensor] = {}
        self.staged: tuple[Tensor, Tensor] | None = None
        self.history: list[LayerRecord] = []
        self.real: Int[Tensor, "B"] | None = None
        self.last_call: LayerCall | None = None
        self.token_bytes = 0
        """Bytes of one token's keys and values in this layer, in the model's dtype, one row."""

    # -- what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stage new tokens, (B,H,T,D); the attention hook reads them from here."""
        cache = self.cache()
        if cache is None or not cache.active:
            raise RuntimeError("this cache belongs to a recipe that was left; use it inside `with recipe.on(model):`.")
        if self.staged is not None:
            raise RuntimeError(f"layer {self.layer} was updated twice without attention in between; "
                               "the model's attention doesn't go through the recipe.")
        self.is_initialized = True
        self.token_bytes = 2 * key_states.shape[1] * key_states.shape[3] * key_states.element_size()
        self.staged = (key_states, value_states)
        # The mark sits on a view: on the tensor itself it would be a reference cycle that keeps memory alive.
        marked = key_states.view_as(key_states)
        marked._longspan = self  # type: ignore[attr-defined]
        return marked, value_states

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens (a negative number); rejected drafts end this way."""
        n = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if n == 0:
            return
        self.store.crop(n)
        self.seen -= n
        if self.real is not None:
            self.real = self.real - n
        self.watch.crop(n)
        self.per_key = {name: t[..., :-n] for name, t in self.per_key.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.seen:
            self.store.select(indices)
            self.watch.select(indices)
            self.real = None if self.real is None else self.real[indices]
            self.per_key = {n: t[indices] for n, t in self.per_key.items()}
            self.stats = {n: t[indices] for n, t in self.stats.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen and self.real is not None:
            self.batch_select_indices(torch.arange(len(self.real)).repeat_interleave(repeats))

    def snapshot(self) -> dict[str, Any]:
        """The layer's state, by reference: buffers only ever grow beyond what a snapshot counts."""
        store = copy.copy(self.store)
        store.tail = copy.copy(self.store.tail)
        return {"seen": self.seen, "real": self.real, "store": store, "watch": copy.copy(self.watch),
                "per_key": dict(self.per_key), "stats": dict(self.stats), "history": list(self.history)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `snapshot`, which stays good for another time."""
        for name, value in state.items():
            setattr(self, name, copy.copy(value) if name != "real" else value)
        self.store.tail = copy.copy(self.store.tail)
        self.staged = None

    def load_state(self, state: dict[str, Tensor], seen: int, store: str) -> None:
        """Take over what a saved context held: tensors by name, tokens seen, and the store's class name."""
        if store != type(self.store).__name__:
            self.store = Ragged().make()
        self.real = state.pop("real", None)
        self.store.load(state)
        self.seen, self.is_initialized = seen, True
        tail = self.store.tail.k
        k = tail if tail is not None else self.store.view().k
        self.token_bytes = 2 * self.store.lengths().shape[1] * k.shape[-1] * k.element_size()

    def reset(self) -> None:
        cache = self.cache()
        assert cache is not None
        self.__init__(cache, self.layer)  # type: ignore[misc]

    # -- what the hook calls

    def attend(self, call: LayerCall, read: Reader | None = None) -> Float[Tensor, "B Hq T D"]:
        """Attention of a call's rows, compressing wherever the schedule says so."""
        assert self.staged is not None, "attend() without update()"
        k, v = self.staged
        self.staged = None
        cache = self.cache()
        assert cache is not None
        start, T = self.seen, k.shape[2]
        cuts = cache.cuts(start, start + T)
        if T == 1 and not cuts and call.padding is None and not cache.watches(start):
            return self._one_token(call, k, v)
        outs = []
        for a, b in _pieces(start, start + T, cuts):
            outs.append(self._attend_piece(call, k, v, a - start, b - start, read))
            if b in cuts:
                self.compress(call)
        self.last_call = call if cache.policies and not self.history else None
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _one_token(self, call: LayerCall, k: Tensor, v: Tensor) -> Tensor:
        self.store.append(k, v, call.positions, None)
        self.seen += 1
        if self.real is not None:
            self.real = self.real + 1
        return self.store.attend(call.q, call.positions, scale=call.scale, window=call.window, softcap=call.softcap)

    def _attend_piece(self, call: LayerCall, k: Tensor, v: Tensor, a: int, b: int, read: Reader | None) -> Tensor:
        whole = a == 0 and b == k.shape[2]
        q, positions = (call.q, call.positions) if whole else (call.q[:, :, a:b], call.positions[:, a:b])
        valid = None
        if call.padding is not None:
            valid = call.padding[:, self.seen : self.seen + b - a]
            if valid.shape[1] != b - a:
                raise Refused(f"the attention mask has {call.padding.shape[1]} columns, expected {self.seen + b - a}: "
                              "one for every token read so far and now.")
            # `all` waits for the device; asking once a call, in the first layer, would not see other layers' pieces.
            if bool(valid.all()) and self.store.tail.valid is None:
                valid = None
        fresh = self.store.untouched and self.store.tail.length == self.seen
        if not whole:
            k, v = k[:, :, a:b], v[:, :, a:b]
        self.store.append(k, v, positions, valid)
        self.seen += b - a
        new = valid.sum(1) if valid is not None else torch.full((k.shape[0],), b - a, device=k.device)
        self.real = new if self.real is None else self.real + new
        self._watch(call, q, positions, valid)
        if read is not None and fresh and b - a > 1:
            tail = self.store.tail
            out = read(call, q, tail.keys, tail.values, tail.valid)
            if out is not None:
                return out
        return self.store.attend(q, positions, scale=call.scale, window=call.window, softcap=call.softcap)

    # -- choosing what stays

    def _watch(self, call: LayerCall, q: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        cache = self.cache()
        assert cache is not None
        if not cache.watches(self.seen):
            return
        if cache.needs_hidden:
            self.watch.see(q, positions, valid, None if call.hidden is None else call.hidden[:, -q.shape[2] :])
        else:
            self.watch.see(q, positions, valid)
        observers = [p.score for p in cache.policies if p.score.card.can("all-queries")]
        if observers:
            x = self._context(call, q, positions, valid)
            for score in dict.fromkeys(observers):
                score.observe(x)

    def _context(self, call: LayerCall, q: Tensor, positions: Tensor, valid: Tensor | None,
                 hidden: Tensor | None = None) -> LayerContext:
        cache = self.cache()
        assert cache is not None and self.real is not None
        held = self.store.view()
        if valid is None:
            valid = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        entry = cache.entry_bytes(held.k.shape[-1], held.k.element_size())
        heads = held.k.shape[1]
        return LayerContext(
            k=held.k, v=held.v, valid=held.valid, positions=held.positions, seen=self.real, q=q, q_valid=valid,
            q_positions=positions, scale=call.scale, layer=self.layer, n_layers=cache.n_layers,
            bytes_per_token=entry * heads * cache.n_layers * held.k.shape[0], softcap=call.softcap,
            per_key=self.per_key, stats=self.stats, parts=call.parts, hidden=hidden,
            spans=cache.prompt.spans if cache.prompt else {},
        )

    def compress(self, call: LayerCall | None = None) -> None:
        """Choose what stays, and free the rest."""
        cache = self.cache()
        assert cache is not None
        if not cache.policies:
            held = self.store.lengths()
            self.history.append(LayerRecord(self.seen, int(held.sum()), held, self.store.nbytes()))
            return
        call = call or self.last_call
        if call is None:
            raise Refused("nothing was read yet, so there is nothing to compress.")
        x = self._context(call, self.watch.q(call.q), self.watch.positions(call.positions), self.watch.valid,
                          self.watch.hidden)
        plan = self._plan(x, cache)
        if int(plan.counts.sum()) < int(x.valid.sum()) or cache.recodes:
            self._adopt(plan)
        real = int(x.seen.sum()) * x.k.shape[1]
        self.history.append(LayerRecord(self.seen, real, plan.counts, self.store.nbytes()))
        if not cache.watches(self.seen + 1):
            self.watch, self.per_key, self.stats = QueryWindow(self.watch.rows), {}, {}

    def _plan(self, x: LayerContext, cache: RecipeCache) -> KeepPlan:
        if len(cache.rows) == 1:
            policy = cache.rows[0].policy
            return KeepPlan(x.valid) if policy is None else policy.plan(x)
        mask = x.valid.clone()
        for part in cache.rows:
            if part.policy is not None:
                assert part.rows is not None
                mask[part.rows] = part.policy.plan(select_rows(x, part.rows)).mask
        return KeepPlan(mask)

    def _adopt(self, plan: KeepPlan) -> None:
        """Move into the store that fits the plan and keep what it names."""
        self.per_key = {name: _packed(t, plan) for name, t in self.per_key.items()}
        cache = self.cache()
        assert cache is not None
        if cache.store_method is None and self.store.untouched and not plan.equal_lengths:
            ragged = Ragged().make()
            ragged.tail = self.store.tail
            self.store = ragged
        self.store.keep(plan.mask)


def _stock_state(layer: Any) -> dict[str, Any]:
    """A sliding layer of transformers replaces its tensors, never writes into them: references are enough."""
    return dict(layer.__dict__)


def _packed(t: Float[Tensor, "B H S"], plan: KeepPlan) -> Tensor:
    """Per-entry statistics in the layout that a store's `view` has after keeping `plan`."""
    longest = int(plan.counts.max())
    order = plan.mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
    return t.gather(-1, order)


def _pieces(start: int, stop: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [start, *[c for c in cuts if c < stop], stop]
    return list(zip(edges, edges[1:]))


def select_rows(x: LayerContext, rows: Int[Tensor, "R"]) -> LayerContext:
    """The context of some rows of a batch."""
    names = ("k", "v", "valid", "positions", "seen", "q", "q_valid", "q_positions")
    picked = {n: getattr(x, n)[rows] for n in names}
    share = x.bytes_per_token
    return LayerContext(
        **picked, scale=x.scale, layer=x.layer, n_layers=x.n_layers, bytes_per_token=share, softcap=x.softcap,
        per_key={n: t[rows] for n, t in x.per_key.items()}, stats={n: t[rows] for n, t in x.stats.items()},
        parts=x.parts, hidden=None if x.hidden is None else x.hidden[rows], spans=x.spans,
    )


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
    compressions: int = 0
    density: float = 1.0
    """Share of causal query-key pairs computed while reading the prompt."""

    def as_json(self) -> dict[str, Any]:
        return {"seen": self.seen, "asked": self.asked, "kept_fraction": round(self.kept_fraction, 6),
                "cache_bytes": self.cache_bytes, "full_cache_bytes": self.full_bytes,
                "compressions": self.compressions, "density": round(self.density, 6), "kept_per_layer_and_head": self.kept}


def achieved_from_json(found: dict[str, Any]) -> Achieved:
    """The inverse of `Achieved.as_json`."""
    names = {"full_bytes": "full_cache_bytes", "kept": "kept_per_layer_and_head"}
    return Achieved(**{f.name: found[names.get(f.name, f.name)] for f in fields(Achieved)})


class RecipeCache(Cache):
    """A cache whose layers compress themselves by one policy, or by one per row.

    Args:
        rows: which policy rules which rows; one entry with ``rows=None`` for a whole batch.
        n_layers: attention layers of the model.
        windows: per layer the sliding window that stays with transformers' own layer, or None.
        prompt: what is being continued; None when unknown (then nothing is compressed until `commit`).
    """

    def __init__(self, rows: list[Rows], n_layers: int, windows: list[int | None], prompt: Prompt | None) -> None:
        self.rows = rows
        self.policies = [r.policy for r in rows if r.policy is not None]
        self.n_layers = n_layers
        self.prompt = prompt
        self.active = True
        self.needs_hidden = any(p.score.card.can("hidden-states") for p in self.policies)
        self.store_method = _one({p.store for p in self.policies}, "store")
        self.schedule: Schedule = _one({p.schedule for p in self.policies}, "schedule") or AtPrompt()
        self.recodes = self.store_method is not None and self.store_method.card.can("lossy")
        layers = [PolicyLayer(self, i) if w is None else DynamicSlidingWindowLayer(w) for i, w in enumerate(windows)]
        super().__init__(layers=layers)

    @property
    def policy_layers(self) -> list[PolicyLayer]:
        return [layer for layer in self.layers if isinstance(layer, PolicyLayer)]

    @property
    def prompt_length(self) -> int | None:
        return self.prompt.length if self.prompt else None

    def cuts(self, start: int, stop: int) -> list[int]:
        """Where to compress in (start, stop]; without a policy only the sizes are noted there."""
        return self.schedule.cuts(start, stop, self.prompt_length)

    def watches(self, seen: int) -> bool:
        """Whether queries must still be watched after `seen` tokens."""
        return bool(self.policies) and self.schedule.watches(seen, self.prompt_length)

    def entry_bytes(self, head_dim: int, itemsize: int) -> float:
        store: Store = self.store_method or Dense()
        return store.entry_bytes(head_dim, itemsize)

    def commit(self) -> None:
        """Compress now: for bare forwards, where the prompt's end is known to the caller alone."""
        for layer in self.policy_layers:
            layer.compress()
        self.prompt = self.prompt or Prompt(None, self.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def snapshot(self) -> list[Any]:
        """A point to come back to, whatever is read or evicted in between. Costs no copy of keys and values."""
        return [layer.snapshot() if isinstance(layer, PolicyLayer) else _stock_state(layer) for layer in self.layers]

    def restore(self, point: list[Any]) -> None:
        for layer, state in zip(self.layers, point):
            layer.restore(state) if isinstance(layer, PolicyLayer) else layer.__dict__.update(state)

    def kept_positions(self) -> list[list[Int[Tensor, "n"]]]:
        """Positions held per layer and KV head in the first row (layers that keep transformers' own cache: none)."""
        views = [layer.store.view() for layer in self.policy_layers]
        return [[view.positions[0, h][view.valid[0, h]] for h in range(view.k.shape[1])] for view in views]

    def nbytes(self) -> int:
        """Bytes held now."""
        own = sum(layer.store.nbytes() for layer in self.policy_layers)
        stock = [layer for layer in self.layers if not isinstance(layer, PolicyLayer) and layer.keys is not None]
        return own + sum(t.untyped_storage().nbytes() for layer in stock for t in (layer.keys, layer.values))

    def achieved(self) -> Achieved:
        """What was kept and what it takes."""
        layers = self.policy_layers
        asked = "; ".join(str(p) for p in self.policies)
        if not layers or not layers[0].seen:
            return Achieved(0, asked=asked)
        rows = 1 if layers[0].real is None else len(layers[0].real)
        per_token = sum(layer.token_bytes for layer in layers) * rows
        if not layers[0].history:
            return Achieved(self.get_seq_length(), [], asked, 1.0, self.nbytes(), per_token * self.get_seq_length())
        last = [layer.history[-1] for layer in layers]
        kept = [record.kept.float().mean(0).tolist() for record in last]
        fraction = sum(int(r.kept.sum()) for r in last) / max(1, sum(r.real for r in last))
        return Achieved(last[0].seen, kept, asked, fraction, sum(r.bytes for r in last), per_token * last[0].seen,
                        len(layers[0].history))


def _one(found: set[Any], what: str) -> Any:
    if len(found) > 1:
        raise Refused(f"rows of one batch must share a {what}, got {', '.join(sorted(map(str, found)))}.")
    return next(iter(found), None)
