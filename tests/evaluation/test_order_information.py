"""Time information of heads, its dimension, and what edits leave of it."""

from __future__ import annotations

import math

import pytest
import torch

from longspan.evaluation.order import (
    ablate,
    dimension_share,
    erase,
    random_directions,
    remove_direction,
    steer,
    time_code,
    time_map,
)
from longspan.evaluation.order.edits import step_of
from longspan.evaluation.order.information import PENALTIES, TimeCode, fold_of, out_of_fold, permuted, r2
from longspan.registry import Refused


def planted(n=4000, d=6, noise=0.3, seed=0):
    """o = tau v + noise, with v of norm 1."""
    draw = torch.Generator().manual_seed(seed)
    tau = torch.rand(n, generator=draw, dtype=torch.float64)
    v = torch.randn(d, generator=draw, dtype=torch.float64)
    v = v / v.norm()
    o = tau[:, None] * v + noise * torch.randn(n, d, generator=draw, dtype=torch.float64)
    return o, tau, v, torch.arange(n) // max(1, n // 20)


def in_sample(o, tau):
    """R^2 of least squares."""
    x = torch.cat((torch.ones_like(o[:, :1]), o), 1)
    return r2(x @ torch.linalg.lstsq(x, tau[:, None], driver="gelsd").solution[:, 0], tau)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_r2_is_that_of_the_closed_form_and_the_direction_is_found(noise):
    o, tau, v, groups = planted(20_000, noise=noise)
    found = time_map(o[None, None].float(), tau.float(), groups, pairs=10_000, permutations=0)
    closed = 1 - noise**2 / (1 / 12 + noise**2)
    assert found.best == pytest.approx(closed, abs=0.01) and (found.layer, found.head) == (0, 0)
    code = time_code(o, tau, groups)
    assert code.penalty == PENALTIES[0]
    for direction in (code.u, code.v / code.v.norm()):
        assert abs(float(direction @ v)) > 0.99
    assert r2(code.decode(o), tau) == pytest.approx(closed, abs=0.01)


def test_the_map_finds_the_head_that_tells_time_and_chance_is_lower():
    o, tau, _, groups = planted(200)
    outputs = torch.randn(2, 3, *o.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert not time_map(outputs, tau, groups, 100, permutations=60).reinstates
    outputs[1, 2] = o
    found = time_map(outputs, tau, groups, 100, permutations=60)
    assert (found.layer, found.head) == (1, 2) and found.reinstates and found.chance < 0.2
    assert found.r2.shape == (2, 3) and (found.r2.flatten()[:5] < 0.1).all()


def test_permuted_targets_tell_nothing():
    o, tau, _, groups = planted(300)
    found = permuted(o[None], tau, fold_of(groups), 100)
    assert float(found.mean()) < 0.02


def test_folds_keep_texts_whole():
    groups = torch.tensor([4, 4, 9, 9, 9, 1, 2, 2, 7, 8])
    folds = fold_of(groups)
    assert all(len(folds[groups == g].unique()) == 1 for g in groups.unique()) and folds.unique().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(Refused, match="2 texts: expected at least 3"):
        fold_of(torch.tensor([0, 1, 1]))


def test_judged_groups_are_not_learned_from():
    """One group tells time the wrong way round: what is learned elsewhere must fail on it."""
    o, tau, _, groups = planted(200, noise=0.05)
    turned = torch.where((groups == 3)[:, None], -o, o)
    plain, other = (float(out_of_fold(x[None], tau[:, None], fold_of(groups))) for x in (o, turned))
    assert other < plain - 0.05


def test_dimension_of_a_line_and_of_a_circle():
    draw = torch.Generator().manual_seed(1)
    tau = torch.rand(40_000, generator=draw, dtype=torch.float64)
    noise = 0.2 * torch.randn(len(tau), 5, generator=draw, dtype=torch.float64)
    line = tau[:, None] * torch.ones(5, dtype=torch.float64) + noise
    circle = noise.clone()
    circle[:, 0] += (2 * math.pi * tau).cos()
    circle[:, 1] += (2 * math.pi * tau).sin()
    assert dimension_share(line, tau) > 0.98
    assert dimension_share(circle, tau) == pytest.approx(0.5, abs=0.03)
    whole = torch.arange(len(tau)) // 2
    assert dimension_share(line, tau, units=whole) > 0.98
    with pytest.raises(Refused, match="0 of 16 bins"):
        dimension_share(line[:2], tau[:2], units=torch.zeros(2))


def test_exact_erasure_leaves_nothing_linear_whatever_the_noise():
    draw = torch.Generator().manual_seed(2)
    tau = torch.rand(5000, generator=draw, dtype=torch.float64)
    noise = torch.randn(5000, 4, generator=draw, dtype=torch.float64) @ torch.randn(4, 4, generator=draw, dtype=torch.float64)
    o = tau[:, None] * torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64) + noise
    code = time_code(o, tau, torch.arange(5000) // 100)
    left = erase(code.v, code.w, code.mean)(o)
    covariance = (left - left.mean(0)).T @ (tau - tau.mean()) / len(tau)
    assert float(covariance.abs().max()) < 1e-10 and abs(in_sample(left, tau)) < 1e-10
    assert in_sample(o, tau) > 0.05


def test_orthogonal_removal_erases_under_isotropic_noise_only():
    draw = torch.Generator().manual_seed(3)
    n = 400_000
    tau = torch.rand(n, generator=draw, dtype=torch.float64)
    normal = torch.randn(n, 2, generator=draw, dtype=torch.float64)
    found = []
    for spread in ((0.1, 0.3), (0.2, 0.2)):
        o = tau[:, None] + normal * torch.tensor(spread, dtype=torch.float64)
        code = time_code(o, tau, torch.arange(n) % 10)
        found.append(in_sample(remove_direction(code.u, code.mean)(o), tau))
    assert found[0] == pytest.approx(0.42, abs=0.01) and found[1] < 0.01


def code_of(d=8, seed=0):
    o, tau, _, groups = planted(400, d, seed=seed)
    return o, time_code(o, tau, groups)


def test_direction_ablation_touches_one_coordinate_and_twice_is_once():
    o, code = code_of()
    change = remove_direction(code.u, code.mean)
    new = change(o)
    assert float((new @ code.u - code.mean @ code.u).abs().max()) < 1e-6
    beside = torch.eye(8, dtype=torch.float64) - torch.outer(code.u, code.u)
    torch.testing.assert_close(new @ beside, o @ beside, atol=1e-12, rtol=0)
    torch.testing.assert_close(change(new), new, atol=1e-12, rtol=0)
    exact = erase(code.v, code.w, code.mean)
    torch.testing.assert_close(exact(exact(o)), exact(o), atol=1e-10, rtol=0)


def test_ablating_a_coordinate_without_variance_changes_nothing():
    o, _ = code_of()
    o = torch.cat((o, torch.full_like(o[:, :1], 2.5)), 1)
    u = torch.zeros(9, dtype=torch.float64)
    u[8] = 1.0
    assert torch.equal(remove_direction(u, o.mean(0))(o), o)


@pytest.mark.parametrize("along", ["code", "ridge"])
def test_steering_decodes_to_a_later_time(along):
    o, code = code_of()
    for s in (-1.0, 0.25):
        torch.testing.assert_close(code.decode(steer(code, s, along)(o)), code.decode(o) + s)
    assert torch.equal(steer(code, 0.0, along)(o), o)
    each = torch.linspace(-1, 1, len(o), dtype=torch.float64)
    torch.testing.assert_close(code.decode(steer(code, each, along)(o)), code.decode(o) + each)
    assert float(code.w @ step_of(code, along)) == pytest.approx(1.0)


def test_half_precision_is_changed_in_float32():
    o, code = code_of()
    half = o.to(torch.bfloat16)
    assert remove_direction(code.u, code.mean)(half).dtype == torch.bfloat16
    assert torch.equal(ablate(code.mean)(half), code.mean.bfloat16().expand_as(half))


def test_random_directions_are_unit_vectors():
    found = random_directions(12)
    assert found.shape == (20, 12)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(20, dtype=torch.float64))


def test_bad_samples_are_refused():
    o, tau, _, groups = planted(200)
    with pytest.raises(Refused, match="29 pairs: expected at least 30"):
        time_map(o[None, None], tau, groups, 29)
    still = torch.stack((o, torch.ones_like(o)))[None]
    with pytest.raises(Refused, match=r"head \[0, 1\] has the same output"):
        time_map(still, tau, groups, 100)
    with pytest.raises(Refused, match="NaN"):
        time_map(torch.full_like(o, math.nan)[None, None], tau, groups, 100)
    with pytest.raises(Refused, match="segments have the time"):
        time_map(o[None, None], torch.ones_like(tau), groups, 100)
    with pytest.raises(ValueError, match="should have 150 samples"):
        time_map(o[None, None], tau[:150], groups[:150], 100)
    flat = TimeCode(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.zeros(2), 0.0, 1.0)
    with pytest.raises(Refused, match="orthogonal"):
        erase(flat.v, flat.w, flat.mean)
    with pytest.raises(Refused, match="ridge"):
        steer(flat, 1.0, "rigde")
