"""Temporal order (arXiv:2607.22575; the form of the questions after Book-SORT, arXiv:2410.08133): which came first?

Two segments of the text are shown again, as A and B, and the model says which of them appeared first. Nothing has to be
hidden or annotated, and a cache that still gives facts back may have lost their order. Each pair is asked in both orders, as
two examples: four pairs, A being the right answer of every second one, then the same four with A and B exchanged. Pairs
take turns in eight log-spaced bins of distance.
"""

from __future__ import annotations

import random
import re
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.order.prompts import INSTRUCTION, LABELS, PREFIX, question
from longspan.evaluation.order.segments import BINS, Pair, bin_edges, draw_pairs, find_segments, shuffled
from longspan.evaluation.tasks.haystack import Essay
from longspan.evaluation.texts import Text, load_text
from longspan.registry import Refused, knob, method

TOGETHER = 4
"""Pairs that stand side by side before they come again with A and B exchanged."""
BLOCK = 4
"""Sentences that stay together where a text is shuffled."""
SHORT, TRIES = 60, 100
"""Characters of text, for each word of a segment, that have to be enough for two segments; stretches that are tried."""


@method("temporal-order", kind="task", system="temporal-order", paper="arXiv:2607.22575",
        summary="Say which of two segments of the text appeared first.")
class TemporalOrder(Task):
    """The order of two segments, asked in both orders of showing them."""

    haystack: str = knob("pydoc", "text the segments are taken from: pydoc, docstrings, jargon, bible, debian-handbook")
    words: int = knob(20, "words of a segment", low=3)
    shuffle: bool = knob(False, "shuffle blocks of sentences, so that only the order of presentation counts")

    own_text = True

    @property
    def text(self) -> Text:
        return load_text(self.haystack)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        block, place = divmod(key.index, 2 * TOGETHER)
        number = TOGETHER * block + place % TOGETHER
        first_is_a = (place // TOGETHER + place) % 2 == 0
        own = Key(key.task, key.length, key.seed, number)
        essay, least = self._essay(own, tokenizer)

        def build(units: int) -> Example:
            text = self._text(essay, units, own)
            pair = self._pair(text, number, own.rng("pair"))
            a, b = (pair.earlier, pair.later) if first_is_a else (pair.later, pair.earlier)
            spans = [[s.first + len(INSTRUCTION), s.last + len(INSTRUCTION)] for s in (pair.earlier, pair.later)]
            return Example(
                context=INSTRUCTION + text, question=question(a.text, b.text), answer_prefix=PREFIX,
                answers=(LABELS[0] if first_is_a else LABELS[1],), max_new_tokens=2,
                meta={"index": key.index, "pair": number, "distance": pair.distance, "bin": pair.bin, "spans": spans,
                      "depths": list(pair.times), "depth": sum(pair.times) / 2})

        return Draft(build, least=least, most=len(self.text.sentences), estimate=essay.tokens,
                     exhausted=f"the text {self.haystack!r} ends before that; name a longer one.")

    def _pair(self, text: str, number: int, rng: random.Random) -> Pair:
        """A pair of the bin whose turn it is, or of the nearest one that has a pair."""
        segments = find_segments(text, self.words)
        edges = bin_edges(segments, len(text))
        for b in sorted(range(BINS), key=lambda b: (abs(b - number % BINS), b)):
            if drawn := draw_pairs(segments, len(text), edges, b, 1, rng):
                return drawn[0]
        raise AssertionError("the shortest distance lies in the first bin")

    def _text(self, essay: Essay, units: int, own: Key) -> str:
        sentences = essay.take(units)
        return " ".join(shuffled(sentences, BLOCK, own.rng("shuffle")) if self.shuffle else sentences)

    def _essay(self, own: Key, tokenizer: Any) -> tuple[Essay, int]:
        """Where the text starts, and the fewest sentences that can be asked about.

        Tables and headings hold few sentences: starts are drawn until one lies before sentences enough.
        """
        rng, total = own.rng("text"), len(self.text.sentences)
        for _ in range(TRIES):
            essay = Essay(self.text, rng.randrange(total), tokenizer)
            least = next((units for units in range(1, total + 1) if self._is_enough(essay, units, own)), None)
            if least is not None and len(self._text(essay, least, own)) <= SHORT * self.words:
                return essay, least
        raise Refused(f"{self.card.name}: {TRIES} stretches of {SHORT * self.words} characters of {self.haystack!r} hold no two "
                      f"segments of {self.words} words to ask about; expected a text of sentences, or fewer words.")

    def _is_enough(self, essay: Essay, units: int, own: Key) -> bool:
        """Whether there are two segments to ask about, or the text is already too long for that."""
        text = self._text(essay, units, own)
        if len(text) > SHORT * self.words:
            return True
        try:
            bin_edges(find_segments(text, self.words), len(text))
        except Refused:
            return False
        return True

    def metric(self, prediction: str, example: Example) -> float:
        """Whether the first A or B that stands alone is the right one."""
        said = re.search(r"\b([AB])\b", prediction)
        return float(said is not None and said[1] == example.answers[0])
