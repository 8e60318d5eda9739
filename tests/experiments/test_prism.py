"""Prism's experiment: the helpers against plain arithmetic, and the smoke scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from longspan.experiments import perform
from longspan.experiments.pooling import blind_spot, found, left_by_pooling, pair_norms, rotated, slash_head
from longspan.experiments.prism import EXPERIMENT, difference, judged_blocks, recall_at
from longspan.registry import Refused


def test_rotation_turns_every_pair_by_its_frequency():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    turned = rotated(x, 100.0, first=3)
    assert torch.allclose(pair_norms(turned), pair_norms(x), atol=1e-6)
    angle = torch.atan2(turned[2, 5], turned[2, 1]) - torch.atan2(x[2, 5], x[2, 1])
    assert math.isclose(math.remainder(float(angle) - 5 * 100 ** (-2 / 8), 2 * math.pi), 0.0, abs_tol=1e-5)


@pytest.mark.parametrize(("dim", "base", "cut"), [(64, 1e5, 17), (128, 1e6, 28)])
def test_the_blind_spot_ends_at_the_cut_off(dim, base, cut):
    rows = blind_spot(dim, base, 128)
    assert [r["channel"] for r in rows] == list(range(0, dim, 2))
    assert max(abs(r["closed_form"] - r["measured"]) for r in rows) < 1e-5
    turns = [128 * r["theta"] / (2 * math.pi) for r in rows]
    assert all((t > 1) == (r["channel"] < cut) for t, r in zip(turns, rows))


def test_what_pooling_leaves_of_constant_and_of_random_content():
    constant = rotated(torch.randn(64, generator=torch.Generator().manual_seed(0)).expand(256, 64), 1e5)[None, None]
    expected = torch.tensor([r["closed_form"] for r in blind_spot(64, 1e5, 128)], dtype=torch.float64)
    assert torch.allclose(left_by_pooling(constant, 128), expected, atol=1e-5)
    noise = torch.randn(1, 4, 128 * 20, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(left_by_pooling(noise, 128), torch.full((32,), 128**-0.5, dtype=torch.float64), rtol=0.35)


def test_the_slash_head_is_seen_by_the_fast_band_alone():
    rates = found(slash_head(3, 2, seed=0, n_blocks=32), 3)
    assert rates["high band"] >= 0.6 and rates["mean pooling"] <= 0.45 and rates["low band"] <= 0.45
    assert rates["prism reads it"] > rates["mean-pool reads it"] + 0.2 and rates["prism density"] < 0.5
    easy = found(slash_head(3, 0.01, seed=0, n_blocks=32), 3)
    assert easy["high band"] == 1.0


def test_recall_and_density_of_blocks():
    mass = torch.rand(1, 2, 12, 12).tril()
    mass /= mass.sum(-1, keepdim=True)
    density, recall = judged_blocks(torch.ones(12, 12, dtype=torch.bool).tril().expand(1, 2, 12, 12), mass)
    assert torch.allclose(density, torch.ones(2, dtype=torch.float64)) and torch.allclose(recall, torch.ones(2).double())
    diagonal = torch.eye(12, dtype=torch.bool).expand(1, 2, 12, 12)
    density, recall = judged_blocks(diagonal, mass)
    assert torch.allclose(density, torch.full((2,), 12 / 78).double())
    assert torch.allclose(recall, mass.diagonal(dim1=-2, dim2=-1)[0, :, 8:].double().mean(-1))


def test_curves_are_read_at_equal_density():
    low = {"density": np.array([[0.2, 0.2], [0.4, 0.6]]), "recall": np.array([[0.5, 0.7], [0.9, 0.7]])}
    high = {"density": low["density"], "recall": low["recall"] + 0.1}
    assert recall_at(low, 0.35) == pytest.approx(0.7)  # half way between 0.2 and 0.5, 0.6 and 0.8
    assert difference(high, low, 0.35) == pytest.approx((0.1, 0.1, 0.1))


def test_smoke_scale_measures_every_part():
    done = perform(EXPERIMENT, "smoke")
    assert done.verdict == "mechanism-only"
    assert {row["part"] for row in done.outcome.table} == {"blind spot", "slash head", "recall", "likelihood"}
    held = [name for name, holds in done.outcome.checks.items() if holds]
    assert any("closed form" in name for name in held) and any("fast band" in name for name in held)
    by_method = {name: [r["recall"] for r in done.outcome.table if r.get("method") == name] for name in ("oracle", "prism")}
    assert all(np.diff(values).min() >= -1e-9 for values in by_method.values())  # more share, no less recall
    with pytest.raises(Refused, match="smoke or small"):
        perform(EXPERIMENT, "paper")
