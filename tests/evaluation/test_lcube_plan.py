"""L-CUBE's plan: how many latents, which slots they join, and sequences drawn from it."""

import math

import numpy as np
import pytest
import torch

from longspan.evaluation.lcube import LCube, covariance, owned
from longspan.registry import Refused


def test_latents_of_every_level():
    plan = LCube(10)
    assert [plan.latents(h) for h in range(1, 11)] == [1, 2, 4, 8, 13, 23, 38, 64, 108, 181]
    assert plan.pair_information == pytest.approx(1.1639514505, abs=1e-10)


def test_latents_grow_with_the_exponent():
    plan = LCube(14)
    levels = np.arange(4, 15)
    slope = np.polyfit(levels * math.log(2), np.log([plan.latents(int(h)) for h in levels]), 1)[0]
    assert slope == pytest.approx(0.7511, abs=5e-5)


def test_pairs_stand_half_a_block_apart():
    plan = LCube(5)
    assert len(plan.levels) == sum(plan.latents(h) * 2 ** (5 - h) for h in range(1, 6))
    assert ((plan.times[:, 1] - plan.times[:, 0]) == 2 ** (plan.levels - 1)).all()
    block = plan.times // (2**plan.levels)[:, None]
    assert (block[:, 0] == block[:, 1]).all()
    # Latent k of a block begins at offset floor(k half / n).
    top = plan.times[plan.levels == 5, 0]
    assert top.tolist() == [k * 16 // 13 for k in range(13)]


@pytest.mark.parametrize(("r", "lowest"), [(1, 1), (2, 2), (3, 3)])
def test_no_slot_has_two_owners(r, lowest):
    plan = LCube(6, r=r, lowest=lowest)
    assert plan.members.unique().numel() == plan.members.numel() == owned(plan).sum()
    assert not owned(plan)[:, : lowest - 1].any()
    assert (plan.times.diff(dim=1) > 0).all()
    half = 2 ** (plan.levels - 1)
    assert ((plan.times // half[:, None]).diff(dim=1).sum(1) == 1).all()  # all copies lie in two neighbouring halves


def test_offsets_go_to_latents_in_turn():
    plan = LCube(3, r=2, lowest=3)
    assert plan.times.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_shuffled_partners_keep_the_slots_and_change_distances():
    plain, mixed = LCube(6), LCube(6, shuffle=3)
    assert (owned(plain) == owned(mixed)).all()
    distances = (mixed.times[:, 1] - mixed.times[:, 0])[mixed.levels == 6]
    assert distances.unique().numel() > 3 and (distances > 0).all()
    assert (LCube(6, shuffle=3).times == mixed.times).all()


def test_two_tokens_are_enough():
    plan = LCube.of_length(2)
    assert plan.H == 1 and plan.times.tolist() == [[0, 1]]


@pytest.mark.parametrize("plan", [LCube(4), LCube(4, shuffle=1), LCube(4, r=2, lowest=2, rho=0.8)])
def test_samples_correlate_as_planned(plan):
    x = plan.sample(20_000, torch.Generator().manual_seed(0))
    assert x.shape == (20_000, 16, 4) and x.dtype == torch.float32
    found = torch.corrcoef(x.flatten(1).double().T)
    assert (found - covariance(plan)).abs().max() < 0.03
    assert (x.flatten(1).var(0) - 1.0).abs().max() < 0.06


def test_a_generator_decides_the_sample():
    plan = LCube(3)
    first, second = (plan.sample(2, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, plan.sample(2, torch.Generator().manual_seed(6)))


@pytest.mark.parametrize(("settings", "said"), [
    ({"beta": 0.0}, "beta=0.0"), ({"beta": 1.01}, "beta=1.01"), ({"beta": math.nan}, "beta=nan"),
    ({"rho": 0.0}, "rho=0.0"), ({"rho": 1.0}, "rho=1.0"), ({"rho": -0.5}, "rho=-0.5"), ({"rho": True}, "rho=True"),
    ({"c": 0.0}, "c=0.0"), ({"c": "1"}, "c='1'"), ({"H": 0}, "H=0"), ({"H": 2.5}, "H=2.5"), ({"H": 99}, "H=99"),
    ({"r": 0}, "r=0"), ({"r": 2}, "r=2 with lowest=1"), ({"r": 3, "lowest": 2}, "lowest=3"), ({"H": 3, "lowest": 4}, "lowest=4"),
])
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(Refused, match=said):
        LCube(**settings)


@pytest.mark.parametrize("length", [0, 1, 3, 48, -4, 64.0, "64", math.inf])
def test_lengths_that_are_no_power_of_two_are_refused(length):
    with pytest.raises(Refused, match="power of two"):
        LCube.of_length(length)


@pytest.mark.parametrize("shape", [(2, 8, 4), (2, 16, 3), (16, 4), (2, 16, 4, 1)])
def test_sequences_of_another_shape_are_refused(shape):
    with pytest.raises(Refused, match="expected \\(B, 16, 4\\)"):
        LCube(4).check_sequences(torch.zeros(shape))
