"""Perplexity of running text: how likely the model finds what comes next (PG-19, arXiv:1911.05507).

There is no question and no answer. An example is a stretch of the text cut in two: the context, which a method may
compress, and the target, whose negative log-likelihood is scored after it.

- sliding: windows of the length asked for; each scores its last `stride` tokens, the targets of all windows tile the
  text.
- streaming: the context is the first `window` tokens, the target all the rest of the length, which a bounded cache
  reads piece by piece (`meta["stride"]` tokens at a time).

Cuts fall between words. Divided by `meta["words"]`, the target's likelihood gives the word perplexity, which does not
depend on the tokenizer.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task, encode_continuation, tokenizer_memory
from longspan.evaluation.texts import Text, load_text
from longspan.evaluation.texts import load_file as load_text_file
from longspan.registry import Refused, knob, method


@method("perplexity", kind="task", system="standard-suites", paper="arXiv:1911.05507",
        summary="Likelihood of the continuation of running text; nothing is generated.")
class Perplexity(Task):
    """Perplexity over windows of a text. `max_new_tokens` is 0: only `meta["target"]` is scored, by its likelihood."""

    mode: str = knob("sliding", "windows that overlap, or one stretch through a bounded cache",
                     choices=("sliding", "streaming"))
    stride: int | None = knob(None, "tokens scored by a window, or read at a time; half the length if None", low=1)
    window: int | None = knob(None, "streaming: tokens of the context; a quarter of the length if None", low=1)
    haystack: str = knob("pydoc", "the text: pydoc, docstrings, jargon, bible, debian-handbook")
    path: str = knob("", "a UTF-8 file to use instead")

    own_text = True

    @property
    def text(self) -> Text:
        return load_text_file(self.path) if self.path else load_text(self.haystack)

    def check(self) -> None:
        if self.window is not None and self.mode == "sliding":
            raise Refused(f"perplexity(window={self.window}): sliding windows are as long as the length asked for; "
                          "leave window out, or say mode='streaming'.")

    def available(self, length: int, tokenizer: Any) -> int:
        total, (context, target, step) = _ends(self.text, tokenizer)[-1], self._shares(length)
        found = 1 + (total - context - target) // step if total >= context + target else 0
        if not found:
            raise Refused(f"perplexity at length {length}: the text {self.text.name!r} has {total} tokens; ask for at "
                          f"most {total}, or name a longer text, such as haystack='docstrings'.")
        return found

    def floor(self, tokenizer: Any) -> int:
        return max(64, (self.stride or 0) + 32, (self.window or 0) + 32)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        text, ends = self.text, _ends(self.text, tokenizer)
        context, target, step = self._shares(key.length)
        order = list(range(self.available(key.length, tokenizer)))
        random.Random(f"{key.task}/{key.length}/{key.seed}").shuffle(order)
        start = order[key.index] * step
        first = bisect_left(ends, start)
        cut, last = (bisect_right(ends, end) - 1 for end in (start + context, start + context + target))
        wanted = "".join(text.words[cut:last])

        def build(words: int) -> Example:
            return Example(
                context="".join(text.words[cut - words:cut]), question="", answer_prefix="", answers=(),
                max_new_tokens=0, meta={
                    "index": key.index, "target": wanted, "words": last - cut, "chat_template": False,
                    "mode": self.mode, "stride": step if self.mode == "sliding" else self.stride or step,
                    "at_start": cut == words, "position": cut / len(text.words)})

        return Draft(build, least=1, most=max(1, cut - first))

    def metric(self, prediction: str, example: Example) -> float:
        """Share of the target's words that the prediction begins with."""
        wanted, found = example.meta["target"].split(), prediction.split()
        return next((i for i, word in enumerate(wanted) if found[i:i + 1] != [word]), len(wanted)) / len(wanted)

    def _shares(self, length: int) -> tuple[int, int, int]:
        """Tokens of context and target, and how far apart examples are."""
        length -= 1  # room for a beginning-of-sequence token
        if self.mode == "sliding":
            stride = self.stride or length // 2
            return length - stride, stride, stride
        window = self.window or length // 4
        return window, length - window, length


def _ends(text: Text, tokenizer: Any) -> list[int]:
    """How many tokens of the text come before each word, and in all."""
    known, key = tokenizer_memory(tokenizer), ("word ends", text.sha256)
    if key not in known:
        count = _by_offsets if getattr(tokenizer, "is_fast", False) else _by_words
        known[key] = count(text, tokenizer)
    return known[key]


def _by_offsets(text: Text, tokenizer: Any) -> list[int]:
    edges = tokenizer(text.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    stops = [stop for _, stop in edges]
    return [bisect_left(stops, at + 1) for at in accumulate(map(len, text.words), initial=0)]


def _by_words(text: Text, tokenizer: Any) -> list[int]:
    """Word by word, so up to a few per cent off; `fit` makes up for it."""
    counts = {word: len(encode_continuation(tokenizer, word)) for word in dict.fromkeys(text.words)}
    return list(accumulate((counts[word] for word in text.words), initial=0))
