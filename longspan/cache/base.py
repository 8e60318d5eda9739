"""Contracts of the cache room: what is kept, how much, where it is stored, and when.

A *policy* turns a `LayerContext` (one layer's keys, values and recent queries) into a `KeepPlan` (which entries stay).
The usual policy is a *score* times a *budget*; a *store* then holds what is kept, and a *schedule* says after which
tokens that happens. Each of the four is a method of its own, and every pair works or gives its declared refusal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.amount import Amount, parse_amount
from longspan.registry import Method, knob

POSITION_BYTES = 4
"""Every kept entry of every head remembers its position."""


@dataclass
class LayerContext:
    """One layer at the moment of choosing. S entries are held now, per KV head; w query rows were kept for scoring."""

    k: Float[Tensor, "B H S D"]
    v: Float[Tensor, "B H S D"]
    valid: Bool[Tensor, "B H S"]
    """False where a shorter row or head is padded."""
    positions: Int[Tensor, "B H S"]
    """Rotary position of every entry; never shifted by eviction."""
    seen: Int[Tensor, " B"]
    """Real tokens read so far in each row, kept or not."""
    q: Float[Tensor, "B Hq w D"]
    """The newest query rows, after rotary positions; w is what the policy's scores ask for."""
    q_valid: Bool[Tensor, "B w"]
    q_positions: Int[Tensor, "B w"]
    scale: float
    layer: int
    n_layers: int
    bytes_per_token: float = 1.0
    """Bytes that one entry in every head of every layer takes, over all rows (for budgets in bytes)."""
    softcap: float | None = None
    per_key: dict[str, Float[Tensor, "B H S"]] = field(default_factory=dict)
    """Statistics that scores accumulate per entry; they follow the entries through evictions."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Statistics over all query rows seen."""
    parts: Any = None
    """The model's parts: `rope`, `rotate`, `unrotate`, `o_proj`."""
    hidden: Float[Tensor, "B w C"] | None = None
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    budget: Int[Tensor, " B"] | None = None
    """Entries per head that the policy may keep on average; set while it plans."""
    protected: int = 0
    """Entries per head that the policy's score always keeps; set while it plans."""
    score: str = ""
    """The score as it is written in a recipe, for budgets that depend on it; set while the policy plans."""
    prompt: Int[Tensor, " B"] | None = None
    """Real tokens of each row's prompt; None when its end is not known."""
    across: dict[str, Any] = field(default_factory=dict)
    """Notes that the layers of one cache share, for choices across layers. Nothing takes them back."""
    early: bool = False
    """More of the prompt follows: a row whose budget is still smaller than what is protected waits."""

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @functools.cached_property
    def lengths(self) -> Int[Tensor, "B H"]:
        """Entries held now, per row and head."""
        return self.valid.sum(-1)

    @functools.cached_property
    def attention(self) -> Float[Tensor, "B H G w S"]:
        """Softmax attention of the kept query rows over the held entries, causal, pads masked, in float32.

        A query row that is padding gives zeros.
        """
        return attention_rows(self, self.q, self.q_positions, self.q_valid)


def attention_rows(x: LayerContext, q: Float[Tensor, "B Hq w D"], q_positions: Int[Tensor, "B w"],
                   q_valid: Bool[Tensor, "B w"]) -> Float[Tensor, "B H G w S"]:
    """Attention probabilities of query rows `q` over the entries of `x` (float32; zero rows for padding)."""
    B, H, _, D = x.k.shape
    logits = q.float().view(B, H, x.group, -1, D) @ x.k.float().transpose(-1, -2)[:, :, None] * x.scale
    if x.softcap is not None:
        logits = x.softcap * torch.tanh(logits / x.softcap)
    allowed = (x.positions[:, :, None, :] <= q_positions[:, None, :, None]) & x.valid[:, :, None, :]
    allowed = (allowed & q_valid[:, None, :, None])[:, :, None]
    probs = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return probs.masked_fill(~allowed, 0.0)


def column_sums(x: LayerContext, rows: int = 256) -> Float[Tensor, "B H G S"]:
    """Attention that every entry receives from the query rows of `x`, summed over them; `rows` at a time."""
    total = torch.zeros(x.k.shape[0], x.k.shape[1], x.group, x.k.shape[2], device=x.k.device)
    for start in range(0, x.q.shape[2], rows):
        part = slice(start, start + rows)
        total += attention_rows(x, x.q[:, :, part], x.q_positions[:, part], x.q_valid[:, part]).sum(3)
    return total


@dataclass
class KeepPlan:
    """Which entries stay."""

    mask: Bool[Tensor, "B H S"]
    shift: Int[Tensor, "B H S"] | None = None
    """Positions by which the kept keys are turned from now on; None: none."""

    @functools.cached_property
    def counts(self) -> Int[Tensor, "B H"]:
        return self.mask.sum(-1)

    @property
    def equal_lengths(self) -> bool:
        """Whether every head of every row keeps the same number, so that a dense tensor wastes nothing."""
        return bool((self.counts == self.counts.flatten()[0]).all())


# -------------------------------------------------------------------------------------------------------- the methods


class Score(Method):
    """How much an entry is worth keeping; higher stays."""

    default_budget: ClassVar[float | str] = 0.2
    """What is kept when the recipe names no budget."""

    def can(self, capability: str) -> bool:
        """Whether this score, or one that it wraps, declares `capability`."""
        inner = (getattr(self, knob.name) for knob in self.card.knobs if knob.kind == "score")
        return self.card.can(capability) or any(score.can(capability) for score in inner)

    def window_rows(self) -> int:
        """Newest query rows this score reads (0: none)."""
        return 0

    def observe(self, x: LayerContext) -> None:
        """See new query rows (`x.q`) as they pass; accumulate into `x.per_key` or `x.stats`.

        Called only for cards that declare ``all-queries``.
        """

    def score(self, x: LayerContext) -> Float[Tensor, "B H S"]:
        """Score every entry. Entries that must stay get more than all others through `protect`."""
        raise NotImplementedError(f"{type(self).__name__} must define score().")

    def protected(self, x: LayerContext) -> int:
        """Entries per head that this score always keeps; a smaller budget is refused."""
        return 0

    def moves(self, x: LayerContext, keep: Bool[Tensor, "B H S"]) -> Int[Tensor, "B H S"] | None:
        """Positions by which the keys of the entries in `keep` are turned; None, as nearly always: they stay."""
        return None


@dataclass(frozen=True)
class Budget(Method):
    """How many entries each head keeps. `scope` says across what it shares: ``head``, ``layer`` or ``model``."""

    scope: ClassVar[str] = "head"
    shorthand: ClassVar[bool] = False
    """True for the allocator that a score with a `budget=` of its own means."""
    budget: float | str = knob(0.2, 'what to keep: a fraction (0.2), "512 tokens" a head, or "64 MiB" in all')

    def check(self) -> None:
        parse_amount(self.budget)

    @property
    def amount(self) -> Amount:
        return parse_amount(self.budget)

    def tokens(self, x: LayerContext) -> Int[Tensor, " B"]:
        """The budget of one KV head in entries, for every row."""
        amount = self.amount
        return torch.tensor([amount.tokens(int(n), x.bytes_per_token) for n in x.seen], device=x.k.device)

    def keep(self, scores: Float[Tensor, "B H S"], x: LayerContext) -> Bool[Tensor, "B H S"]:
        """Choose entries by score; never one that is not valid."""
        raise NotImplementedError(f"{type(self).__name__} must define keep().")


class Policy(Method):
    """Chooses what stays by itself, where a score times a budget can't say it: sets of their own for every query row,
    whole units of text, choices across layers. Its knobs say how much."""

    default_store: ClassVar[str | None] = None
    """The store, as a recipe writes it, where the recipe names none; None: the one that fits what is kept."""
    default_schedule: ClassVar[str | None] = None
    """The schedule where the recipe names none; None: at the prompt's end."""

    def window_rows(self) -> int:
        """Newest query rows this policy reads (0: none)."""
        return 0

    def observe(self, x: LayerContext) -> None:
        """See new query rows, as `Score.observe` does. Called only for cards that declare ``all-queries``."""

    def expected(self, context: int) -> float:
        """Entries that a head keeps on average of a prompt of `context` tokens, for planning; all, if nothing is known."""
        return context

    def plan(self, x: LayerContext) -> KeepPlan:
        """Which entries of this layer stay."""
        raise NotImplementedError(f"{type(self).__name__} must define plan().")


class Schedule(Method):
    """After which tokens the cache is compressed."""

    def cuts(self, start: int, stop: int, prompt: int | None) -> list[int]:
        """Token counts in (start, stop] at which to compress, ascending.

        Args:
            start, stop: tokens seen before and after the current call.
            prompt: the prompt's length, or None when it is not known (a bare forward).
        """
        raise NotImplementedError(f"{type(self).__name__} must define cuts().")

    def watches(self, seen: int, prompt: int | None) -> bool:
        """Whether a cut may still come after `seen` tokens, so that queries must be watched."""
        return True


@dataclass(frozen=True)
class Held:
    """A layer as `Store.layer_bytes` needs it: `rows` sequences of `seen` tokens; heads are those of all rows."""

    rows: int
    heads: int
    seen: int
    head_dim: int
    itemsize: int
    even: bool
    """Whether every head keeps as many entries; else they are so many on average."""


class Store(Method):
    """Where the kept entries live."""

    def make(self) -> Any:
        """A fresh `LayerStore`."""
        raise NotImplementedError(f"{type(self).__name__} must define make().")

    def entry_bytes(self, head_dim: int, itemsize: int) -> float:
        """Bytes one entry of one head takes (key and value)."""
        return 2 * head_dim * itemsize

    def layer_bytes(self, kept: float, held: Held) -> float:
        """Bytes of a layer after its first compression, to `kept` entries a head, for planning."""
        return held.heads * kept * (self.entry_bytes(held.head_dim, held.itemsize) + POSITION_BYTES)


# ------------------------------------------------------------------------------------------------------ shared pieces


def protect(scores: Float[Tensor, "B H S"], mask: Bool[Tensor, "B H S"]) -> Float[Tensor, "B H S"]:
    """Lift the entries of `mask` above all others (max + 1), so that every budget keeps them first."""
    finite = torch.where(torch.isfinite(scores), scores, -torch.inf)
    top = finite.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min / 2)
    return torch.where(mask, top + 1, scores)


def newest(x: LayerContext, n: int | Int[Tensor, " B"]) -> Bool[Tensor, "B H S"]:
    """The `n` newest valid entries of every head (one `n`, or one a row). Entries stand in ascending position."""
    rank_from_end = x.valid.flip(-1).cumsum(-1).flip(-1)
    return x.valid & (rank_from_end <= (n if isinstance(n, int) else n[:, None, None]))


def oldest(x: LayerContext, n: int) -> Bool[Tensor, "B H S"]:
    """Entries among the first `n` positions of their row."""
    return x.valid & (x.positions < n)


def group_mean(per_query_head: Float[Tensor, "B H G S"]) -> Float[Tensor, "B H S"]:
    return per_query_head.mean(2)


def top_mask(scores: Float[Tensor, "... S"], counts: Int[Tensor, " ..."]) -> Bool[Tensor, "... S"]:
    """Mark the `counts` highest scores along the last axis; of equal scores the earlier entry wins."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.arange(scores.shape[-1], device=scores.device) < counts[..., None]
    return torch.zeros_like(chosen.expand_as(order)).scatter(-1, order, chosen.expand_as(order))
