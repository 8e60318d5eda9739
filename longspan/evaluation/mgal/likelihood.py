"""Options scored by likelihood, for models too small to name a letter.

    reader = Reader(loaded, unit.text("en"))
    reader.loglik("The keeper there was called ", options)

The unit is read once; every stem and option is read on top of it and taken back. A word is scored by its own mean log-likelihood
after its stem. A sentence is scored by that of the text *following* the gap, given the text before and the sentence. Scoring the
sentence itself rewards copying, for the wrong options stand in the text and the gold doesn't; `scored_by_itself` shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from longspan.context import Context
from longspan.evaluation.base import encode_continuation
from longspan.evaluation.mgal.items import Item
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused


class Reader:
    """A text that the model has read once. `recipe` says how, and what it keeps."""

    def __init__(self, loaded: Loaded, text: str = "", recipe: Recipe | str = "full") -> None:
        self.loaded, self.text = loaded, text
        self.context = Context.from_ids(loaded, [start_id(loaded.tokenizer), *self.ids(text)], recipe)

    def ids(self, text: str) -> list[int]:
        return encode_continuation(self.loaded.tokenizer, text)

    def loglik(self, prompt: str, options: Sequence[str]) -> list[float]:
        """Mean log-likelihood per token (nats) of each option after the text and `prompt`."""
        asked = self.ids(prompt)
        return [self._mean(asked, self._some(option)) for option in options]

    def loglik_after(self, options: Sequence[str], following: str) -> list[float]:
        """Mean log-likelihood per token (nats) of `following` after the text and each option."""
        wanted = self._some(following)
        return [self._mean(self.ids(option), wanted) for option in options]

    def _mean(self, asked: list[int], wanted: list[int]) -> float:
        return -float(np.mean(self.context.forced(asked, wanted)[0]))

    def complete(self, prompt: str, max_new_tokens: int) -> str:
        """What the model writes after the text and `prompt`, greedily."""
        done, _ = self.context.answer_ids(self.ids(prompt), max_new_tokens)
        return str(self.loaded.tokenizer.decode(done.ids, skip_special_tokens=True))

    def _some(self, text: str) -> list[int]:
        if not (ids := self.ids(text)):
            raise Refused("an empty option can't be scored by its likelihood; expected some text.")
        return ids


def start_id(tokenizer: Any) -> int:
    """What a text begins with: the tokenizer's token for that, or the one that ends texts."""
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def score_words(reader: Reader, item: Item) -> list[float]:
    """Each option of a word item after its stem; the reader holds the unit, the paragraph, or nothing."""
    assert item.choices is not None
    stem = item.before.rstrip(" ")
    space = item.before[len(stem) :]
    lead = "\n\n" if reader.text else ""
    return reader.loglik(lead + stem, [space + option for option in item.choices.options])


def score_cloze(reader: Reader, item: Item, options: Sequence[str] | None = None) -> list[float]:
    """The text following the gap after each option; the reader holds the text before the gap (`before_gap`)."""
    space, following = gap_space(item)
    return reader.loglik_after([space + option for option in options or _options(item)], following)


def scored_by_itself(reader: Reader, item: Item, options: Sequence[str] | None = None) -> list[float]:
    """Each option of a cloze by its own likelihood: a trap."""
    return reader.loglik("", [gap_space(item)[0] + option for option in options or _options(item)])


def before_gap(item: Item) -> str:
    """What a reader for a cloze reads: the text before the gap, its last space left to the option."""
    return item.before.rstrip(" ")


def gap_space(item: Item) -> tuple[str, str]:
    """The space before the gap, and the text after it."""
    return item.before[len(item.before.rstrip(" ")) :], item.after


def _options(item: Item) -> tuple[str, ...]:
    assert item.choices is not None
    return item.choices.options


def fluency(loaded: Loaded, text: str) -> float | None:
    """Minus the mean negative log-likelihood (nats) of a text's tokens; None for an empty text, which has none."""
    reader = Reader(loaded)
    return -float(np.mean(reader.context.nlls([], reader.ids(text)))) if text.strip() else None
