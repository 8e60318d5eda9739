"""The planner: what fits is what the accounts say, and measured times give the constants back."""

from __future__ import annotations

import pytest

from longspan.parallel import Shape
from longspan.parallel.planner import LLAMA_3_8B, GiB, Model, Node, Speed, fit, largest, memory, table
from longspan.parallel.ring import RingAttention
from longspan.parallel.ulysses import Ulysses
from longspan.parallel.upipe import UPipe
from longspan.parallel.usp import USP
from longspan.registry import Refused

TINY = Model("tiny", 2, 16, 16, 8, 32, 1e6)


def test_memory_is_state_and_the_larger_pass():
    node = Node(devices=4, element_bytes=2, state_bytes=16, offload=True)
    account = UPipe(U=4).account(TINY.shape(64, 2), 4)
    piece, heads = 16, 16 * 8
    forward = account.forward_with_output + 2 * piece * 32
    backward = account.backward_elements + 2 * piece * heads + 3 * piece * 32
    assert memory(UPipe(U=4), TINY, node, 64) == 1e6 * 16 / 4 + 2 * max(forward, backward)
    account = Ulysses().account(TINY.shape(64, 2), 4)
    backward = account.backward_elements + (2 * 16 + 2 * 16) * piece * 8 + 2 * piece * heads + 3 * piece * 32
    assert memory(Ulysses(), TINY, node, 64) == 1e6 * 16 / 4 + 2 * backward  # with q, k, v and o that it kept
    account = UPipe(U=4).account(TINY.shape(64, 2), 4)
    kept = Node(devices=4, offload=False)
    assert memory(UPipe(U=4), TINY, kept, 64) - memory(UPipe(U=4), TINY, node, 64) == 2 * 2 * account.saved_elements


@pytest.mark.parametrize("method", [Ulysses(recompute=True), UPipe(U=8), RingAttention(), USP(inner=UPipe(U=4), ring=2)], ids=str)
def test_the_longest_fits_and_the_next_does_not(method):
    node = Node(memory=24 * GiB)
    found = largest(method, LLAMA_3_8B, node)
    assert found % (8 * 1024) == 0 and found > 0
    assert memory(method, LLAMA_3_8B, node, found) <= node.memory < memory(method, LLAMA_3_8B, node, found + 8 * 1024)


def test_fewer_heads_at_a_time_fit_longer_sequences():
    lengths = [largest(m, LLAMA_3_8B, Node()) for m in (UPipe(U=8), UPipe(U=16), Ulysses(recompute=True))]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 1.25 * lengths[-1]


def test_nothing_fits_beside_too_large_a_state():
    assert largest(UPipe(U=8), LLAMA_3_8B, Node(memory=8 * GiB)) == 0


def test_speeds_are_found_again():
    true = Speed(2e9, 3e8, 1e-4)
    accounts = [m.account(Shape(s, 16, 4, 32, 512), p)
                for m in (Ulysses(), UPipe(U=4), RingAttention()) for s in (1024, 4096) for p in (2, 4)]
    speed = fit([(a, true.seconds(a)) for a in accounts])
    assert (speed.flops, speed.bytes, speed.operation_seconds) == pytest.approx((2e9, 3e8, 1e-4), rel=1e-6)
    halves = fit([(a, 2 * (a.flops / 2e9 + a.bytes / 3e8) + a.operations * 1e-4) for a in accounts], share=[0.5] * len(accounts))
    assert halves.flops == pytest.approx(2e9, rel=1e-6)
    with pytest.raises(ValueError, match="at least three runs, got 1"):
        fit([(accounts[0], 1.0)])
    with pytest.raises(ValueError, match="don't determine"):
        fit([(a, a.operations * 1e-4) for a in accounts])


def test_the_table_has_a_row_for_every_method_and_says_what_cannot_run():
    odd = Model("nine heads", 30, 9, 3, 64, 576, 1.35e8)
    rows = table([UPipe(), RingAttention()], odd, Node(memory=GiB), speed=Speed(1e12, 1e10, 1e-5))
    assert "H=9 query heads don't divide over P=8" in rows[0]["refused"] and "longest" not in rows[0]
    assert rows[1]["longest"] > 0 and rows[1]["seconds"] > 0 and rows[1]["forward_bytes"] > 0
    with pytest.raises(Refused):
        largest(UPipe(), odd, Node())
