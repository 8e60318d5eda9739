"""Statistics of results: means with intervals, paired comparison with the dense run, what was achieved, Pareto fronts.

Every recipe reads the same examples, so two recipes are compared *example by example*: the spread between easy and
hard examples, which is most of the spread there is, cancels. In the order used below:

1. one recipe: `mean_interval` (Wilson for right-or-wrong scores, else a bias-corrected bootstrap);
2. two recipes: `paired` (interval of the mean difference, exact or sampled sign-flip test, exact McNemar test);
3. many comparisons at once: `holm`;
4. which of many may be the best: `ranking`;
5. all of it over result rows: `summarise`;
6. which recipes are worth having: `pareto`.

Rows are dictionaries, one per example (one Parquet row); ``None`` and NaN mean "not measured" and are left out.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from longspan.evaluation.averages import average as average
from longspan.evaluation.ranking import standings
from longspan.registry import Refused

DENSE = "full"
"""The recipe every other one is compared with."""

EXACT_SIGN_FLIPS = 12
"""Up to this many pairs all sign patterns are tried; beyond, a sample of them."""

SAMPLED_SIGN_FLIPS = 9999

Floats = NDArray[np.float64]
Values = ArrayLike | Sequence[float | None]
Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------- one recipe


def mean_interval(x: Values, seed: int = 0, n: int = 2000, level: float = 0.95,
                  bounded: bool = False) -> tuple[float, float, float]:
    """Mean of `x` with its confidence interval, as (mean, lo, hi).

    All values 0 or 1: the Wilson score interval (Wilson 1927), which stays sensible at 0% and 100%. Otherwise the BCa
    bootstrap (Efron 1987) with `n` resamples. Where the sample shows no spread (one value, or all equal) a bootstrap
    has nothing to say; then, with `bounded`, the values are taken as scores in [0, 1] and Wilson's interval at their
    mean is given, which is wide enough because no variable in [0, 1] varies more than a right-or-wrong one.

    Args:
        x: (n,) values; None and NaN are left out.
        seed: of the resampling.
        n: number of resamples.
        level: of confidence, such as 0.95.
        bounded: values are scores in [0, 1].

    Returns:
        (nan, nan, nan) for no value; (value, nan, nan) for one value that isn't a score; (value, value, value) when
        all values are equal and aren't scores.
    """
    values = _measured(x)
    if not len(values):
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    if not math.isfinite(mean):
        return mean, math.nan, math.nan
    flat = bool(np.ptp(values) == 0)
    if _binary(values) or (bounded and flat):
        return mean, *_wilson(mean, len(values), level)
    if flat:
        edge = mean if len(values) > 1 else math.nan
        return mean, edge, edge
    return mean, *_bootstrap(values, seed, n, level)


def _wilson(mean: float, n: int, level: float) -> tuple[float, float]:
    z = float(stats.norm.ppf(0.5 + level / 2))
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At 0 and 1 the bound is the mean itself; say so exactly instead of to the last bit.
    return (0.0 if mean == 0 else max(0.0, centre - half)), (1.0 if mean == 1 else min(1.0, centre + half))


def _bootstrap(values: Floats, seed: int, n: int, level: float) -> tuple[float, float]:
    """BCa interval of the mean; the percentile interval where BCa's correction can't be computed."""
    batch = max(1, 4_000_000 // len(values))  # at most 32 MB of resamples at a time
    n = max(n, math.ceil(40 / (1 - level)))  # at least twenty resamples in each tail
    for kind in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = stats.bootstrap(
                (values,), np.mean, n_resamples=n, confidence_level=level, method=kind, batch=batch,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            break
    return float(found.low), float(found.high)


# --------------------------------------------------------------------------------------------------------- two recipes


class Paired(NamedTuple):
    """How `a` compares with `b` on the same examples: mean of a - b, its interval, and the test of "no difference"."""

    difference: float
    lo: float
    hi: float
    p_value: float
    n: int
    wins: int
    losses: int
    ties: int


def paired(a: Values, b: Values, seed: int = 0, n: int = 2000, level: float = 0.95) -> Paired:
    """Compare two recipes on the same examples.

    Right-or-wrong scores: the interval of Agresti and Min (2005), which adds half a count to each of the four cells
    and so isn't empty when nobody won, and McNemar's exact test (the binomial test on the examples that only one of
    the two got right). Other values: BCa bootstrap of the differences, and the sign-flip permutation test, exact up
    to `EXACT_SIGN_FLIPS` pairs and with 9,999 sampled sign patterns beyond.

    Args:
        a, b: (n,) values of the two recipes, aligned by example; pairs with a None or NaN are left out.
        seed: of the resampling.
        n: number of bootstrap resamples.
        level: of confidence.

    Returns:
        `Paired`. No pair: NaN for the difference, its interval and the p-value. One pair of values that aren't right
        or wrong: NaN for the interval. All differences equal: an interval of that one point.

    Raises:
        ValueError: `a` and `b` have different lengths.
    """
    first, second = _floats(a), _floats(b)
    if first.shape != second.shape:
        raise ValueError(f"paired: expected two aligned lists, got shapes {first.shape} and {second.shape}.")
    both = ~(np.isnan(first) | np.isnan(second))
    first, second = first[both], second[both]
    d = first - second
    if not len(d) or not np.isfinite(d).all():
        return Paired(math.nan, math.nan, math.nan, math.nan, len(d), 0, 0, 0)
    wins, losses = int((d > 0).sum()), int((d < 0).sum())
    if _binary(first) and _binary(second):
        lo, hi = _agresti_min(wins, losses, len(d), level)
        p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    else:
        edge = float(d[0]) if len(d) > 1 else math.nan
        lo, hi = (edge, edge) if np.ptp(d) == 0 else _bootstrap(d, seed, n, level)
        p = _sign_flip(d, seed)
    return Paired(float(d.mean()), lo, hi, p, len(d), wins, losses, len(d) - wins - losses)


def _agresti_min(wins: int, losses: int, n: int, level: float) -> tuple[float, float]:
    z = float(stats.norm.ppf(0.5 + level / 2))
    centre = (wins - losses) / (n + 2)
    half = z * math.sqrt(wins + losses + 1 - (wins - losses) ** 2 / (n + 2)) / (n + 2)
    return max(-1.0, centre - half), min(1.0, centre + half)


def _sign_flip(d: Floats, seed: int) -> float:
    """Two-sided p-value of "the sign of each difference is a coin toss" (Fisher 1935)."""
    d = d[d != 0]  # a zero has no sign to flip
    size = np.abs(d)
    if not len(size):
        return 1.0
    seen = abs(float(d.sum())) * (1 - 1e-12)  # a sum in another order may differ in its last bits
    if len(size) <= EXACT_SIGN_FLIPS:
        patterns = (np.arange(2 ** len(size))[:, None] >> np.arange(len(size))) & 1
        return float((np.abs((2.0 * patterns - 1) @ size) >= seen).mean())
    rng = np.random.default_rng(seed)
    extreme, left = 0, SAMPLED_SIGN_FLIPS
    while left:
        rows = min(left, max(1, 2_000_000 // len(size)))
        flips = rng.integers(0, 2, (rows, len(size)), dtype=np.int8) * 2.0 - 1
        extreme += int((np.abs(flips @ size) >= seen).sum())
        left -= rows
    return (extreme + 1) / (SAMPLED_SIGN_FLIPS + 1)  # the pattern seen is one of them, so p is never 0


def holm(p_values: Sequence[float | None]) -> list[float]:
    """Holm's step-down correction (Holm 1979): p-values that hold for all comparisons together, in the order given.

    Missing p-values (None or NaN) stay NaN and aren't counted as comparisons.
    """
    p = _floats(p_values)
    out = np.full(len(p), math.nan)
    order = [i for i in np.argsort(p, kind="stable") if not math.isnan(p[i])]
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p[i]))
        out[i] = running
    return [float(v) for v in out]


# ------------------------------------------------------------------------------------------------------- over the rows


def summarise(
    rows: Iterable[Row], by: Sequence[str] = ("recipe", "compress", "task", "length"), seed: int = 0, level: float = 0.95
) -> list[dict[str, Any]]:
    """One line per recipe, task and length, in the order they first appear: the rows of ``longspan compare --json``.

    Keys: recipe, compress, task, length, n, accuracy, ci95 [lo, hi], answer_nll (mean nats per gold answer token),
    cache_bytes (right after compression) and full_cache_bytes (means over examples), ttft_s (median seconds),
    tokens_per_s (over all decoding seconds), achieved (mean of what every example reported); oracle (the same of its
    score's agreement with a reference, None without a score) where one was asked for.

    Where the dense run is among the rows, every other recipe also has vs_full, from the examples that both have read
    (same task, length, index, seed and text): accuracy_difference, ci95, p_value, p_holm (corrected over the recipes
    of the same task and length), wins, losses, nll_difference, nll_ci95, nll_p_value and n.

    Where there is something to compare, every recipe but the dense run also has standing, {"accuracy", "answer_nll"}: how it
    stands among those of the same task and length, "best", "may-be-best" or "worse" (see `ranking`), None for no figure.

    Not measured is None, never NaN, so that the result is valid JSON.

    Args:
        rows: one dictionary per example.
        by: the keys that make a line. Leave out "task" or "length" to pool over them; the line then says "all".
        seed: of the resampling.
        level: of the intervals in vs_full, where it shall not be 95%.

    Raises:
        Refused: rows of more than one model; they don't belong in one comparison.
    """
    rows = list(rows)
    models = list(dict.fromkeys(row.get("model") for row in rows))
    if len(models) > 1:
        raise Refused(f"summarise: expected the rows of one model, got {', '.join(map(repr, models))}; pass them one by one.")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in by), []).append(row)
    dense = _dense_rows(rows)
    lines = [_line(group, dense, seed, level) for group in groups.values()]
    _rank(lines, groups, by, seed)
    families: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if "vs_full" in line:
            families.setdefault((line["task"], line["length"]), []).append(line["vs_full"])
    for family in families.values():
        for versus, p in zip(family, holm([versus["p_value"] for versus in family])):
            versus["p_holm"] = _json(p)
    return lines


def _rank(lines: list[dict[str, Any]], groups: dict[tuple[Any, ...], list[Row]], by: Sequence[str], seed: int) -> None:
    families: dict[tuple[Any, ...], list[tuple[dict[str, Any], list[Row]]]] = {}
    for line, (key, group) in zip(lines, groups.items()):
        if line["recipe"] != DENSE:
            family = tuple(value for name, value in zip(by, key) if name not in ("recipe", "compress"))
            families.setdefault(family, []).append((line, group))
    for contestants in families.values():
        found = standings([{_example(row): row for row in group} for _, group in contestants], seed)
        for (line, _), standing in zip(contestants, found):
            if any(standing.values()):
                line["standing"] = standing


def _line(group: list[Row], dense: dict[tuple[Any, ...], Row], seed: int, level: float) -> dict[str, Any]:
    mean, lo, hi = mean_interval([row.get("score") for row in group], seed, bounded=True)
    line = {
        "recipe": _common(group, "recipe"), "compress": _common(group, "compress"), "task": _common(group, "task"),
        "length": _common(group, "length"), "n": len(group),
        "accuracy": _json(mean), "ci95": [_json(lo), _json(hi)],
        "answer_nll": _json(_mean(group, "answer_nll")),
        "cache_bytes": _whole(_mean(group, "cache_bytes")),
        "full_cache_bytes": _whole(_mean(group, "full_cache_bytes")),
        "ttft_s": _json(_median(group, "ttft_s")), "tokens_per_s": _json(_speed(group)),
        "achieved": average([_parsed(row.get("achieved")) for row in group]) or {},
    }  # fmt: skip
    if any(row.get("oracle_name") for row in group):
        line["oracle"] = average([_parsed(row.get("oracle")) for row in group])
    if line["recipe"] != DENSE and dense:
        versus = _against_dense(group, dense, seed, level)
        if versus["n"]:
            line["vs_full"] = versus
    return line


def _against_dense(group: list[Row], dense: dict[tuple[Any, ...], Row], seed: int, level: float) -> dict[str, Any]:
    pairs = []
    for row in group:
        # The dense run is the same whenever compression would happen; prefer the one made the same way.
        other = dense.get((*_example(row), row.get("compress"))) or dense.get(_example(row))
        if other is not None:
            pairs.append((row, other))
    score = paired([a.get("score") for a, _ in pairs], [b.get("score") for _, b in pairs], seed, level=level)
    nll = paired([a.get("answer_nll") for a, _ in pairs], [b.get("answer_nll") for _, b in pairs], seed, level=level)
    return {
        "accuracy_difference": _json(score.difference), "ci95": [_json(score.lo), _json(score.hi)],
        "p_value": _json(score.p_value), "p_holm": None, "wins": score.wins, "losses": score.losses,
        "nll_difference": _json(nll.difference), "nll_ci95": [_json(nll.lo), _json(nll.hi)],
        "nll_p_value": _json(nll.p_value), "n": len(pairs),
    }  # fmt: skip


def _dense_rows(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.get("recipe") == DENSE:
            found[(*_example(row), row.get("compress"))] = row
            found.setdefault(_example(row), row)
    return found


def _example(row: Row) -> tuple[Any, ...]:
    """What makes two rows the same example; the text counts, since installed texts differ between machines."""
    return tuple(row.get(key) for key in ("task", "length", "index", "seed", "text_hash"))


# -------------------------------------------------------------------------------------------------------- worth having


def pareto(points: Iterable[tuple[float | None, float | None]]) -> list[int]:
    """Which (accuracy, cost) points no other point beats: indices by rising cost.

    A point is beaten by one that is at least as accurate and at most as costly, and better in one of the two. Equal
    points don't beat each other. Points with a None or NaN take no part.
    """
    known = [(_number(cost), -_number(accuracy), i) for i, (accuracy, cost) in enumerate(points)]
    front: list[int] = []
    best, best_cost = math.inf, math.inf
    for cost, loss, i in sorted(point for point in known if not math.isnan(point[0] + point[1])):
        if loss < best:
            best, best_cost = loss, cost
            front.append(i)
        elif loss == best and cost == best_cost:
            front.append(i)
    return front


# ------------------------------------------------------------------------------------------------------------- numbers


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _floats(x: Values) -> Floats:
    # `None` inside a list makes an object array; float64 turns it into NaN.
    return np.asarray(x, dtype=object).astype(np.float64).reshape(-1)


def _measured(x: Values) -> Floats:
    values = _floats(x)
    return values[~np.isnan(values)]


def _binary(values: Floats) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _column(group: list[Row], key: str) -> Floats:
    return _measured([row.get(key) for row in group])


def _mean(group: list[Row], key: str) -> float:
    return float(found.mean()) if len(found := _column(group, key)) else math.nan


def _median(group: list[Row], key: str) -> float:
    return float(np.median(found)) if len(found := _column(group, key)) else math.nan


def _speed(group: list[Row]) -> float:
    """Tokens of the whole group over its seconds of decoding, not the mean of ratios; that mean without seconds."""
    pairs = [(_number(row.get("tokens_per_s")), _number(row.get("decode_s"))) for row in group]
    timed = [(rate, seconds) for rate, seconds in pairs if rate >= 0 and seconds > 0]
    if not timed:
        return _mean(group, "tokens_per_s")
    return sum(rate * seconds for rate, seconds in timed) / sum(seconds for _, seconds in timed)


def _common(group: list[Row], key: str) -> Any:
    values = list(dict.fromkeys(row.get(key) for row in group))
    return values[0] if len(values) == 1 else "all"


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else value or None


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None
