"""Reading a prompt once for many policies.

Compressing at the prompt's end doesn't change what the prompt's own layers computed, so all policies that wait until then
may share one reading. `gatherer` makes the policy of that reading: it evicts nothing, keeps the widest query window that
any of them wants, and lets every score that watches all rows take its own notes. `fork` then gives each policy a cache of
its own, compressed as if it had read the prompt alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longspan.cache.base import KeepPlan, LayerContext, Policy, Schedule
from longspan.cache.cache import RecipeCache, Rows
from longspan.cache.layer import Notes, PolicyLayer
from longspan.cache.policy import AnyPolicy, CachePolicy, OwnPolicy
from longspan.cache.schedules.prompt import AtPrompt
from longspan.cache.watch import QueryWindow
from longspan.registry import Card, Refused


def note_key(policy: AnyPolicy) -> str:
    """What a policy's notes depend on: policies with one score share them."""
    return str(policy.score) if isinstance(policy, CachePolicy) else str(policy)


def can_share(policy: AnyPolicy) -> bool:
    """Whether the policy leaves the reading of the prompt as it is and chooses at its end."""
    return isinstance(policy.schedule or AtPrompt(), AtPrompt) and not policy.can("drops-tokens")


class Gatherer(Policy):
    """Watches a prompt for other policies and evicts nothing."""

    def __init__(self, policies: Sequence[AnyPolicy]) -> None:
        found = {note_key(p): p for p in policies}
        needs = [c for c in ("all-queries", "hidden-states") if any(p.can(c) for p in found.values())]
        object.__setattr__(self, "watching", {key: p for key, p in found.items() if p.can("all-queries")})
        object.__setattr__(self, "rows", max((p.window_rows() for p in found.values()), default=0))
        object.__setattr__(self, "card", Card("gatherer", "policy", "", "cache", "", "Watches for others.", __name__, "Gatherer",
                                              capabilities=tuple(needs)))

    def __str__(self) -> str:
        return "gatherer"

    def window_rows(self) -> int:
        return self.rows  # type: ignore[attr-defined]

    def observe(self, x: LayerContext) -> None:
        for key, policy in self.watching.items():  # type: ignore[attr-defined]
            own = replace(x, per_key=_under(key, x.per_key), stats=_under(key, x.stats))
            policy.observe(own)
            x.per_key.update({f"{key}/{name}": t for name, t in own.per_key.items()})
            x.stats.update({f"{key}/{name}": t for name, t in own.stats.items()})

    def plan(self, x: LayerContext) -> KeepPlan:
        return KeepPlan(x.valid)


class _Never(Schedule):
    """Compresses at no point, and goes on watching."""

    card = Card("never", "schedule", "", "cache", "", "Never.", __name__, "_Never")

    def __str__(self) -> str:
        return "never"

    def cuts(self, start: int, stop: int, prompt: int | None) -> list[int]:
        return []


def gatherer(policies: Sequence[AnyPolicy]) -> OwnPolicy:
    """The policy under which a prompt is read for all of `policies`.

    Raises:
        Refused: one of them compresses before the prompt's end, or drops tokens while it is read.
    """
    for policy in policies:
        if not can_share(policy):
            raise Refused(f"{policy} changes how the prompt is read, so it can't share a reading; expected a policy that "
                          "chooses at the prompt's end.")
    return OwnPolicy(Gatherer(policies), schedule=_Never())


@torch.inference_mode()
def fork(base: RecipeCache, policy: AnyPolicy | None) -> RecipeCache:
    """A cache compressed by `policy`, made of one that was read under `gatherer`; `base` stays as it is."""
    made = RecipeCache([Rows(policy)], base.n_layers, base.windows, base.prompt)
    made.active, made.kin = base.active, base.kin
    base.kin.add(made)
    for layer, own in zip(base.layers, made.layers):
        if isinstance(layer, PolicyLayer):
            assert isinstance(own, PolicyLayer)
            _take_over(own, layer, policy)
            own.compress()
            _separate(own, layer)
        else:
            own.__dict__.update(copy.deepcopy(layer.__dict__))
    return made


def follower(base: RecipeCache) -> RecipeCache:
    """A copy that goes on from here and evicts nothing more: a draft's cache, whose tokens must all be able to go again."""
    made = RecipeCache([Rows(None)], base.n_layers, base.windows, base.prompt)
    made.active, made.kin, made.computed = base.active, base.kin, base.computed
    base.kin.add(made)
    for layer, own in zip(base.layers, made.layers):
        if isinstance(layer, PolicyLayer):
            assert isinstance(own, PolicyLayer)
            own.restore(copy.deepcopy(layer.snapshot()))
            own.facts, own.token_bytes, own.is_initialized = layer.facts, layer.token_bytes, layer.is_initialized
            own.watch, own.notes = QueryWindow(0), [Notes()]
        else:
            own.__dict__.update(copy.deepcopy(layer.__dict__))
    return made


def _take_over(own: PolicyLayer, layer: PolicyLayer, policy: AnyPolicy | None) -> None:
    """Stand where `layer` stands, with the notes of `policy` alone and the keys and values shared."""
    wanted = own.store
    own.restore(layer.snapshot())
    own.facts, own.token_bytes, own.is_initialized = layer.facts, layer.token_bytes, layer.is_initialized
    key = "" if policy is None else note_key(policy)
    own.notes = [Notes(_under(key, layer.notes[0].per_key), _under(key, layer.notes[0].stats))]
    if type(wanted) is not type(own.store) and own.store.untouched:
        wanted.tail = own.store.tail
        wanted.bind(own.layer, own.facts[2])
        own.store = wanted


def _separate(own: PolicyLayer, layer: PolicyLayer) -> None:
    """Where nothing was evicted, copy: what is appended later must not end up in a buffer that others read on from."""
    tail = own.store.tail
    if tail.k is not None and tail.v is not None and tail.k is layer.store.tail.k:
        tail.k, tail.v = tail.keys.clone(), tail.values.clone()


def _under(key: str, notes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The notes of one policy, under their own names."""
    return {name[len(key) + 1 :]: t for name, t in notes.items() if name.startswith(f"{key}/")}

