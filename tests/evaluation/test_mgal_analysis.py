import math
import random

import numpy as np
import pytest

from longspan.evaluation.mgal import (
    context_need,
    crowding_slope,
    cue_overlap,
    fluency_gap,
    language_gap,
    option_reuse,
    position_curve,
    surface_cue_index,
)
from longspan.registry import Refused


def test_context_need_is_a_paired_gain():
    found = context_need([1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0])
    assert found["gain"].difference == 0.5 and found["gain"].wins == 2 and found["none"][0] == 0.25
    assert found["gain of the paragraph"].difference == 0.25


def test_crowding_slope():
    assert crowding_slope({0: [1, 1], 9: [0, 0.2]}) == pytest.approx(-0.1)
    with pytest.raises(Refused, match="at least two"):
        crowding_slope({0: [1]})


def test_cues_are_connectives_and_entities_of_the_neighbours():
    around = "The town of Kelmark grew. However, 12 men left."
    assert cue_overlap("But Kelmark, however, had 12 houses.", around, "en") == 3
    assert cue_overlap("The town grew and men left.", around, "en") == 0


def test_surface_cues_of_a_random_and_of_a_greedy_chooser():
    rng = random.Random(0)
    items = [[rng.randrange(6) for _ in range(10)] for _ in range(4000)]  # overlaps; the gold is option 0
    chosen = [rng.randrange(1, 10) for _ in items]
    found = surface_cue_index([row[c] for row, c in zip(items, chosen)], [row[0] for row in items])
    assert abs(found.share - 0.5) < 0.03 and found.n > 3000 and found.p_value > 0.01
    greedy = [max(range(10), key=row.__getitem__) for row in items]
    errors = [(row[c], row[0]) for row, c in zip(items, greedy) if c]
    assert surface_cue_index(*zip(*errors)).share == 1.0
    assert surface_cue_index([2, 2], [2, 2]) == (0.5, 0, 1.0)


def test_fluency_gap_is_between_z_scores():
    assert fluency_gap([-1.0, -2.0], [0.5, 1.0]) == pytest.approx([2.0, -2.0])
    assert fluency_gap([-1.0, -1.0], [0.5, 0.5]) == pytest.approx([0.0, 0.0])
    with pytest.raises(ValueError, match="1 fluencies"):
        fluency_gap([1.0], [1.0, 2.0])


def test_option_reuse_finds_a_favoured_letter_where_margins_are_low():
    rng = np.random.default_rng(0)
    even = list(np.arange(400) % 10)
    margins = list(rng.uniform(size=400))
    assert option_reuse(even, 10, margins).p_value == 1.0
    stuck = [0 if m < 0.2 else e for e, m in zip(even, margins)]
    found = option_reuse(stuck, 10, margins)
    assert found.low_p_value < 1e-6 and found.low_chi2 > found.chi2 / 4 and found.counts[0] > 80
    with pytest.raises(Refused, match="no answers"):
        option_reuse([], 10, [])


def test_position_curve_has_wilson_intervals_and_a_bias():
    places = [("begin", "begin"), ("begin", "end"), ("end", "end"), ("end", None)] * 5
    found = position_curve(places, [0, 1, 1, 1] * 5)
    mean, low, high = found.cells["end", "end"]
    assert mean == 1.0 and 0.5 < low < 0.6 and high == 1.0 and ("middle", "middle") not in found.cells
    assert found.nearest_evidence_bias == 0.5
    assert math.isnan(position_curve([("begin", None)], [1]).nearest_evidence_bias)


def test_language_gap_is_mcnemar_over_common_ids():
    own, english = {f"i{k}": float(k >= 8) for k in range(10)}, {f"i{k}": 1.0 for k in range(12)}
    found = language_gap(own, english)
    assert (found.n, found.losses, found.wins) == (10, 8, 0) and found.p_value == pytest.approx(2 / 2**8)
    with pytest.raises(Refused, match="no item id"):
        language_gap({"a": 1.0}, english)
