"""Recipes: compositions of methods, written as text or as objects, and run on a model.

    recipe = Recipe.parse("snapkv(budget=0.2)")
    with recipe.on(model):
        model.generate(**inputs)
    recipe.achieved.cache_bytes

A recipe holds any number of position parts and weight transforms, at most one selector (which query-key pairs are
computed while the prompt is read), one cache policy (what is kept) and one decoding method. ``full`` is the empty
recipe. Everything here decides by the kinds and capabilities on cards.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan import grammar
from longspan.cache import (
    Achieved,
    AnyPolicy,
    Budget,
    CachePolicy,
    OwnPolicy,
    Policy,
    RecipeCache,
    Rows,
    Schedule,
    Score,
    Store,
)
from longspan.cache.cache import check_drops
from longspan.decoding import Draft
from longspan.grammar import Call, Part
from longspan.models.arguments import refuse_arguments
from longspan.models.call import LayerCall, Prompt, plain_attention
from longspan.models.hook import attached
from longspan.prefill import PairCount, ReadContext, Selector, read_rows
from longspan.registry import Method, Refused, card
from longspan.registry import get as card_class

POLICY_KEYS = ("budget", "store", "schedule")
SLOTS = {"score": "cache", "policy": "cache", "reuse": "reuse", "selector": "selector", "token-subset": "subsets",
         "position": "positions", "weight-transform": "weights", "draft": "decoding",
         "denoising": "denoising"}
"""Kinds that may stand as a part of a recipe, and the slot they fill."""


@dataclass
class Recipe:
    """A composition of methods. Build it with `Recipe.parse`, or by giving the slots."""

    cache: AnyPolicy | None = None
    selector: Selector | None = None
    subsets: tuple[Method, ...] = ()
    positions: tuple[Method, ...] = ()
    weights: tuple[Method, ...] = ()
    decoding: Draft | None = None
    """Where proposed tokens come from, and how they are checked."""
    denoising: Method | None = None
    """How a block-diffusion model attends while it writes."""
    reuse: Method | None = None
    """How caches of single documents, made before, are joined."""
    name: str = ""
    """How the user wrote it; `str(recipe)` otherwise."""
    last_run: Run | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read a recipe as text.

        Raises:
            Refused: unknown names or knobs (with the nearest), parts that exclude each other (with the reason).
        """
        parts = grammar.parse(text)
        made = cls()
        for part in parts:
            if part.call.name == "full" and part.at is None and not part.call.settings:
                continue
            if part.call.name == "auto":
                raise Refused("recipe 'auto' stands for what the planner chooses and needs a model and a length; "
                              "use `longspan plan`, or `--recipe auto` where a command takes a recipe.")
            made._add(part)
        made._check_reuse()
        made.name = text.strip()
        return made

    def _check_reuse(self) -> None:
        """Documents' caches are made with the model as it is, and hold every token."""
        others = [m for m in self.methods if m is not self.reuse]
        if self.reuse is not None and others:
            raise Refused(f"{self.reuse} + {others[0]}: caches of documents are read and kept by the plain model, so "
                          f"{self.reuse.card.name} stands alone in a recipe; compare the two as recipes of their own.")

    def _add(self, part: Part) -> None:
        kind = card(part.call.name).kind
        if kind not in SLOTS:
            raise Refused(f"{part.call.name} is a {kind} and can't stand alone in a recipe; {_where(kind, part.call.name)}")
        if part.at is not None and kind != "score":
            raise Refused(f"{part.call.name} @ {part.at.name}: only a score takes a budget behind @, "
                          f"and {part.call.name} is a {kind}.")
        slot = SLOTS[kind]
        if slot in ("cache", "selector", "decoding", "denoising", "reuse") and getattr(self, slot) is not None:
            raise Refused(f"{part.call.name}: the recipe already has {getattr(self, slot)} as its {slot}; expected one.")
        if slot in ("subsets", "positions") and any(kind == "position" or m.card.name == part.call.name
                                                     for m in getattr(self, slot)):
            raise Refused(f"{part.call.name}: the recipe already has {getattr(self, slot)[0]}; expected one.")
        if kind == "position" and not hasattr(card_class(part.call.name), "on"):
            raise Refused(f"{part.call.name} is a position scheme of models trained here (longspan train --position "
                          f"{part.call.name}); a pretrained model keeps its own, so leave it out of the recipe.")
        made: Any = _policy(part) if kind == "score" else _own_policy(part.call) if kind == "policy" else grammar.build(part.call)
        setattr(self, slot, (*getattr(self, slot), made) if slot in ("subsets", "positions", "weights") else made)

    def __str__(self) -> str:
        parts = [*self.positions, *self.weights, self.reuse, self.selector, *self.subsets, self.cache, self.decoding,
                 self.denoising]
        return " + ".join(str(p) for p in parts if p is not None) or "full"

    def __add__(self, other: Recipe) -> Recipe:
        return Recipe.parse(f"{self} + {other}")

    @property
    def scored(self) -> CachePolicy:
        """The cache policy, where it is a score times a budget.

        Raises:
            Refused: the recipe keeps everything, or chooses in another way.
        """
        if not isinstance(self.cache, CachePolicy):
            raise Refused(f"recipe {str(self)!r} has no score; expected one such as snapkv(budget=0.2).")
        return self.cache

    def window(self, native: int) -> int:
        """Positions that a model made for `native` ones serves under this recipe."""
        for position in self.positions:
            native = position.window(native)  # type: ignore[attr-defined]
        return native

    @property
    def methods(self) -> list[Method]:
        """Every method in the recipe."""
        inner = self.cache.methods if self.cache else []
        found = [*self.positions, *self.weights, self.reuse, self.selector, *self.subsets, *inner, self.decoding, self.denoising]
        if self.decoding is not None:
            found.append(self.decoding.verify.beside(self.decoding))
        return [m for m in found if m is not None]

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[Run]:
        """Run the model under this recipe until the block ends; then it is what it was.

        Raises:
            Refused: the model, or a `generate` argument, can't be combined with the recipe.
        """
        if self.reuse is not None:
            raise Refused(f"{self.reuse} joins documents for a question, which a bare prompt doesn't tell; use "
                          "longspan.context.open_context(loaded, text, recipe), `longspan ask`, or `longspan compare`.")
        with per_row([self], model) as run:
            self.last_run = run
            yield run

    @property
    def achieved(self) -> Achieved:
        """What the last cache made under this recipe holds."""
        if self.last_run is None:
            raise Refused("the recipe hasn't run yet; use it as `with recipe.on(model): model.generate(...)`.")
        return self.last_run.achieved


def _policy(part: Part) -> CachePolicy:
    """A score with its budget, store and schedule."""
    given = {k: part.call.settings[k] for k in POLICY_KEYS if k in part.call.settings}
    own = {k.name for k in card(part.call.name).knobs}
    score = grammar.build(part.call, extra=tuple(k for k in POLICY_KEYS if k not in own))
    if part.at is not None and "budget" in given:
        raise Refused(f"{part.call.name}(budget=…) @ {part.at.name}: the budget stands twice; "
                      f"write {part.call.name} @ {part.at.name}(budget={given['budget']}).")
    at = part.at or Call("uniform", {"budget": given.get("budget", score.default_budget)})  # type: ignore[attr-defined]
    if card(at.name).kind != "budget":
        raise Refused(f"{part.call.name} @ {at.name}: {at.name} is a {card(at.name).kind}; expected a budget such as "
                      "adakv(budget=0.2).")
    budget = grammar.build(at)
    store = _method(given.get("store"), "store")
    schedule = _method(given.get("schedule"), "schedule")
    assert isinstance(score, Score) and isinstance(budget, Budget)
    assert store is None or isinstance(store, Store)
    assert schedule is None or isinstance(schedule, Schedule)
    return CachePolicy(score, budget, store, schedule)


def _own_policy(call: Call) -> OwnPolicy:
    """A method that chooses by itself, with its store and schedule: the recipe's, or its own."""
    chooser = grammar.build(call, extra=("store", "schedule"))
    assert isinstance(chooser, Policy)
    written = {"store": chooser.default_store, "schedule": chooser.default_schedule}
    own = {name: grammar.parse(text)[0].call for name, text in written.items() if text is not None}
    given = own | {k: v for k, v in call.settings.items() if k in written}
    store, schedule = _method(given.get("store"), "store"), _method(given.get("schedule"), "schedule")
    assert store is None or isinstance(store, Store)
    assert schedule is None or isinstance(schedule, Schedule)
    made = OwnPolicy(chooser, store, schedule)
    check_drops([made])
    return made


def _method(value: Any, kind: str) -> Method | None:
    if value is None:
        return None
    if not isinstance(value, Call):
        raise Refused(f"{kind}={value!r}: expected a {kind} by name.")
    found = card(value.name)
    if found.kind != kind:
        raise Refused(f"{kind}={value.name}: {value.name} is a {found.kind}; expected a {kind}.")
    return grammar.build(value)


def _where(kind: str, name: str) -> str:
    places = {"budget": f"write it behind a score, as in snapkv @ {name}(budget=0.2).",
              "store": f"write it into a score, as in snapkv(store={name}).",
              "schedule": f"write it into a score, as in snapkv(schedule={name}).",
              "verifier": f"write it into a draft, as in layer-skip(verify={name}).",
              "task": f"use it as --task {name}.", "oracle": f"use it as --oracle {name}."}
    return places.get(kind, f"see `longspan methods {name}`.")


# --------------------------------------------------------------------------------------------------------- a run


class Run:
    """One stay of recipes on a model: makes caches and answers the hook's calls."""

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        self.recipes = list(recipes)
        self.cache: RecipeCache | None = None
        self.pairs = PairCount()
        self.parts: Any = None
        self.needs_hidden = any(r.cache.can("hidden-states") for r in recipes if r.cache is not None)
        self.drops_tokens = any(r.cache.can("drops-tokens") for r in recipes if r.cache is not None)
        self._caches: weakref.WeakSet[RecipeCache] = weakref.WeakSet()
        self._last: Achieved | None = None
        check_drops([r.cache for r in recipes])

    # -- what the hook asks for

    def new_cache(self, prompt: Prompt | None) -> RecipeCache:
        if self.parts is None:
            raise RuntimeError("the recipe was left; make caches inside `with recipe.on(model):`.")
        rows = self._rows(prompt)
        windows = [self.parts.window(i) if self._stock(i, prompt) else None for i in range(self.parts.n_layers)]
        made = RecipeCache(rows, self.parts.n_layers, windows, prompt)  # other threads make theirs at the same time
        self._take(made)
        self.cache = made
        return made

    def _rows(self, prompt: Prompt | None) -> list[Rows]:
        if len(self.recipes) == 1:
            return [Rows(self.recipes[0].cache)]
        if prompt is not None and prompt.ids is not None and prompt.ids.shape[0] != len(self.recipes):
            raise Refused(f"{len(self.recipes)} recipes were given for {prompt.ids.shape[0]} rows; expected one recipe a row.")
        by_text: dict[str, list[int]] = {}
        for row, recipe in enumerate(self.recipes):
            by_text.setdefault(str(recipe.cache), []).append(row)
        return [Rows(self.recipes[rows[0]].cache, torch.tensor(rows)) for rows in by_text.values()]

    def _stock(self, layer: int, prompt: Prompt | None) -> bool:
        """Whether a layer keeps transformers' own sliding cache: a window shorter than what is read already evicts."""
        window = self.parts.window(layer)
        if window is None:
            return False
        everywhere = all(self.parts.window(i) is not None for i in range(self.parts.n_layers))
        return not (everywhere and (prompt is None or prompt.length < window))

    def owns(self, cache: Any) -> bool:
        return isinstance(cache, RecipeCache) and cache in self._caches

    def adopt(self, cache: RecipeCache) -> None:
        """Go on with a cache made in an earlier run of the same recipes."""
        cache.active = True
        self._take(cache)
        self.cache = cache

    def _take(self, cache: RecipeCache) -> None:
        self._caches.add(cache)
        cache.kin = self._caches

    def attend(self, call: LayerCall) -> Float[Tensor, "B Hq T D"]:
        if call.store is not None:
            return call.store.attend(call, self._reader())
        read = self._reader()
        valid = None if call.padding is None else call.padding[:, -call.k.shape[2] :]
        out = read(call, call.q, call.k, call.v, valid) if read is not None and call.q.shape[2] > 1 else None
        if out is None:
            out = plain_attention(call.q, call.k, call.v, call.padding, call.scale, call.window, call.softcap)
        return out

    def _reader(self) -> Any:
        return self._read if any(r.selector is not None or r.subsets for r in self.recipes) else None

    def _read(self, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor | None:
        """Attend prompt rows by the selector's plan; None where a window or softcap asks for dense attention."""
        first = self.recipes[0]
        if call.window is not None or call.softcap is not None:
            return None
        x = ReadContext(q=q, k=k, v=v, scale=call.scale, layer=call.layer, n_layers=call.parts.n_layers, valid=valid,
                        parts=call.parts)
        out, computed = read_rows(x, first.selector, first.subsets)  # type: ignore[arg-type]
        self.pairs.computed += computed
        self.pairs.causal += x.causal_pairs
        return out

    def writes(self, arguments: dict[str, Any]) -> Any:
        """What a call of `generate` runs in place of its own loop; None leaves it its own."""
        draft = self.recipes[0].decoding
        if draft is None:
            return None
        if len(self.recipes) > 1:
            raise Refused(f"{draft} writes rows one after another, so they can't have recipes of their own ({len(self.recipes)} "
                          "were given); run the rows one by one, each under its own recipe.")
        from longspan.decoding.generation import DraftedGenerate

        return DraftedGenerate(self, draft, Recipe().on, arguments)

    def before_generate(self, arguments: dict[str, Any]) -> None:
        """Refuse what can't be carried, before anything runs."""
        refuse_arguments(arguments, compresses=any(r.cache is not None for r in self.recipes),
                         subsets=any(r.subsets for r in self.recipes))

    def left(self) -> None:
        """Remember what was achieved, and let go of the caches: none may be used outside its recipe."""
        if self.cache is not None:
            self._last, self.cache = self.achieved, None
        for cache in self._caches:
            cache.active = False
        self.parts = None

    # -- what users ask for

    def commit(self, cache: RecipeCache | None = None) -> None:
        """Compress now; for bare forwards, where only the caller knows that the prompt has ended."""
        target = cache or self.cache
        if target is None:
            raise Refused("nothing was read yet, so there is nothing to compress.")
        target.commit()

    @property
    def achieved(self) -> Achieved:
        if self._last is not None:
            return self._last
        if self.cache is None:
            raise Refused("no cache was made in this run; call model.generate(...), or the model with use_cache=True.")
        return replace(self.cache.achieved(), density=self.pairs.density)


@contextlib.contextmanager
def per_row(recipes: Sequence[Recipe], model: nn.Module) -> Iterator[Run]:
    """Run a batch under one recipe per row (or one for all rows)."""
    for what, slots in (("a selector", ("selector", "subsets")), ("a way of writing", ("decoding", "denoising"))):
        found = {" + ".join(str(part) for slot in slots if (part := getattr(r, slot))) or "none" for r in recipes}
        if len(found) > 1:
            raise Refused(f"rows of one batch must share {what}, got {', '.join(sorted(found))}.")
    changes = {" + ".join(map(str, (*r.weights, *r.positions))) or "none" for r in recipes}
    if len(changes) > 1:
        raise Refused(f"rows of one batch must share weight transforms and positions, got {', '.join(sorted(changes))}.")
    for recipe in recipes:
        if recipe.denoising is not None and not getattr(model, "denoises_blocks", False):
            raise Refused(f"{recipe.denoising} serves models that denoise blocks, and {type(model).__name__} writes token by "
                          "token; use it with `longspan ask` or `compare --model block-diffusion`.")
        if getattr(model, "denoises_blocks", False):
            raise Refused(f"{type(model).__name__} denoises blocks, which a bare recipe can't carry; use "
                          "longspan.context.open_context(loaded, text, recipe).")
        if recipe.reuse is not None:
            raise Refused(f"{recipe.reuse} joins documents for a question, which a batch doesn't tell; use "
                          "longspan.context.open_context(loaded, text, recipe).")
    run = Run(recipes)
    with contextlib.ExitStack() as stack:
        for recipe in recipes[:1]:
            for transform in (*recipe.weights, *recipe.positions):
                stack.enter_context(transform.on(model))  # type: ignore[attr-defined]
        run.parts = stack.enter_context(attached(model, run))
        yield run


__all__ = ["Achieved", "Recipe", "Run", "per_row"]
