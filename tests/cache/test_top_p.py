"""Top-p sets, calibration and metric logits: HARD-KV's exact checks 1 to 4, and rows with dead entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.cache.top_p import calibrate, less_redundant, pooled, probabilities, redundancy, top_p_sets, top_p_sizes

DEAD = -torch.inf


def rows(*shape, seed=0, spread=2.0):
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_set(row, p):
    """The definition, entry by entry in float64."""
    probs, before, found = row.double().softmax(-1), 0.0, set()
    for i in sorted(range(len(row)), key=lambda i: (-float(row[i]), i)):
        if before >= p or probs[i] == 0:
            break
        found.add(i)
        before += float(probs[i])
    return found


def as_set(mask):
    return set(mask.nonzero()[:, 0].tolist())


# ------------------------------------------------------------------------------------------------------ 4: Top-p sets


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), p=st.sampled_from([0.05, 0.37, 0.6, 0.9, 0.99]), seed=st.integers(0, 999))
def test_smallest_prefix_that_holds_p(n, p, seed):
    z = rows(3, 2, n, seed=seed)
    sets, sizes, probs = top_p_sets(z, p), top_p_sizes(z, p), z.double().softmax(-1)
    assert torch.equal(sets.sum(-1), sizes)
    mass = (probs * sets).sum(-1)
    assert (mass >= p - 1e-6).all()
    least = probs.masked_fill(~sets, torch.inf).amin(-1)
    assert (mass - least < p + 1e-6).all(), "without its smallest member a set holds less than p"
    assert as_set(sets[0, 0]) == plain_set(z[0, 0], p)


def test_p_of_one_keeps_all_positive_entries_and_a_tiny_p_keeps_one():
    z = rows(4, 50, spread=8.0)
    z[:, 10:15] = DEAD
    assert torch.equal(top_p_sets(z, 1.0), z.softmax(-1) > 0)
    assert top_p_sizes(z, 1.0).tolist() == [45] * 4
    assert top_p_sizes(z, 1e-9).tolist() == [1] * 4
    assert as_set(top_p_sets(z, 1e-9)[2]) == {int(z[2].argmax())}


def test_sets_grow_with_p():
    z, before = rows(5, 80), torch.zeros(5, 80, dtype=torch.bool)
    for p in (0.01, 0.2, 0.5, 0.9, 0.999, 1.0):
        now = top_p_sets(z, p)
        assert (before <= now).all()
        before = now


def test_of_equal_entries_the_earlier_are_taken():
    assert as_set(top_p_sets(torch.zeros(10), 0.45)) == set(range(5))


@pytest.mark.parametrize("p", [0.0, -0.1, 1.01])
def test_p_outside_its_range_raises(p):
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
        top_p_sizes(rows(4), p)


def test_dead_entries_and_dead_rows():
    z = rows(2, 12)
    z[0, ::2] = DEAD
    z[1] = DEAD
    sets = top_p_sets(z, 0.999)
    assert not (sets & (z == DEAD)).any() and sets[0].any()
    assert top_p_sizes(z, 0.9)[1] == 0 and (probabilities(z)[1] == 0).all()
    assert calibrate(z, top_p_sizes(z, 0.9), 0.9)[1] == 1
    with pytest.raises(ValueError, match="at least one entry"):
        top_p_sizes(torch.zeros(3, 0), 0.9)


# ------------------------------------------------------------------------------------------------- 1 to 3: calibration


@pytest.mark.parametrize("p", [0.6, 0.9])
def test_identity_needs_a_temperature_just_above_one(p):
    """1: the Top-p set overshoots p by less than its last element, so T >= 1; the set is the plain one."""
    z = rows(2, 3, 8, 200)
    sizes = top_p_sizes(z, p)
    T = calibrate(z, sizes, p)
    assert (T >= 1 - 1e-6).all() and (T < 1.5).all() and (T > 1).float().mean() > 0.9
    assert torch.equal(top_p_sets(z, p, T[..., None]), top_p_sets(z, p))


@pytest.mark.parametrize(("a", "b"), [(0.5, 3.0), (2.0, -1.0), (4.0, 0.0)])
def test_an_affine_metric_scales_the_temperature(a, b):
    """2: phi(z) = a z + b gives a times the temperature, and the same set."""
    z = rows(6, 150, spread=3.0)
    sizes = top_p_sizes(z, 0.9)
    plain, scaled = calibrate(z, sizes, 0.9), calibrate(a * z + b, sizes, 0.9)
    torch.testing.assert_close(scaled, a * plain, rtol=1e-4, atol=0)
    assert torch.equal(top_p_sets(a * z + b, 0.9, scaled[:, None]), top_p_sets(z, 0.9))


def mass(g, sizes, T):
    top = g.sort(-1, descending=True).values.div(T).softmax(-1)
    return (top * (torch.arange(g.shape[-1]) < sizes[..., None])).sum(-1)


def test_calibrated_mass_is_p_and_falls_with_the_temperature():
    """3, for a metric without ties; limits: 1 when cold, k*/n when hot."""
    z, g = rows(20, 300, spread=3.0), rows(20, 300, seed=1, spread=1.5)
    sizes = top_p_sizes(z, 0.9)
    T = calibrate(g, sizes, 0.9)
    assert (sizes / 300 < 0.9).all()
    torch.testing.assert_close(mass(g, sizes, T[:, None]), torch.full((20,), 0.9), atol=1e-3, rtol=0)
    ladder = torch.stack([mass(g, sizes, t) for t in (1e-3, 0.1, 0.5, 1.0, 2.0, 10.0, 1e6)])
    assert (ladder.diff(dim=0) <= 1e-6).all()
    torch.testing.assert_close(ladder[0], torch.ones(20), atol=1e-4, rtol=0)
    torch.testing.assert_close(ladder[-1], sizes / 300, atol=1e-4, rtol=0)


def test_a_tie_at_the_top_stops_at_the_coldest_and_the_set_grows_to_it():
    """3: pooling makes runs of seven equal values, so fewer than seven can't hold p."""
    z = torch.full((1, 40), -5.0)
    z[0, 20] = 5.0
    g = pooled(z, 7)
    sizes = top_p_sizes(z, 0.9)
    assert sizes.item() == 1
    T = calibrate(g, sizes, 0.9)
    assert T.item() == pytest.approx(1e-3)
    assert as_set(top_p_sets(g, 0.9, T[:, None])[0]) == set(range(17, 24))


def test_nearly_uniform_rows_are_not_calibrated():
    g = torch.stack([torch.zeros(10), rows(10, spread=4.0)])
    sizes = top_p_sizes(g, 0.85)
    assert sizes[0] == 9 and 9 / 10 >= 0.85
    T = calibrate(g, sizes, 0.85)
    assert T[0] == 1 and T[1] > 1
    assert calibrate(g, sizes, 0.85, shared=True) == T[1], "a shared temperature leaves such rows out"


def test_a_shared_temperature_gives_the_mean_mass():
    z, g = rows(4, 16, 200, spread=3.0), rows(4, 16, 200, seed=1)
    sizes = top_p_sizes(z, 0.8)
    T = calibrate(g, sizes, 0.8, shared=True)
    assert T.shape == (4,)
    torch.testing.assert_close(mass(g, sizes, T[:, None, None]).mean(-1), torch.full((4,), 0.8), atol=1e-3, rtol=0)


def test_calibration_brings_pooled_sets_back_to_their_size():
    z = rows(8, 32, 400, spread=3.0)
    g, sizes = pooled(z, 7), top_p_sizes(z, 0.9).float()
    T = calibrate(g, sizes.long(), 0.9, shared=True)[:, None, None]
    assert top_p_sizes(g, 0.9).float().mean() > 1.5 * sizes.mean()
    assert top_p_sets(g, 0.9, T).sum(-1).float().mean() == pytest.approx(float(sizes.mean()), rel=0.25)


# ------------------------------------------------------------------------------------------------------ metric logits


def test_pooling_takes_the_largest_live_neighbour():
    z = rows(2, 3, 20)
    z[..., 8] = DEAD
    g = pooled(z, 7)
    assert (g[..., 8] == DEAD).all() and torch.isfinite(g[..., :8]).all() and torch.isfinite(g[..., 9:]).all()
    for t in (0, 5, 9, 19):
        near = z[..., max(0, t - 3) : t + 4]
        assert torch.equal(g[..., t], near.amax(-1))
    assert torch.equal(pooled(z, 1), z)


def plain_redundancy(keys, live):
    """The definition in float64: live entries only, written out."""
    at = live.nonzero()[:, 0].tolist()
    total = dict.fromkeys(at, 0.0)
    for i in at:
        cosines = {j: float(torch.cosine_similarity(keys[i].double(), keys[j].double(), dim=0)) if i != j else 0.0 for j in at}
        alike = [j for j in at if cosines[j] > 0.5]
        if alike:
            cosines[max(alike)] = 0.0
        for j in at:
            total[j] += cosines[j]
    found = torch.zeros(len(keys), dtype=torch.float64)
    found[at] = torch.tensor([total[j] / len(at) for j in at], dtype=torch.float64).softmax(0)
    return found


def test_redundancy_is_as_defined():
    keys, live = rows(2, 30, 4), torch.ones(2, 30, dtype=torch.bool)
    live[1, [3, 17]] = False
    found = redundancy(keys, live)
    for row in range(2):
        torch.testing.assert_close(found[row].double(), plain_redundancy(keys[row], live[row]), atol=1e-6, rtol=1e-5)


def test_redundancy_does_not_depend_on_its_blocks(monkeypatch):
    keys, live = rows(1, 50, 4), torch.ones(1, 50, dtype=torch.bool)
    whole = redundancy(keys, live)
    monkeypatch.setattr("longspan.cache.top_p.ROWS", 7)
    torch.testing.assert_close(redundancy(keys, live), whole)


def test_repeated_keys_count_for_less():
    keys = torch.cat([torch.ones(10, 8) + 0.01 * rows(10, 8), rows(10, 8, seed=3)])
    live = torch.ones(20, dtype=torch.bool)
    g = less_redundant(torch.zeros(1, 20), keys, live)
    assert g[0, :9].max() < g[0, 10:].min(), "copies lose"
    torch.testing.assert_close(g.exp().sum(-1), torch.ones(1), atol=1e-5, rtol=0)


def test_less_redundant_logits_keep_dead_entries_dead():
    z, keys, live = rows(3, 4, 20), rows(3, 20, 8), torch.ones(3, 20, dtype=torch.bool)
    live[0, :5] = False
    z = z.masked_fill(~live[:, None], DEAD)
    z[1, 2] = DEAD  # a row that sees nothing
    g = less_redundant(z, keys, live)
    assert torch.equal(g == DEAD, z == DEAD) and not g.isnan().any()
    u = 0.07 * z[2, 0].double().softmax(-1) - 0.93 * plain_redundancy(keys[2], live[2])
    u = (u - u.min()) / (u - u.min()).sum()
    torch.testing.assert_close(g[2, 0].double(), (u + 1e-10).log(), atol=1e-3, rtol=1e-3)
