"""The mean of what many examples reported: numbers in dictionaries and lists of any depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def average(reports: Sequence[Any]) -> Any:
    """Mean of reports of one shape: numbers and equally long lists are averaged, dictionaries go key by key.

    Other values are kept where all agree and become None where they differ; so do lists of different lengths.
    """
    found = [r for r in reports if r is not None]
    if not found:
        return None
    if all(isinstance(r, dict) for r in found):
        keys = list(dict.fromkeys(key for r in found for key in r))
        return {key: average([r[key] for r in found if key in r]) for key in keys}
    if all(isinstance(r, list) for r in found):
        return [average(list(part)) for part in zip(*found)] if len({len(r) for r in found}) == 1 else None
    if all(isinstance(r, int | float) and not isinstance(r, bool) for r in found):
        return found[0] if all(r == found[0] for r in found) else _mean(found)
    return found[0] if all(r == found[0] for r in found) else None


def _mean(numbers: Sequence[float]) -> float | None:
    known = [float(n) for n in numbers if not math.isnan(n)]
    mean = float(np.mean(known)) if known else math.nan
    return mean if math.isfinite(mean) else None
