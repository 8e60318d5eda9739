"""Counting what is held: freed means freed."""

from __future__ import annotations

import pytest
import torch

from longspan.parallel import Communicator
from longspan.parallel.live import LiveElements, Traffic


def test_peaks_and_what_is_held_now():
    live, like = LiveElements(), torch.zeros(1)
    a = live.empty((2, 3), like)
    out = live.empty((10,), like, output=True)
    b = live.adopt(torch.zeros(4, dtype=torch.float64))
    assert (live.now, live.output, live.peak, live.peak_with_output) == (10, 10, 10, 20)
    view = a.view(6)
    live.free(a, b)
    assert a.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    live.free(view)  # given back before
    assert live.hand_over(out) is out and out.untyped_storage().nbytes() == 40
    assert (live.now, live.output, live.peak, live.peak_with_output) == (0, 0, 10, 20)
    live.reset()
    assert (live.peak, live.peak_with_output) == (0, 0)


def test_a_buffer_counts_once_and_strangers_are_errors():
    live = LiveElements()
    x = live.adopt(torch.zeros(8))
    assert live.adopt(x.view(2, 4)).shape == (2, 4) and live.now == 8
    with pytest.raises(ValueError, match="3 elements isn't counted"):
        live.free(torch.zeros(3))
    live.drop_all()
    assert live.now == 0 and x.untyped_storage().nbytes() == 32


def test_traffic_is_counted_by_kind():
    traffic = Traffic()
    traffic.add("ring", 5)
    traffic.add("ring", 6)
    assert (traffic.operations["ring"], traffic.bytes["ring"], traffic.bytes["all-to-all"]) == (2, 11, 0)
    traffic.reset()
    assert traffic.operations["ring"] == 0


def test_a_group_of_one_sends_nothing():
    comm = Communicator.current()
    x = torch.randn(2, 3, 4, 5)
    send = comm.live.empty((1, 3), x)
    assert comm.size == 1 and comm.all_to_all(send, "x") is send and comm.shift(send, "x")() is send
    assert torch.equal(comm.seq2head(x), x) and torch.equal(comm.head2seq(x), x)
    assert comm.gather([3, 4], "x") == [[3, 4]] and not comm.traffic.bytes
    with pytest.raises(ValueError, match="one part for each of 1 ranks"):
        comm.all_to_all(x, "x")


def test_shapes_that_do_not_divide_are_errors():
    pair = Communicator(0, 2)
    with pytest.raises(ValueError, match="divide over 2 ranks, got 3"):
        pair.seq2head(torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match="divide over 2 ranks, got 5"):
        pair.head2seq(torch.zeros(1, 5, 2, 4))
    with pytest.raises(ValueError, match="can't be cut into 3 rows"):
        pair.grid(3)
