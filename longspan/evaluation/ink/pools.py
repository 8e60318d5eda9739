"""Where distractors come from: easy, random and hard passages, all cut to one length.

*Easy* ones are filler sentences, repeated. *Random* ones are passages of a text that has nothing to do with the question. *Hard*
ones are what a search for the question finds that doesn't hold the answer: BM25 (Robertson and Zaragoza 2009, with k1 = 1.5,
b = 0.75 and the idf that stays positive), passages with an answer string or alias left out.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from longspan.evaluation.ink.answers import holds
from longspan.evaluation.metrics import normalise
from longspan.registry import Refused

K1, B = 1.5, 0.75

EASY = (
    "The river runs quietly past the old stone bridge.",
    "A light breeze moved the leaves in the park.",
    "The market square is empty on rainy mornings.",
    "Clouds drifted slowly over the green hills.",
    "The clock on the tower strikes twelve at noon.",
    "Fresh snow lay on the roofs for most of the week.",
    "The road to the lake was closed in spring.",
    "Grass grows tall beside the railway line.",
    "A new fence was put up around the old playground.",
    "Evening light fell across the wide empty fields.",
)
"""Neutral sentences: no person, no work."""


def bm25(query: str, passages: Sequence[str]) -> Float[np.ndarray, " n"]:
    """BM25 of every passage for a query, over words in SQuAD's normal form."""
    bags = [Counter(normalise(passage).split()) for passage in passages]
    if not bags:
        return np.zeros(0)
    lengths = np.array([sum(bag.values()) for bag in bags], dtype=float)
    usual = max(float(lengths.mean()), 1.0)
    scores = np.zeros(len(bags))
    for word in normalise(query).split():
        tf = np.array([bag[word] for bag in bags], dtype=float)
        held = int((tf > 0).sum())
        idf = math.log(1 + (len(bags) - held + 0.5) / (held + 0.5))
        scores += idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * lengths / usual))
    return scores


def hard_pool(question: str, passages: Sequence[str], answers: Sequence[str], n: int) -> list[str]:
    """The `n` best passages for a question that hold no answer, the best first.

    Raises:
        Refused: fewer than `n` passages share a word with the question and hold no answer.
    """
    scores = bm25(question, passages)
    ranked = [int(i) for i in np.argsort(-scores, kind="stable") if scores[i] > 0]
    found = list(dict.fromkeys(passages[i] for i in ranked if holds(passages[i], answers) is None))
    return _enough(found, n, "hard")


def random_pool(passages: Sequence[str], answers: Sequence[str], n: int, rng: random.Random) -> list[str]:
    """`n` passages of an unrelated text, drawn; those that happen to hold an answer are left out.

    Raises:
        Refused: there are fewer.
    """
    fit = [passage for passage in passages if holds(passage, answers) is None]
    return rng.sample(_enough(fit, n, "random", cut=False), n)


def easy_pool(n: int, rng: random.Random, sentences: Sequence[str] = EASY) -> list[str]:
    """`n` filler sentences: all of them in a drawn order, again and again."""
    found: list[str] = []
    while len(found) < n:
        found += rng.sample(list(sentences), len(sentences))
    return found[:n]


def _enough(found: list[str], n: int, name: str, cut: bool = True) -> list[str]:
    if len(found) < n:
        raise Refused(f"the {name} pool holds {len(found)} passages without an answer; expected at least {n}, or N={len(found)}.")
    return found[:n] if cut else found


def cut(passages: Sequence[str], tokens: int, tokenizer: Any) -> list[str]:
    """The passages that have at least `tokens` tokens, cut after that many; shorter ones are left out."""
    found = []
    for passage in passages:
        ids = tokenizer.encode(passage, add_special_tokens=False)
        if len(ids) >= tokens:
            found.append(tokenizer.decode(ids[:tokens], skip_special_tokens=True).rstrip("\ufffd"))
    return found
