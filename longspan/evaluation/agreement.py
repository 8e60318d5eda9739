"""How well a score's ranking of prompt tokens agrees with an answer-informed reference.

A score is compared with the reference r layer by layer: Spearman's rank correlation, and Recall (the overlap of the two
sets of best tokens, a tenth of the prompt), over all but the newest tokens. A score ranks tokens per head; the *mean over
heads* is compared. Mean, minimum, spread (largest - smallest) and jump (mean difference of neighbouring layers) sum up
the layers.

A recipe that compresses before the question is read ranks the context alone; then r is compared on the context's tokens.
Scores are asked about a dense reading, whatever else their recipe does while it reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from longspan.cache import CachePolicy
from longspan.context.document import check_window
from longspan.decoding import end_ids
from longspan.evaluation.base import Example, prompt_parts, token_spans
from longspan.evaluation.measure import BEFORE, SPANS
from longspan.evaluation.oracles import DenseReading, Oracle, dense_reading, reference
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused

Layers = list[float | None]


@dataclass(frozen=True)
class Agreement:
    """How well each layer's ranking agrees with a reference; None where a layer's scores are all equal."""

    recall: Layers
    spearman: Layers

    def as_json(self) -> dict[str, Any]:
        return {"recall": over_layers(self.recall), "spearman": over_layers(self.spearman),
                "recall_per_layer": self.recall, "spearman_per_layer": self.spearman}


def compare_rankings(scores: Float[Tensor, " N"], r: Float[Tensor, " N"], W: int = 8,
                     share: float = 0.1) -> tuple[float, float | None]:
    """Recall of the best `share` of N tokens, and Spearman's correlation, over the first N - W.

    Of equal scores the earlier token is the better one. The correlation is None where all scores are equal.

    Raises:
        Refused: fewer than two tokens are left to compare, or a score is NaN.
    """
    N = len(r)
    if scores.shape != r.shape:
        raise ValueError(f"scores {tuple(scores.shape)} and reference {tuple(r.shape)} rank different tokens.")
    left = N - W
    if left < 2:
        raise Refused(f"{max(0, left)} of {N} ranked tokens are left to compare, beside the {W} newest; expected at least two.")
    a, b = (t[:left].double().cpu().numpy() for t in (scores, r))
    if np.isnan(a).any() or np.isnan(b).any():
        raise Refused("a score is NaN; rankings that hold NaN can't be compared.")
    k = min(left, max(1, int(share * N + 1e-9)))
    recall = len(_best(a, k) & _best(b, k)) / k
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return recall, None
    return recall, float(np.corrcoef(stats.rankdata(a), stats.rankdata(b))[0, 1])


def _best(x: NDArray[np.float64], k: int) -> set[int]:
    return set(np.argsort(-x, kind="stable")[:k].tolist())


def over_layers(values: Layers) -> dict[str, float | None]:
    """Mean, minimum, spread and jump between neighbouring layers; None without values."""
    known = np.array([v for v in values if v is not None])
    if not len(known):
        return dict.fromkeys(("mean", "min", "spread", "jump"))
    jumps = [abs(a - b) for a, b in itertools.pairwise(values) if a is not None and b is not None]
    return {"mean": float(known.mean()), "min": float(known.min()), "spread": float(np.ptp(known)),
            "jump": float(np.mean(jumps)) if jumps else None}


class Judge:
    """Compares the scores of recipes with an oracle, example by example; each is read once for all recipes."""

    def __init__(self, loaded: Loaded, oracle: Oracle, recipes: Sequence[Recipe], compress: str = BEFORE) -> None:
        self.loaded, self.oracle, self.compress = loaded, oracle, compress
        self.recipes = [r for r in recipes if isinstance(r.cache, CachePolicy)]
        self._example: Example | None = None
        self._found: dict[str, dict[str, Any] | None] = {}

    def row(self, example: Example, recipe: Recipe) -> dict[str, Any]:
        """What a result row says of a recipe's score: `oracle_recall` and `oracle_spearman` (means over layers) and all
        of it as JSON in `oracle`; None for recipes without a score, and where there is nothing to compare."""
        if not isinstance(recipe.cache, CachePolicy):
            return dict.fromkeys(("oracle_recall", "oracle_spearman", "oracle"))
        if example is not self._example:
            self._example, self._found = example, {}
        if str(recipe) not in self._found:
            self._found |= self._look(example, recipe)
        found = self._found[str(recipe)]
        if found is None:
            return dict.fromkeys(("oracle_recall", "oracle_spearman", "oracle"))
        return {"oracle_recall": found["recall"]["mean"], "oracle_spearman": found["spearman"]["mean"],
                "oracle": json.dumps({"name": str(self.oracle)} | found)}

    def _look(self, example: Example, like: Recipe) -> dict[str, dict[str, Any] | None]:
        """Read an example once for all recipes that transform the model as `like` does."""
        tokenizer = self.loaded.tokenizer
        parts = prompt_parts(example, tokenizer)
        first, rest = (parts.context_ids, parts.question_ids) if self.compress == BEFORE else (parts.ids, [])
        recipes = [r for r in self.recipes if (r.weights, r.positions) == (like.weights, like.positions)]
        policies = {str(r): CachePolicy(r.scored.score, r.scored.budget) for r in recipes}
        check_window(self.loaded, len(parts.ids) + example.max_new_tokens, "prompt and answer")
        spans = {name: token_spans(example, tokenizer, name) for name in SPANS if example.meta.get(name)}
        with dense_reading(self.loaded.model, first, list(policies.values()), like, spans) as reading:
            scores = {name: reading.scores(policy) for name, policy in policies.items()}
            reading.go_on(rest)
            answers = self.oracle.answers(example, self.loaded, lambda: self._write(reading, example))
            if not answers:
                return dict.fromkeys(policies)
            check_window(self.loaded, len(parts.ids) + max(map(len, answers)), "prompt and answer")
            r = reference([reading.peaks(a) for a in answers], self.oracle.kernel)[: len(first)]
        return {name: self._compared(found, r, policies[name]) for name, found in scores.items()}

    def _write(self, reading: DenseReading, example: Example) -> list[int]:
        ends = end_ids(self.loaded.model, self.loaded.tokenizer)
        return reading.write(example.max_new_tokens, ends, example.meta.get("stop", ()), self.loaded.tokenizer)

    def _compared(self, scores: dict[int, Tensor], r: Tensor, policy: CachePolicy) -> dict[str, Any] | None:
        W = max(self.oracle.W, policy.score.window_rows())
        if not scores or len(r) - W < 2:
            return None
        both = [compare_rankings(own.mean(0), r, W, self.oracle.share) for _, own in sorted(scores.items())]
        return Agreement([a for a, _ in both], [b for _, b in both]).as_json()
