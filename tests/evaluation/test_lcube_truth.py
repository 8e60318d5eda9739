"""L-CUBE's exact side: conditionals against a linear solve, information against dense determinants."""

import numpy as np
import pytest
import torch

from longspan.evaluation.lcube import (
    LCube,
    available,
    bipartite,
    conditional,
    covariance,
    entropy,
    log_det,
    nll,
    oracle,
    past,
    variances,
)
from longspan.evaluation.lcube.truth import remembering, within
from longspan.registry import Refused

PLANS = [LCube(4), LCube(3, shuffle=2), LCube(4, r=2, lowest=2, rho=0.8), LCube(4, r=3, lowest=3, rho=0.6), LCube(1)]


@pytest.mark.parametrize("n", range(5))
def test_the_rule_of_a_group_against_a_linear_solve(n):
    rho = 0.8
    table = np.full((n + 1, n + 1), rho) + (1 - rho) * np.eye(n + 1)
    weights = np.linalg.solve(table[:n, :n], table[:n, n]) if n else np.zeros(0)
    var = 1.0 - (weights @ table[:n, n] if n else 0.0)
    plan = LCube(4, rho=rho, r=3, lowest=3)
    level = (plan.levels == 3).nonzero()[0, 0]
    x = torch.randn(1, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    mu, found = conditional(plan, x)
    where = plan.members[level]
    assert found.flatten(1)[0, where[n]].item() == pytest.approx(var, abs=1e-12)
    assert mu.flatten(1)[0, where[n]].item() == pytest.approx(float(weights @ x.flatten(1)[0, where[:n]].numpy()), abs=1e-12)
    known = {1: (0.8, 0.36), 2: (0.4444, 0.28889), 3: (0.3077, 0.26154), 4: (0.2353, 0.24706)}
    if n:
        assert (weights[0], var) == pytest.approx(known[n], abs=5e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("start", [0, 1])
def test_conditionals_against_the_dense_covariance(plan, start):
    x = plan.sample(3, torch.Generator().manual_seed(0), torch.float64)
    mu, var = conditional(plan, x, past(plan, start))
    table, flat, D = covariance(plan), x.flatten(1), plan.H
    for t in range(start, plan.length):
        before, here = slice(start * D, t * D), slice(t * D, (t + 1) * D)
        gain = torch.linalg.solve(table[before, before], table[before, here])
        torch.testing.assert_close(mu[:, t], flat[:, before] @ gain)
        rest = table[here, here] - table[here, before] @ gain
        torch.testing.assert_close(torch.diag(var[0, t]), rest)  # slots are independent given the past


def test_available_information_is_the_log_determinant():
    plan = LCube(4)
    total = float(available(plan).sum())
    assert total == pytest.approx(37.246446, abs=1e-6) == 32 * plan.pair_information
    assert total == pytest.approx(-0.5 * float(torch.linalg.slogdet(covariance(plan)).logabsdet), abs=1e-10)
    assert covariance(plan).shape == (64, 64)


@pytest.mark.parametrize("plan", PLANS)
def test_information_across_every_cut_against_determinants(plan):
    table, D = covariance(plan), plan.H
    found = bipartite(plan)
    assert found.shape == (plan.length - 1,)
    for cut in range(1, plan.length):
        parts = [torch.linalg.slogdet(t).logabsdet for t in (table[: cut * D, : cut * D], table[cut * D :, cut * D :], table)]
        assert float(found[cut - 1]) == pytest.approx(float(0.5 * (parts[0] + parts[1] - parts[2])), abs=1e-12)


def test_information_counts_pairs_across_the_cut():
    plan = LCube(10)
    assert float(bipartite(plan)[511]) == pytest.approx(181 * plan.pair_information, abs=1e-9)
    crossing = ((plan.times[:, 0] < 300) & (plan.times[:, 1] >= 300)).sum()
    assert float(bipartite(plan)[299]) == pytest.approx(int(crossing) * plan.pair_information, abs=1e-9)


@pytest.mark.parametrize(("r", "nats"), [(1, 0.510826), (2, 0.780618), (3, 0.955511)])
def test_information_of_a_group(r, nats):
    count = torch.tensor([r, 2 * r])
    half, whole = log_det(count, 0.8).tolist()
    assert 0.5 * (2 * half - whole) == pytest.approx(nats, abs=5e-7)
    plan = LCube(3, rho=0.8, r=r, lowest=3, c=1e-9)  # a single group
    assert float(bipartite(plan)[3]) == pytest.approx(nats, abs=5e-7)


def test_nothing_is_available_at_first():
    for plan in PLANS:
        assert available(plan)[0] == 0.0 and (available(plan) >= 0).all()
        assert log_det(torch.zeros(1), plan.rho).item() == 0.0


def test_a_token_says_nothing_of_itself_and_its_future():
    plan = LCube(4, r=2, lowest=2)
    x = plan.sample(1, torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, 7:] += 1.0
    assert torch.equal(conditional(plan, x).mu[:, :8], conditional(plan, changed).mu[:, :8])


def test_parts_of_the_past():
    plan = LCube(4)
    distance = 2 ** (plan.levels - 1)
    assert (within(plan, 4)[:, 1, 0] == (distance <= 4)).all()
    assert (past(plan, 8)[:, 1, 0] == (plan.times[:, 0] >= 8)).all()
    kept = remembering(plan, 3, 8)[:, 1, 0]
    assert kept[plan.levels < 4].all() and kept[plan.levels == 4].tolist() == [True] * 3 + [False] * 5
    assert (variances(plan, within(plan, 0)) == 1.0).all()


def test_the_likelihood_of_the_truth_tends_to_the_entropy():
    for plan in (LCube(4), LCube(4, r=2, lowest=2, rho=0.8)):
        x = plan.sample(4000, torch.Generator().manual_seed(2), torch.float64)
        found = nll(oracle(plan)(x), x)
        assert abs(float(found.mean()) - entropy(plan)) < 3 * float(found.std()) / 4000**0.5


@pytest.mark.parametrize("cut", [0, 16, -1, 3.0, True])
def test_cuts_outside_the_sequence_are_refused(cut):
    with pytest.raises(Refused, match="expected 1 to 15"):
        LCube(4).check_cut(cut)
    with pytest.raises(Refused, match="expected 1 to 15"):
        remembering(LCube(4), 2, cut)
