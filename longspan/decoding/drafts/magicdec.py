"""MagicDec: the model drafts for itself, on a small cache of constant size beside its full one.

With long contexts and large batches a step costs what reading the cache costs, so a draft that reads a few hundred entries
is cheap however large the model is, and it agrees with the target more often than a small model does (arXiv:2408.11049).
The small cache is made of the target's: a score of the library ranks the entries and `budget` of them stay.

A score that looks at no queries (`streaming-llm`) ranks again after every round, so that the cache never holds more than
`budget`. One that does (`snapkv`) ranks the prompt once; what is written stays on top. Entries keep their true positions.
The text is the target's whatever the draft leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

from longspan.cache import CachePolicy, RecipeCache, Score
from longspan.cache.budgets.uniform import Uniform
from longspan.cache.scores.streaming_llm import StreamingLLM
from longspan.decoding.base import Draft, Target
from longspan.decoding.drafts.model import ModelDrafter
from longspan.decoding.recent import check_whole, compressed_twin
from longspan.registry import Refused, knob, method

CANT_WATCH = ("all-queries", "hidden-states", "profile", "trains")
"""What a score may not need: the prompt has been read when the small cache is made."""


def policy_of(score: Score, tokens: int) -> CachePolicy:
    """A score that keeps the same number of entries in every head."""
    return CachePolicy(score, Uniform(budget=f"{tokens} tokens"))


class MagicDecDrafter(ModelDrafter):
    """Drafts with the target's own layers on a cache of its own."""

    def __init__(self, target: Target, cache: RecipeCache, *, gamma: int, rule: str, most: int, slides: bool) -> None:
        super().__init__(target, target.model, cache, gamma=gamma, rule=rule)
        self.most, self.slides = most, slides

    def settle(self, ids: Sequence[int], accepted: int, proposed: int) -> None:
        super().settle(ids, accepted, proposed)
        if self.slides:
            slide(self.cache, self.most)


def slide(cache: RecipeCache, most: int) -> None:
    """Let a cache whose policy looks at no queries evict again, in layers that hold more than `most` entries."""
    for layer in cache.policy_layers:
        if layer.seen and layer.store.width() > most:
            layer.compress()


@method("magicdec", kind="draft", paper="arXiv:2408.11049", capabilities=("draft-model",),
        summary="Propose with the model itself on a small cache of constant size, made of its full one.")
class MagicDec(Draft):
    """Self-speculation with a sparse cache."""

    gamma: int = knob(3, "tokens proposed at once", low=1)
    budget: int = knob(257, "entries a head of the draft's cache", low=2)
    cache: Score = knob(default_factory=StreamingLLM, kind="score",  # type: ignore[arg-type]
                        help="which entries these are: a score such as streaming-llm or snapkv")

    def check(self) -> None:
        need = [word for word in CANT_WATCH if self.cache.can(word)]
        if need:
            raise Refused(f"{self}: {self.cache.card.name} needs {need[0]} of a prompt that was read before drafting begins; "
                          "expected a score such as streaming-llm or snapkv.")
        if self.budget <= self.room:
            raise Refused(f"{self}: a round of {self.gamma} tokens takes {self.room} entries; expected a budget of more.")

    @property
    def slides(self) -> bool:
        """Whether the cache is cut again after every round."""
        return self.cache.window_rows() == 0

    @property
    def room(self) -> int:
        """Entries left free for a round, so that the budget holds at all times."""
        return self.gamma + 1 if self.slides else 0

    def begin(self, target: Target) -> MagicDecDrafter:
        check_whole(target, self)
        most = self.budget - self.room
        made = compressed_twin(target, policy_of(self.cache, most))
        return MagicDecDrafter(target, made, gamma=self.gamma, rule=self.rule, most=most, slides=self.slides)
