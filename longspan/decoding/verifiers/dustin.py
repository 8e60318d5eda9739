"""Dustin: proposals are verified against a few positions, chosen by target and draft together.

1. The draft proposes; the queries of its retrieval heads are kept for each step.
2. Two scores over the history: s_T, how the last accepted token looked at it in the target's retrieval heads, and s_D, how
   the proposed tokens look at it in the draft's.
3. The first and last positions are read always. Of the others the best `m` by s_D are read, then the best by s_T, `k` in all:
   one set for every layer and head.
4. The target reads the proposals against these positions and each other. What is accepted is appended to the whole cache;
   nothing is ever evicted.

Not lossless: the text follows the target's law over the positions read. As it depends on where rounds begin, drafts should
not rest by the clock. A history of at most `k` tokens is read whole.

Which heads retrieve, and `m`, are found once per model and draft (`dustin_calibration`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.decoding.base import Checker, Draft, Proposal, Target, Verifier
from longspan.decoding.recent import check_whole, reading, recent_queries
from longspan.decoding.sparse_verify import attend_selected, choose, head_scores, kv_heads
from longspan.models import profiles
from longspan.models.call import LayerCall
from longspan.registry import Refused, knob, method

Heads = dict[int, tuple[int, ...]]
"""Query heads by layer."""
HOW = ("verify", "rule", "adapt", "gamma")
"""Settings of a draft that its heads don't depend on."""
DEFAULT_DRAFT = "layer-skip"


@dataclass(frozen=True)
class Setting:
    """What is found offline: the target's and the draft's retrieval heads, and the share of free positions the draft chooses."""

    target: Heads
    draft: Heads
    split: float


@method("dustin", kind="verifier", system="dustin", paper="arXiv:2606.24957",
        capabilities=("profile", "trains", "needs-draft-queries"),
        summary="Read proposals against the few positions that target and draft look at most.")
class Dustin(Verifier):
    """Needs a profile of target and draft, which `longspan profile "layer-skip(verify=dustin)"` makes; that of the bundled
    model with its default layer-skip draft comes with the package. Or name the heads: ``target_heads="12:0,3"``."""

    family: ClassVar[str] = "dustin"
    trainer: ClassVar[str] = "longspan.evaluation.dustin_texts"
    draft: ClassVar[Draft | None] = None
    """The draft it stands in, where that is known."""

    k: int = knob(512, "positions of the history read for each round", low=1)
    m: int | None = knob(None, "how many of them the draft chooses; None: the share found offline", low=0)
    n_sink: int = knob(4, "first positions that are always read", low=0)
    n_recent: int = knob(32, "last positions that are always read", low=0)
    target_heads: str = knob(profiles.AUTO, 'query heads of the target that score, as "layer:head,head; layer:head"; or auto')
    draft_heads: str = knob(profiles.AUTO, "query heads of the draft that score, written likewise; or auto")
    profile: str = knob(profiles.AUTO, 'file of what was found offline; "auto" finds that of the model and draft')

    def check(self) -> None:
        free = self.k - self.n_sink - self.n_recent
        if free < 1:
            raise Refused(f"{self}: {self.n_sink} + {self.n_recent} positions are always read; expected k of at least "
                          f"{self.n_sink + self.n_recent + 1}.")
        if self.m is not None and self.m > free:
            raise Refused(f"{self}: expected m from 0 to k - n_sink - n_recent = {free}.")
        for name in ("target_heads", "draft_heads"):
            if getattr(self, name) != profiles.AUTO:
                parse_heads(getattr(self, name), name)

    # -- the profile

    def beside(self, draft: Draft) -> Dustin:
        """This verifier, knowing the draft it stands in: what is found offline is found for the pair."""
        made = replace(self)
        object.__setattr__(made, "draft", draft)
        return made

    def profile_settings(self) -> dict[str, Any]:
        return {"draft": DEFAULT_DRAFT if self.draft is None else described(self.draft)}

    def profile_tensors(self) -> tuple[str, ...]:
        return ("target_heads", "draft_heads", "split")

    def profile_recipe(self) -> str:
        if self.draft is None:
            return f"{DEFAULT_DRAFT}(verify={self.card.name})"
        return str(replace(self.draft, verify=type(self)()))  # type: ignore[call-arg]

    def setting(self, target: Target, draft: Draft) -> Setting:
        """The heads named, or those found offline.

        Raises:
            Refused: there is no profile, with the command that makes it.
        """
        named = [None if text == profiles.AUTO else parse_heads(text, name)
                 for name, text in (("target_heads", self.target_heads), ("draft_heads", self.draft_heads))]
        if named[0] is not None and (named[1] is not None or self.m == 0):
            return Setting(named[0], named[1] or {}, 0.5)
        if not draft.card.can("draft-model"):
            raise Refused(f"{draft.card.name}(verify={self}): heads are found for a pair of models, and {draft.card.name} is "
                          'none; expected target_heads named, as in dustin(m=0, target_heads="9:0,2"), or another draft, such as '
                          "layer-skip.")
        found = profiles.find_trained(target.model, self.beside(draft), self.profile).tensors
        own, other = (by_layer(found[name].tolist()) for name in ("target_heads", "draft_heads"))
        return Setting(named[0] or own, named[1] or other, float(found["split"]))

    # -- verifying

    def begin(self, target: Target, draft: Draft) -> DustinChecker:
        check_whole(target, self)
        if self.m != 0 and not draft.card.can("draft-model"):
            raise Refused(f"{draft.card.name}(verify={self}) has no queries to choose positions by; expected a draft that is a "
                          'model, such as layer-skip, or m=0 with target_heads named, as in dustin(m=0, target_heads="9:0,2").')
        return DustinChecker(target, self, self.setting(target, draft))


class DustinChecker(Checker):
    """Verifies the proposals of one sequence."""

    def __init__(self, target: Target, dustin: Dustin, setting: Setting) -> None:
        super().__init__(target)
        self.dustin, self.setting = dustin, setting
        free = dustin.k - dustin.n_sink - dustin.n_recent
        self.m = round(setting.split * free) if dustin.m is None else dustin.m
        self.draft_layers: tuple[int, ...] = tuple(setting.draft) if self.m else ()
        """Layers of the draft whose queries proposals must bring along."""
        self.kept: Int[Tensor, " n"] | None = None
        """Positions read in the latest round; None: all."""
        self.queries: dict[int, Tensor] = {}
        self._check_heads()
        recent = recent_queries(target, 1)
        self.last = {layer: recent[layer][:, :, -1:] for layer in setting.target}
        """Queries (1,Hq,1,D) of the last token that the cache has read and that stands."""

    def _check_heads(self) -> None:
        layers = {layer.layer: layer for layer in self.target.cache.policy_layers}
        if not self.setting.target or (self.m and not self.setting.draft):
            raise Refused(f"{self.dustin}: no heads to score by; expected at least one of the target"
                          f"{' and one of the draft' if self.m else ''}.")
        for layer, heads in self.setting.target.items():
            if layer not in layers:
                raise Refused(f"{self.dustin}: target_heads names layer {layer}; expected one of the {len(layers)} that see the "
                              f"whole text, {min(layers)} to {max(layers)}.")
            check_heads(heads, layers[layer].facts[2].n_heads, "target_heads")

    def check(self, last: int, proposal: Proposal) -> Float[Tensor, "g+1 V"]:
        history = self.target.cache.get_seq_length()
        self.kept = self.positions(history, proposal) if history > self.dustin.k else None
        self.queries = {}
        with reading(self.target.cache, self._read):
            return super().check(last, proposal)

    def keep(self, tokens: int, of: int) -> None:
        super().keep(tokens, of)
        self.last = {layer: q[:, :, tokens - 1 : tokens] for layer, q in self.queries.items()}

    def positions(self, history: int, proposal: Proposal) -> Int[Tensor, " n"]:
        """The set S for a proposal, ascending."""
        s_T = self.target_scores(history)
        s_D = self.draft_scores(history, proposal) if self.m and proposal.tokens else None
        d = self.dustin
        lengths = torch.tensor([history], device=s_T.device)
        return choose(s_T, s_D, lengths, k=d.k, m=self.m if s_D is not None else 0, n_sink=d.n_sink, n_recent=d.n_recent
                      )[0].nonzero()[:, 0]

    def target_scores(self, history: int) -> Float[Tensor, "1 N"]:
        """s_T: mean over the target's heads of how the last accepted token looks at the history."""
        return history_scores(self.target.cache, self.last, self.setting.target, history)

    def draft_scores(self, history: int, proposal: Proposal) -> Float[Tensor, "1 N"]:
        """s_D: mean over steps and the draft's heads of how the proposed tokens look at the history."""
        notes = proposal.notes
        queries: dict[int, Tensor] = notes.get("queries", {})
        cache: Any = notes.get("cache")
        missing = [layer for layer in self.draft_layers if layer not in queries]
        if missing:
            raise Refused(f"{self.dustin}: the draft has no queries of layer {missing[0]}; expected layers that it runs"
                          f"{', such as ' + str(sorted(queries)[0]) if queries else ''}.")
        if cache.get_seq_length() < history + len(proposal.tokens):
            raise Refused(f"{self.dustin}: the draft's cache has read {cache.get_seq_length()} tokens, too few for the target's "
                          f"{history} and {len(proposal.tokens)} proposals; expected two that have read the same text.")
        return history_scores(cache, {layer: q[None] for layer, q in queries.items()}, self.setting.draft, history)

    def _read(self, call: LayerCall, q: Tensor, positions: Tensor, store: Any) -> Tensor | None:
        if call.layer in self.setting.target:
            self.queries[call.layer] = q
        if self.kept is None:
            return None
        window = call.window if call.window is not None and call.window < store.tail.length else None
        return attend_selected(q, store.tail.keys, store.tail.values, self.kept, positions, scale=call.scale, window=window,
                               softcap=call.softcap)


def history_scores(cache: Any, queries: dict[int, Float[Tensor, "1 Hq g D"]], heads: Heads, history: int
                   ) -> Float[Tensor, "1 N"]:
    """Mean over rows and heads of their attention to the first `history` positions; 0 where a cache holds no entry any more."""
    total = torch.zeros(1, history, device=next(iter(queries.values())).device)
    for layer, own in heads.items():
        held, q = cache.layers[layer], queries[layer]
        check_heads(own, q.shape[1], "heads")
        scale, softcap, _ = held.facts
        k, seen, at = _entries(held.store, kv_heads(own, q.shape[1] // held.store.tail.keys.shape[1]), history)
        weights = head_scores(q[:, list(own)], k, seen, scale=scale, softcap=softcap)
        if at is None:
            total += weights.sum(1)
        else:
            total.scatter_add_(1, at.clamp(max=history - 1).flatten(1).long(), weights.flatten(1))
    return total / sum(map(len, heads.values()))


def _entries(store: Any, heads: list[int], history: int) -> tuple[Tensor, Bool[Tensor, "1 h S"], Tensor | None]:
    """Keys of some heads with a mask of those of the history, and their positions where these aren't simply 0, 1, 2, …"""
    if store.untouched and store.tail.valid is None:
        k = store.tail.keys[:, heads, :history]
        return k, torch.ones(k.shape[:3], dtype=torch.bool, device=k.device), None
    view = store.view()
    at = view.positions[:, heads]
    return view.k[:, heads], view.valid[:, heads] & (at < history), at


# ---------------------------------------------------------------------------------------------------------- heads, drafts


def parse_heads(text: str, name: str = "heads") -> Heads:
    """Read ``"12:0,3; 20:1"``: heads 0 and 3 of layer 12, head 1 of layer 20.

    Raises:
        Refused: anything else, or nothing.
    """
    found: Heads = {}
    for part in text.split(";"):
        match = re.fullmatch(r"\s*(\d{1,4})\s*:\s*(\d{1,4}(?:\s*,\s*\d{1,4})*)\s*", part)
        if match is None:
            raise Refused(f'{name}={text!r}: expected layers with their heads, such as "12:0,3; 20:1".')
        heads = found.get(int(match[1]), ()) + tuple(int(h) for h in match[2].split(","))
        found[int(match[1])] = tuple(dict.fromkeys(heads))
    return found


def check_heads(heads: tuple[int, ...], n_heads: int, name: str) -> None:
    """Refuse heads that a layer doesn't have."""
    if max(heads) >= n_heads:
        raise Refused(f"{name}: there is no head {max(heads)}; expected heads from 0 to {n_heads - 1}.")


def by_layer(rows: list[list[int]]) -> Heads:
    """Heads from rows (layer, head)."""
    found: Heads = {}
    for layer, head in rows:
        found[layer] = (*found.get(layer, ()), head)
    return found


def described(draft: Draft) -> str:
    """A draft as it is written, without what says how it works."""
    return str(type(draft)(**{f.name: getattr(draft, f.name) for f in fields(draft) if f.name not in HOW}))
