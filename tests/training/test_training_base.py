"""Batches are cut along time without losing or doubling a label."""

import pytest
import torch

from longspan.training import Batch


def batch(time):
    ids = torch.arange(2 * time).view(2, time)
    return Batch(ids, ids + 1, valid=ids > 2, extra={"w": ids.float()}, index=7)


@pytest.mark.parametrize(("time", "n"), [(8, 1), (8, 3), (8, 8), (7, 2)])
def test_pieces_join_to_the_whole(time, n):
    whole = batch(time)
    pieces = whole.pieces(n)
    assert len(pieces) == n and all(p.index == 7 and p.segments is None for p in pieces)
    assert {p.ids.shape[1] for p in pieces} <= {time // n, -(-time // n)}
    for read in (lambda b: b.ids, lambda b: b.labels, lambda b: b.valid, lambda b: b.extra["w"]):
        assert torch.equal(torch.cat([read(p) for p in pieces], 1), read(whole))


def test_too_many_pieces_are_refused():
    with pytest.raises(ValueError, match="4 tokens can't be cut into 5 pieces"):
        batch(4).pieces(5)
