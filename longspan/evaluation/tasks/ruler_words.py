"""RULER's counting tasks (arXiv:2404.06654): the most common words of a long list, the most frequent codes of a text.

- Common words (cwe): a numbered list in which ten words come often and all others seldom; name the ten. One worked
  example comes before.
- Frequent words (fwe): random six-letter codes whose counts fall like rank^-alpha / zeta(alpha); the first is printed
  as dots, name the next three.
"""

from __future__ import annotations

import random
import string
from typing import Any

from scipy.special import zeta

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.texts import Text
from longspan.evaluation.words import WORD_SOURCES, Draws, word_list
from longspan.registry import knob, method

PAPER = "arXiv:2404.06654"

COMMON_HEADER = "Below is a numbered list of words. Some of them appear more often than others. Remember those.\n"
COMMON_QUESTION = "\nQuestion: Which 10 words appear most often in the list above?"
COMMON_PREFIX = "Answer: The 10 words that appear most often in the list are:"
COMMON = 10
SHORT = 4096
"""Below this length common words come less often, and the worked example is smaller."""


def numbered(words: list[str]) -> str:
    """RULER's list format: `1. word 2. word …`."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def repeated(words: list[str], often: int, seldom: int, rng: random.Random) -> list[str]:
    """The first ten words `often` times and the rest `seldom` times, shuffled."""
    found = words[:COMMON] * often + words[COMMON:] * seldom
    rng.shuffle(found)
    return found


@method("ruler-cwe", kind="task", system="standard-suites", paper=PAPER,
        summary="The ten most common words of a long list.")
class CommonWords(Task):
    """RULER cwe: ten words 30 times among words 3 times each (6 and 1 below 4,096 tokens)."""

    words: str = knob("own", "where words come from: own lists with the words of pydoc, and larger ones",
                      choices=WORD_SOURCES)

    @property
    def text(self) -> Text:
        return word_list(self.words)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        pool = self.text.text.split("\n")
        rng = key.rng("words")
        count, shown_often, shown_seldom, often, seldom = (
            (20, 3, 1, 6, 1) if key.length < SHORT else (40, 10, 3, 30, 3))
        order = rng.sample(pool, min(len(pool), key.length + 64))
        shown, order = order[:count], order[count:]
        common = order[:COMMON]
        shot = (COMMON_HEADER + numbered(repeated(shown, shown_often, shown_seldom, rng)) + COMMON_QUESTION + "\n"
                + COMMON_PREFIX + " " + numbered(shown[:COMMON]) + "\n\n")

        def build(units: int) -> Example:
            listed = repeated(order[:COMMON + units], often, seldom, key.rng(f"list/{units}"))
            return Example(
                context=shot + COMMON_HEADER + numbered(listed), question=COMMON_QUESTION,
                answer_prefix=COMMON_PREFIX, answers=tuple(common), max_new_tokens=120,
                meta={"index": key.index, "shots": [[0, len(shot)]], "answer_text": numbered(common),
                      "counts": {"common": often, "other": seldom}})

        return Draft(build, COMMON, len(order) - COMMON, f"words={self.words!r} has only {len(pool)} words; use "
                     "words='docstrings' or words='web2' (174,000 words, Debian package miscfiles).")

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.match_all(metrics.clean(prediction), example.answers)


FREQUENT_HEADER = ("Below is a coded text. Keep count of how often each coded word appears, "
                   "and find the three that appear most often.\n")
FREQUENT_QUESTION = ("\nQuestion: Leave out the dots '...' and do not explain. "
                     "Which three words appear most often in the coded text above?")
FREQUENT_PREFIX = "Answer: The three words that appear most often in the coded text above are:"


def zipf_counts(total: int, alpha: float, ranks: int) -> list[int]:
    """How often each rank appears among `total` words: int(total rank^-alpha / zeta(alpha))."""
    return [int(total * rank ** -alpha / zeta(alpha)) for rank in range(1, ranks + 1)]


@method("ruler-fwe", kind="task", system="standard-suites", paper=PAPER,
        summary="The three most frequent codes of a text, counts falling like a power of the rank.")
class FrequentWords(Task):
    """RULER fwe: random six-letter codes, the most frequent one printed as dots."""

    alpha: float = knob(2.0, "exponent of the counts' fall with rank", low=1.01, high=6.0)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        draws = Draws(key.rng("codes"))
        ranks = max(5, (key.length - 50) // 50)
        codes = ["..."] + [draws.letters(6, string.ascii_lowercase) for _ in range(ranks - 1)]

        def build(total: int) -> Example:
            counts = zipf_counts(total, self.alpha, ranks)
            words = [code for code, count in zip(codes, counts) for _ in range(count)]
            key.rng(f"order/{total}").shuffle(words)
            return Example(
                context=FREQUENT_HEADER + " ".join(words), question=FREQUENT_QUESTION, answer_prefix=FREQUENT_PREFIX,
                answers=tuple(codes[1:4]), max_new_tokens=50,
                meta={"index": key.index, "counts": counts[1:5], "total": total})

        return Draft(build, least=self._least())

    def _least(self) -> int:
        """Smallest number of words with which ranks 2 to 5 have strictly falling counts, the fourth above zero."""
        # Counts are rounded down, so a total that works may be followed by one that doesn't: once the gap between
        # the exact counts of ranks 4 and 5, the smallest gap, exceeds one, no rounding can close it.
        gap = (4 ** -self.alpha - 5 ** -self.alpha) / zeta(self.alpha)
        return int(1 / gap) + 1

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.match_all(metrics.clean(prediction), example.answers)
