"""Up to which length a model keeps its quality: RULER's threshold (arXiv:2404.06654) and NoLiMa's base score (arXiv:2502.05167).

RULER asks at which lengths a score stays at or above that of Llama-2-7B at 4K. NoLiMa measures every model against itself: the
base score is what it reaches at short lengths, and a length counts while the score is at least .85 of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

RULER_THRESHOLD = 0.856
"""Score of Llama-2-7B at 4K, as RULER published it."""

SHORT_LENGTHS = (250, 500, 1000)
"""Lengths of NoLiMa's base score, in tokens."""

KEPT_SHARE = 0.85
"""Share of the base score that a length must keep in NoLiMa."""


def effective_length(scores_by_length: Mapping[int, float], threshold: float = RULER_THRESHOLD) -> int | None:
    """The longest length up to which every score reaches `threshold`; None if the shortest doesn't."""
    reached = None
    for length in sorted(scores_by_length):
        if scores_by_length[length] < threshold:
            break
        reached = length
    return reached


def base_score(scores_by_pair: Mapping[str, Mapping[int, float]], lengths: Sequence[int] = SHORT_LENGTHS) -> float:
    """NoLiMa's base score: each pair of needle and question at the short length it does best at, then the mean over pairs.

    Raises:
        ValueError: no pair has a score at any of `lengths`.
    """
    best = [max(scores[length] for length in lengths if length in scores)
            for scores in scores_by_pair.values() if any(length in scores for length in lengths)]
    if not best:
        raise ValueError(f"base score without a score at any of the lengths {', '.join(map(str, lengths))}.")
    return fmean(best)


def nolima_effective_length(scores_by_length: Mapping[int, float], base: float) -> int | None:
    """The longest length from 1,000 tokens on up to which every score is at least .85 of the base score.

    None if 1,000 tokens are too many already, which NoLiMa's table writes as "<1K".
    """
    longer = {length: score for length, score in scores_by_length.items() if length >= SHORT_LENGTHS[-1]}
    return effective_length(longer, KEPT_SHARE * base)
