"""Perturbed indices: their shape, their draws, documents and padding."""

import numpy as np
import pytest
import torch
from scipy import stats

from longspan.registry import Refused
from longspan.training import Batch
from longspan.training.index_perturbations import draw_cyclic, draw_skip, perturbed

TIME = 12


def batch(rows=2, time=TIME, index=0, seed=1):
    ids = torch.randint(0, 20, (rows, time + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1].clone(), ids[:, 1:].clone(), index=index)



def test_skip_has_one_jump_and_cyclic_is_a_permutation():
    for index in range(20):
        view = perturbed("skip", batch(1, index=index))
        steps = view.positions.diff()
        assert (steps > 0).all() and (steps != 1).sum() == 1
        split = int((steps != 1).nonzero()[0, 1]) + 1
        assert view.moved[0].tolist() == [t >= split for t in range(TIME)]
        assert view.positions.max() < 2 * TIME
        turned = perturbed("cyclic", batch(1, index=index))
        assert sorted(turned.positions[0].tolist()) == list(range(TIME)) and turned.positions[0, 0] != 0
        assert turned.moved.all()
    assert perturbed("nope", batch()).positions.unique().tolist() == [0]


def test_draws_are_uniform():
    draw = np.random.default_rng(0)
    length, most, n = 9, 7, 10_000
    splits, gaps = draw_skip(draw, np.full(n, length), most)
    shifts = draw_cyclic(draw, np.full(n, length))
    _, wide = draw_skip(draw, np.full(n, length))
    for drawn, values in ((splits, length - 1), (gaps, most), (shifts, length - 1), (wide, length)):
        counts = np.bincount(drawn)[1:]
        assert len(counts) == values and stats.chisquare(counts).pvalue > 0.01
    assert stats.chi2_contingency(np.histogram2d(splits, gaps, (length - 1, most))[0]).pvalue > 0.01


def test_draws_are_a_function_of_seed_and_number_alone():
    state = torch.get_rng_state()
    first = perturbed("skip", batch())
    assert torch.equal(first.positions, perturbed("skip", batch()).positions)
    assert not torch.equal(first.positions, perturbed("skip", batch(), seed=1).positions)
    assert not torch.equal(first.positions, perturbed("skip", batch(index=1)).positions)
    assert torch.equal(state, torch.get_rng_state())


def test_documents_have_draws_of_their_own_and_padding_counts_for_nothing():
    ids = torch.zeros(1, 11, dtype=torch.long)
    segments = torch.tensor([[0] * 5 + [1] + [2] * 5])
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, 7] = False
    for index in range(10):
        given = Batch(ids, ids, valid=valid, segments=segments, index=index)
        view = perturbed("skip", given, most=3)
        lengths = ((slice(0, 5), 5), (slice(5, 6), 1), (slice(6, 11), 4))
        for where, length in lengths:
            places = view.positions[0, where][valid[0, where]]
            steps = places.diff()
            assert places[0] == 0 and len(places) == length
            assert (steps != 1).sum() == (length > 1) and (steps <= 4).all()
        assert not view.moved[0, 5] and not view.moved[0, 7] and not view.moved[0, 0] and view.moved[0, [4, 10]].all()
        for where, length in lengths:
            turned = perturbed("cyclic", given).positions[0, where][valid[0, where]]
            assert sorted(turned.tolist()) == list(range(length))
    assert len({int(perturbed("skip", Batch(ids, ids, index=i), most=3).positions.max()) for i in range(40)}) == 3


@pytest.mark.parametrize("time", [0, 1])
def test_rows_without_two_tokens_are_refused(time):
    with pytest.raises(Refused, match=f"rows of {time} token"):
        perturbed("skip", batch(time=time))
