"""How a ranking is scored: discounted gain, and recall of any or all of what should be found.

LongMemEval (arXiv:2410.10813) scores retrieved sessions or turns by recall_any@k, recall_all@k and an NDCG whose discount
begins one rank later than usual; questions whose right answer is to abstain have no evidence and are left out. HELMET
(arXiv:2410.02694) reads a ranking out of a model's answer, the longest run ``id > id > …``, and takes the usual NDCG@10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean

CUTOFFS = (1, 3, 5, 10, 30, 50)
"""The values of k that LongMemEval reports."""


def dcg(relevances: Sequence[float], k: int, variant: str = "standard") -> float:
    """Discounted cumulative gain at k.

    "standard" discounts rank i (from 1) by log2(i + 1); "longmemeval" by log2(i) from rank 2 on, as LongMemEval's
    published scorer does, so that ranks 1 and 2 weigh the same.
    """
    if variant not in ("standard", "longmemeval"):
        raise ValueError(f"variant {variant!r}: expected 'standard' or 'longmemeval'.")
    shift = 1 if variant == "standard" else 0
    return sum(gain / max(1.0, math.log2(max(rank + shift, 2))) for rank, gain in enumerate(relevances[:k], 1))


def ndcg(relevances: Sequence[float], k: int, variant: str = "standard", ideal: Sequence[float] | None = None) -> float:
    """DCG at k over that of the best order; 0 when nothing is relevant.

    Args:
        relevances: gains in the order ranked.
        ideal: gains of everything that could have been ranked, in any order; those of `relevances` if None.
    """
    best = dcg(sorted(relevances if ideal is None else ideal, reverse=True), k, variant)
    return dcg(relevances, k, variant) / best if best else 0.0


def recall_any(ranked: Sequence[str], relevant: Iterable[str], k: int) -> float:
    """1 if any relevant item is among the first k."""
    return float(bool(set(ranked[:k]) & set(relevant)))


def recall_all(ranked: Sequence[str], relevant: Iterable[str], k: int) -> float:
    """1 if all relevant items are among the first k."""
    return float(set(relevant) <= set(ranked[:k]))


# --------------------------------------------------------------------------------------------------------- LongMemEval


def is_abstention(question_id: str) -> bool:
    """Whether the right answer is that the history doesn't tell."""
    return question_id.endswith("_abs")


def retrieval_scores(ranked: Sequence[str], relevant: Collection[str], cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """recall_any@k, recall_all@k and ndcg_any@k (LongMemEval's variant) of one ranking.

    Args:
        ranked: ids of sessions or turns, the best first, each once.
        relevant: ids that hold evidence; at least one.
    """
    if not relevant:
        raise ValueError("retrieval scores of a question without evidence; expected at least one relevant id.")
    gains = [float(name in relevant) for name in ranked]
    found: dict[str, float] = {}
    for k in cutoffs:
        found |= {f"recall_any@{k}": recall_any(ranked, relevant, k), f"recall_all@{k}": recall_all(ranked, relevant, k),
                  f"ndcg_any@{k}": ndcg(gains, k, "longmemeval", ideal=[1.0] * len(relevant))}
    return found


def mean_retrieval_scores(rankings: Mapping[str, Sequence[str]], relevant: Mapping[str, Collection[str]],
                          cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """Means of `retrieval_scores` over question ids, those that end in ``_abs`` left out; {} if none is left."""
    found = [retrieval_scores(ranked, relevant[name], cutoffs)
             for name, ranked in rankings.items() if not is_abstention(name)]
    return {key: fmean(scores[key] for scores in found) for key in found[0]} if found else {}


def sessions_of_turns(ranked_turns: Sequence[str], k: int) -> list[str]:
    """Session ids of ranked turns (``session_turn``), as many turns as give k different sessions."""
    return list(dict.fromkeys(turn.rpartition("_")[0] for turn in ranked_turns))[:k]


# -------------------------------------------------------------------------------------------------------------- HELMET


def parse_ranking(prediction: str) -> list[str]:
    """The longest run `id > id > …` of a prediction, as identifiers (HELMET's re-ranking)."""
    runs = re.findall(r"\w+(?:\s*>\s*\w+)+", prediction)
    return re.split(r"\s*>\s*", max(runs, key=lambda run: run.count(">"))) if runs else []


def ranking_ndcg(prediction: str, gains: Mapping[str, float], k: int = 10) -> float:
    """NDCG@k of the ranking written in `prediction`; unknown and repeated ids gain nothing.

    Args:
        gains: relevance of every document by its id.
    """
    seen: set[str] = set()
    found = []
    for name in parse_ranking(prediction):
        found.append(0.0 if name in seen else gains.get(name, 0.0))
        seen.add(name)
    return ndcg(found, k, ideal=list(gains.values()))
