"""What the results say: need of context, crowding, surface cues, fluency against consistency, letters, places, languages.

Scores of different grains are different scales: every function takes the results of one task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from longspan.evaluation.mgal.language import names, tokens
from longspan.evaluation.mgal.units import THIRDS
from longspan.evaluation.statistics import Paired, mean_interval, paired
from longspan.registry import Refused

CONNECTIVES: dict[str, tuple[str, ...]] = {
    "en": ("however", "therefore", "thus", "but", "also", "then", "because", "although", "finally", "moreover", "instead"),
    "fr": ("cependant", "donc", "ainsi", "mais", "aussi", "puis", "car", "bien", "enfin", "toutefois", "pourtant"),
    "es": ("embargo", "tanto", "así", "pero", "también", "luego", "porque", "aunque", "finalmente", "además", "entonces"),
    "ru": ("однако", "поэтому", "так", "но", "также", "затем", "потому", "хотя", "наконец", "кроме", "поскольку"),
    "zh": ("但", "因", "所", "而", "则", "虽", "且", "还", "也", "又", "然"),
    "ar": ("لكن", "لذلك", "ثم", "أيضا", "كما", "لأن", "رغم", "أخيرا", "بل", "إذا", "حيث"),
}


class Bias(NamedTuple):
    """Share of something among `n`, and the p-value of "it is the share expected by chance"."""

    share: float
    n: int
    p_value: float


def context_need(unit: Sequence[float], paragraph: Sequence[float], none: Sequence[float]) -> dict[str, Any]:
    """Accuracy with the unit, with only the paragraph, with nothing; the gains over nothing are paired by item."""
    return {"unit": mean_interval(unit), "paragraph": mean_interval(paragraph), "none": mean_interval(none),
            "gain": paired(unit, none), "gain of the paragraph": paired(paragraph, none)}


def crowding_slope(by_crowding: Mapping[int, Sequence[float]]) -> float:
    """Least-squares slope of cloze accuracy on c, per crowded option."""
    if len(by_crowding) < 2:
        raise Refused(f"crowding at {len(by_crowding)} value of c; expected at least two, such as 0 and 9.")
    levels = sorted(by_crowding)
    return float(np.polyfit(levels, [np.mean(by_crowding[c]) for c in levels], 1)[0])


def cue_overlap(option: str, neighbours: str, language: str) -> int:
    """Connectives and entities of the neighbouring sentences that the option shares."""
    cues = names(neighbours, language) | (set(tokens(neighbours, language)) & set(CONNECTIVES[language]))
    return len(cues & (set(tokens(option, language)) | names(option, language)))


def surface_cue_index(chosen: Sequence[float], gold: Sequence[float]) -> Bias:
    """Among errors, the share where the chosen option overlaps more than gold; .5 is no preference (binomial test).

    Args:
        chosen, gold: (errors,) overlaps; those that are equal say nothing and are left out.
    """
    more = sum(a > b for a, b in zip(chosen, gold, strict=True))
    n = sum(a != b for a, b in zip(chosen, gold))
    return Bias(more / n, n, float(stats.binomtest(more, n).pvalue)) if n else Bias(0.5, 0, 1.0)


def fluency_gap(fluency: Sequence[float], consistency: Sequence[float]) -> np.ndarray:
    """z(fluency) - z(entity consistency) of each system and language, z over all of them; 0 where all are equal."""

    def z(x: Sequence[float]) -> np.ndarray:
        values = np.asarray(x, dtype=np.float64)
        spread = values.std()
        return (values - values.mean()) / spread if spread else np.zeros_like(values)

    if len(fluency) != len(consistency):
        raise ValueError(f"{len(fluency)} fluencies and {len(consistency)} consistencies; expected one of each for every system")
    return z(fluency) - z(consistency)


class Reuse(NamedTuple):
    """Chi-square of the chosen letters against uniform, over all answers and over those of low margin."""

    counts: dict[int, int]
    chi2: float
    p_value: float
    low_chi2: float
    low_p_value: float


def option_reuse(chosen: Sequence[int], options: int, margins: Sequence[float]) -> Reuse:
    """Whether some letters are chosen too often, and so where the model is unsure.

    Args:
        chosen: index of the letter chosen for each item.
        margins: log-odds of the best over the second best option; low is the lowest quarter.
    """
    letters, gaps = np.asarray(chosen), np.asarray(margins, dtype=np.float64)
    if not len(letters):
        raise Refused("option reuse of no answers; expected at least one.")
    low = letters[gaps <= np.quantile(gaps, 0.25)]

    def test(x: np.ndarray) -> tuple[float, float]:
        found = stats.chisquare(np.bincount(x, minlength=options))
        return float(found.statistic), float(found.pvalue)

    return Reuse(dict(Counter(int(i) for i in letters)), *test(letters), *test(low))


class PositionCurve(NamedTuple):
    """Accuracy with its Wilson interval for each of the places that occur, and the bias to what stands nearest."""

    cells: dict[tuple[str, str], tuple[float, float, float]]
    nearest_evidence_bias: float


def position_curve(places: Sequence[tuple[str, str | None]], right: Sequence[float]) -> PositionCurve:
    """Accuracies over thirds of document and paragraph; the bias is that at the document's end minus that at its begin."""
    rows = list(zip(places, right, strict=True))
    cells = {(d, p): mean_interval(own) for d in THIRDS for p in THIRDS if (own := [r for place, r in rows if place == (d, p)])}
    ends = [[r for place, r in rows if place[0] == where] for where in ("end", "begin")]
    return PositionCurve(cells, float(np.mean(ends[0]) - np.mean(ends[1])) if all(ends) else float("nan"))


def language_gap(own: Mapping[str, float], english: Mapping[str, float]) -> Paired:
    """Scores by item id against English: McNemar's test over the ids that both have.

    Raises:
        Refused: no id in common.
    """
    ids = sorted(own.keys() & english.keys())
    if not ids:
        raise Refused("the two languages share no item id; expected results on the same items.")
    return paired([own[i] for i in ids], [english[i] for i in ids])


def rotation_accuracy(choose: Callable[[Any], int], rotations: Sequence[Any]) -> float:
    """Mean accuracy of a chooser (options -> index) over rotations of one item."""
    return float(np.mean([choose(each) == each.right for each in rotations]))
