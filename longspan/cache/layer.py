"""One layer of the cache: a store, and the policies that say what stays in it.

A layer only *stages* new keys and values in `update`; the attention hook then calls `PolicyLayer.attend`, which appends
them piece by piece: up to each point where the schedule compresses, attend, compress, go on. That is why chunked
prefill, drafts and a prompt that ends inside a call change nothing. Rejected drafts leave no trace either: what they
would have evicted and what scores noted about them is taken back.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from longspan.cache.base import KeepPlan, LayerContext
from longspan.cache.records import Drafts, LayerRecord, Notes, select_rows
from longspan.cache.store import LayerStore, View, kept_last
from longspan.cache.stores.dense import Dense, DenseLayer
from longspan.cache.stores.ragged import Ragged, RaggedLayer
from longspan.cache.watch import QueryWindow
from longspan.models.call import LayerCall
from longspan.models.drop import PROMPT_ROWS, Dropped
from longspan.registry import Refused

if TYPE_CHECKING:
    from longspan.cache.cache import RecipeCache

Reader = Callable[[LayerCall, Tensor, Tensor, Tensor, Bool[Tensor, "B S"] | None], Tensor | None]
"""Attends query rows over keys and values by a read plan, or returns None to have them attended densely."""


class SlidingLayer(DynamicSlidingWindowLayer):
    """Transformers' sliding layer, which keeps a window as a slice of all it was given, with that memory freed."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found = super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        if self.keys.untyped_storage().nbytes() > 2 * self.keys.numel() * self.keys.element_size():
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return found


class PolicyLayer(CacheLayerMixin):
    """One layer: a store, and the policies that say what stays in it."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False
    is_croppable = True

    def __init__(self, cache: RecipeCache, layer: int) -> None:
        super().__init__()
        self._weak_cache = weakref.ref(cache)
        self.layer = layer
        self.seen = 0
        self.store: LayerStore = (cache.store_method or Dense()).make()
        self.watch = QueryWindow(max((p.window_rows() for p in cache.policies), default=0))
        self.notes = [Notes() for _ in cache.rows]
        self.pads: Int[Tensor, " B"] | None = None
        """Slots of each row that were padding; None when there were none."""
        self.staged: tuple[Tensor, Tensor] | None = None
        self.drafts: Drafts | None = None
        self.record: LayerRecord | None = None
        self.compressions = 0
        self.facts: tuple[float, float | None, Any] = (1.0, None, None)
        """Scale, softcap and model parts of the latest call."""
        self.token_bytes = 0
        """Bytes of one token's keys and values in this layer, in the model's dtype, one row."""

    @property
    def cache(self) -> RecipeCache:
        cache = self._weak_cache()
        if cache is None or not cache.active:
            raise RuntimeError("this cache belongs to a recipe that was left; use it inside `with recipe.on(model):`.")
        return cache

    # -- what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stage new tokens, (B,H,T,D); the attention hook reads them from here."""
        cache = self.cache
        if self.staged is not None or (self is cache.first and cache.get_seq_length(-1) != self.seen):
            raise RuntimeError("an earlier forward on this cache was broken off, or the model's attention doesn't go through "
                               "the recipe, so its layers hold different tokens; start with a new cache.")
        if self is cache.first:
            cache.dropped = None
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
        """Take back the newest tokens (a negative number); rejected drafts end this way.

        Raises:
            Refused: some of them were already compressed by an earlier call.
        """
        n = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        drafts, self.drafts = self.drafts, None
        if n == 0 or not self.seen:  # a layer that a draft leaves out has read nothing
            return
        if self.cache.computed < 1 and self.seen - n < (self.cache.prompt_length or 0):
            raise Refused(f"can't take back {n} tokens: part of the prompt was dropped while it was read; ask for at most "
                          f"{self.seen - (self.cache.prompt_length or 0)}.")
        if drafts is not None and n <= drafts.stop - drafts.first:
            self._replay(drafts, drafts.stop - n)
            return
        tail = self.store.tail
        pads = None if tail.valid is None else (~tail.valid[:, -n:]).sum(1)
        self.store.crop(n)
        self.seen -= n
        if self.pads is not None and pads is not None:
            self.pads = self.pads - pads
        self.watch.crop(n)
        width = self.store.width()
        self.notes = [notes.mapped(lambda t: t[..., :width]) for notes in self.notes]

    def _replay(self, drafts: Drafts, stop: int) -> None:
        """Go back to before the drafts and take in only those that were accepted."""
        self.restore(drafts.before)
        part = slice(drafts.first, stop)
        if stop > drafts.first:
            call = drafts.call
            self.staged = call.k[:, :, part], call.v[:, :, part]
            hidden = None if call.hidden is None else call.hidden[:, part]
            self.attend(replace(call, q=call.q[:, :, part], positions=call.positions[:, part], hidden=hidden))
            self.drafts = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.seen:
            self.store.select(indices)
            self.watch.select(indices)
            self.pads = None if self.pads is None else self.pads[indices]
            self.notes = [notes.mapped(lambda t: t[indices], lambda t: t[indices]) for notes in self.notes]
            self.drafts = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
            rows, device = self.store.lengths().shape[0], self.store.lengths().device
            self.batch_select_indices(torch.arange(rows, device=device).repeat_interleave(repeats))

    def reset(self) -> None:
        self.__init__(self.cache, self.layer)  # type: ignore[misc]

    # -- coming back, and going on elsewhere

    def snapshot(self) -> dict[str, Any]:
        """The layer's state, by reference: buffers only ever grow beyond what a snapshot counts."""
        names = ("seen", "pads", "record", "compressions")
        return {n: getattr(self, n) for n in names} | _copied(self.__dict__)

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `snapshot`, which stays good for another time."""
        self.__dict__.update(state | _copied(state))
        self.staged = self.drafts = None

    def state(self) -> dict[str, Tensor]:
        """Everything the layer needs to go on elsewhere, as tensors by name."""
        found = self.store.state() | {f"watch.{n}": t for n, t in self.watch.tensors().items()}
        for i, notes in enumerate(self.notes):
            found |= {f"note.{i}.per_key.{n}": t for n, t in notes.per_key.items()}
            found |= {f"note.{i}.stats.{n}": t for n, t in notes.stats.items()}
        if self.record is not None:
            r = self.record
            found |= {"record.kept": r.kept, "record.numbers": torch.tensor([r.seen, r.real, r.bytes, self.compressions])}
        return found if self.pads is None else found | {"pads": self.pads}

    def load_state(self, state: dict[str, Tensor], seen: int, store: str) -> None:
        """Take over what `state` gave: tensors by name, tokens seen, and the store's class name."""
        if store == RaggedLayer.__name__ and not isinstance(self.store, RaggedLayer):
            self.store = Ragged().make()
        self.pads = state.get("pads")
        self.watch.load({n[6:]: t for n, t in state.items() if n.startswith("watch.")})
        for name, t in state.items():
            if name.startswith("note."):
                _, i, kind, own = name.split(".", 3)
                getattr(self.notes[int(i)], kind)[own] = t
        if "record.kept" in state:
            was, real, size, self.compressions = state["record.numbers"].tolist()
            self.record = LayerRecord(was, real, state["record.kept"], size)
        self.store.load(state)
        self.seen, self.is_initialized = seen, True
        k = self.store.view().k
        self.token_bytes = 2 * k.shape[1] * k.shape[3] * k.element_size()

    # -- what the hook calls

    def attend(self, call: LayerCall, read: Reader | None = None) -> Float[Tensor, "B Hq T D"]:
        """Attention of a call's rows, compressing wherever the schedule says so."""
        assert self.staged is not None, "attend() without update()"
        (k, v), cache = self.staged, self.cache
        self.staged = self.drafts = None
        self.facts = (call.scale, call.softcap, call.parts)
        self.store.bind(call.layer, call.parts)
        dropped = self._left_out(cache)
        gap = dropped.gap if dropped is not None else 0
        start, T = self.seen, k.shape[2] + gap
        cuts = cache.cuts(start, start + T)
        if T == 1 and not cuts:
            return self._attend_piece(cache, call, k, v, 0, 1, None)
        if cache.drops:
            cache.check_whole(start, start + T)
        outs = []
        for a, b in _pieces(start, start + T, cuts):
            # Rows of this call that stand for the slots from a to b; what was left out lies in the first piece.
            first, last = max(0, a - start - gap), b - start - gap
            if cache.may_take_back(a, start + T) and self.drafts is None:
                # Without what leads back to this layer: a cycle would keep the tensors alive.
                self.drafts = Drafts(self.snapshot(), replace(call, k=k, v=v, store=None), first)
            outs.append(self._attend_piece(cache, call, k, v, first, last, read, dropped if a == start else None))
            if b in cuts:
                self.compress()
                self._drop(cache, T)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _drop(self, cache: RecipeCache, width: int) -> None:
        """Let the layers after this one go on with the prompt tokens that the policy has named, if it has."""
        keep = cache.across.pop(PROMPT_ROWS, None)
        if keep is not None:
            real = self._real(len(keep), keep.device)
            cache.drop(Dropped.after(self.layer, keep, width), int(keep.sum()) / int(real.sum()))

    def _left_out(self, cache: RecipeCache) -> Dropped | None:
        """What an earlier layer left out of the call that this layer is about to read."""
        dropped = cache.dropped
        return dropped if dropped is not None and dropped.layer < self.layer and self.seen == 0 else None

    def _real(self, rows: int, device: torch.device) -> Int[Tensor, " B"]:
        """Real tokens read so far in each row of the batch, whether or not this layer was given them."""
        seen = torch.full((rows,), self.seen, device=device)
        return seen if self.pads is None else seen - self.pads

    def _attend_piece(self, cache: RecipeCache, call: LayerCall, k: Tensor, v: Tensor, a: int, b: int,
                      read: Reader | None, dropped: Dropped | None = None) -> Float[Tensor, "B Hq T D"]:
        q, positions, hidden = call.q, call.positions, call.hidden
        if b - a != k.shape[2]:
            q, positions, k, v = q[:, :, a:b], positions[:, a:b], k[:, :, a:b], v[:, :, a:b]
            hidden = None if hidden is None else hidden[:, a:b]
        slots = b - a + (0 if dropped is None else dropped.gap)
        valid = cache.real_slots(call.padding, self.seen, self.seen + slots)
        fresh = read is not None and b - a > 1 and self.store.untouched and self.store.tail.length == self.seen
        if valid is not None:
            pads = (~valid).sum(1)
            self.pads = pads if self.pads is None else self.pads + pads
        if dropped is not None:
            valid = None if dropped.real is None else dropped.real[:, : b - a].to(k.device)
        self.store.append(k, v, cache.own_positions(self, positions), valid)
        self.seen += slots
        if cache.watches(self.seen):
            self._watch(cache, q, positions, valid, hidden)
        if fresh and read is not None:
            tail = self.store.tail
            out = read(call, q, tail.keys, tail.values, tail.valid)
            if out is not None:
                return out
        if cache.reads is not None:
            answer = cache.reads(call, q, positions, self.store)
            if answer is not None:
                return answer
        # Until more was read than the window holds, it hides nothing.
        window = call.window if call.window is not None and self.seen > call.window else None
        return self.store.attend(q, positions, scale=call.scale, window=window, softcap=call.softcap)

    # -- choosing what stays

    def _watch(self, cache: RecipeCache, q: Tensor, positions: Tensor, valid: Tensor | None, hidden: Tensor | None) -> None:
        self.watch.see(q, positions, valid, hidden if cache.needs_hidden else None)
        for part, notes in zip(cache.rows, self.notes):
            if part.policy is not None and part.policy.can("all-queries"):
                seen = (q, positions, valid, hidden if cache.needs_hidden else None)
                part.policy.observe(self._context(cache, self.store.view(), notes, seen))

    def _context(self, cache: RecipeCache, held: View, notes: Notes,
                 rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None) -> LayerContext:
        """The layer as scores see it, with query rows (q, positions, valid, hidden); by default those kept."""
        scale, softcap, parts = self.facts
        B, heads, _, dim = held.k.shape
        if rows is None:
            rows = self.watch.held() or (held.k.new_empty(B, parts.n_heads, 0, dim),
                                         torch.empty(B, 0, dtype=torch.int64, device=held.k.device), None, None)
        q, positions, valid, hidden = rows
        if valid is None:
            valid = torch.ones(B, q.shape[2], dtype=torch.bool, device=q.device)
        prompt, real = cache.prompt, self._real(B, held.k.device)
        return LayerContext(
            k=held.k, v=held.v, valid=held.valid, positions=held.positions, q=q, q_valid=valid, q_positions=positions,
            seen=real, prompt=None if prompt is None else real - self.seen + prompt.length,
            across=cache.across, scale=scale, layer=self.layer, n_layers=cache.n_layers,
            bytes_per_token=cache.entry_bytes(dim, held.k.element_size()) * heads * cache.n_layers * cache.rows_of_one(B),
            softcap=softcap, per_key=notes.per_key, stats=notes.stats, parts=parts, hidden=hidden,
            spans=prompt.spans if prompt else {}, early=prompt is not None and self.seen < prompt.length,
        )

    def compress(self) -> None:
        """Choose what stays, and free the rest."""
        cache = self.cache
        self.compressions += 1
        if not cache.policies:
            counts = self.store.lengths()
            self.record = LayerRecord(self.seen, int(counts.sum()), counts, self.store.nbytes())
            return
        held = self.store.view()
        plan, real = self._plan(cache, held)
        if cache.recodes or int(plan.counts.sum()) < int(held.valid.sum()):
            self._adopt(cache, plan, held)
        del held
        self.record = LayerRecord(self.seen, real * plan.mask.shape[1], plan.counts, self.store.nbytes())
        if not cache.watches(self.seen + 1):
            self.watch, self.notes = QueryWindow(self.watch.rows), [Notes() for _ in cache.rows]

    def _plan(self, cache: RecipeCache, held: View) -> tuple[KeepPlan, int]:
        """What every row's policy keeps, and the real tokens read so far over all rows."""
        keep, shift = held.valid.clone(), None
        for part, notes in zip(cache.rows, self.notes):
            x = self._context(cache, held, notes)
            if part.policy is None:
                continue
            if part.rows is None:
                return part.policy.plan(x), int(x.seen.sum())
            rows = cache.batch_rows(part.rows, len(keep)).to(keep.device)
            own = select_rows(x, rows)
            plan = part.policy.plan(own)
            keep[rows] = plan.mask
            if plan.shift is not None:
                shift = torch.zeros(keep.shape, dtype=plan.shift.dtype, device=keep.device) if shift is None else shift
                shift[rows] = plan.shift
            for name, t in own.per_key.items():
                notes.per_key[name] = t.new_zeros(len(keep), *t.shape[1:]).index_copy(0, rows, t)
            for name, t in own.stats.items():
                notes.stats[name] = t.new_zeros(len(keep), *t.shape[1:]).index_copy(0, rows, t)
        return KeepPlan(keep, shift), int(x.seen.sum())

    def _adopt(self, cache: RecipeCache, plan: KeepPlan, held: View) -> None:
        """Move into the store that fits the plan and keep what it names."""
        width = plan.mask.shape[-1]
        self.notes = [notes.mapped(lambda t: packed(F.pad(t, (0, width - t.shape[-1])), plan)) for notes in self.notes]
        if cache.store_method is None and isinstance(self.store, DenseLayer) and not plan.equal_lengths:
            ragged = Ragged().make()
            ragged.tail = self.store.tail
            self.store = ragged
        keys = None
        if plan.shift is not None:
            parts = self.facts[2]
            cos, sin = parts.rope(plan.shift, self.layer)
            length = (cos.float().square() + sin.float().square()).sqrt()
            keys = parts.rotate(held.k, cos / length, sin / length)
        self.store.keep(plan.mask, keys)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """The changing objects of a layer's state, as copies that share their tensors."""
    store = copy.copy(state["store"])
    store.tail = copy.copy(store.tail)
    return {"store": store, "watch": copy.copy(state["watch"]), "notes": [n.mapped(lambda t: t) for n in state["notes"]]}


def packed(t: Float[Tensor, "B H S"], plan: KeepPlan) -> Tensor:
    """Per-entry statistics in the layout that a store's `view` has after keeping `plan`."""
    return t.gather(-1, kept_last(plan.mask, int(plan.counts.max())))


def _pieces(start: int, stop: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [start, *[c for c in cuts if c < stop], stop]
    return list(itertools.pairwise(edges))
