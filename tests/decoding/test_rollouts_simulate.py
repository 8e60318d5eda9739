"""The event simulation: against counting by hand, and what must hold whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest

from longspan.decoding.rollouts.simulate import MEMORY_BOUND, Drafted, PassTimes, simulate


def drawn(steps=3, ranks=4, sequences=6, seed=0):
    return np.random.default_rng(seed).integers(1, 60, (steps, ranks, sequences)).tolist()


def test_by_hand():
    lengths = [[[2, 5], [9, 3]], [[4, 8], [6, 6]]]
    first, second = simulate(lengths, drafted=Drafted(4.0, 5))
    assert (first.seconds, first.own_seconds, first.tokens) == (9.0, [5.0, 9.0], 19)
    assert first.bubble_tokens == 8, "four passes, two slots"
    assert second.drafted_share == 8 / 24
    assert second.own_seconds == [5.0, 6.0], "four tokens in one pass, then four one by one"
    plain = simulate(lengths)
    assert [s.seconds for s in plain] == [9.0, 8.0] and plain[0].bubble_tokens == 0


@pytest.mark.parametrize("seed", range(5))
def test_drafts_never_make_a_step_longer(seed):
    lengths = drawn(seed=seed)
    for times in (MEMORY_BOUND, PassTimes({(1, 1): 1.0, (6, 1): 1.5, (1, 4): 1.0, (6, 4): 1.5})):
        plain, drafted = simulate(lengths, times), simulate(lengths, times, Drafted(2.5, 4))
        pass_s = times(6, 1)
        assert all(d.seconds <= p.seconds + pass_s for p, d in zip(plain, drafted)), "but for a pass under way"
        if times is MEMORY_BOUND:
            assert all(d.seconds <= p.seconds for p, d in zip(plain, drafted))
        assert sum(d.bubble_tokens for d in drafted) > 0 == sum(p.bubble_tokens for p in plain)
        assert all(d.tokens == p.tokens for p, d in zip(plain, drafted))


def test_uneven_lengths_gain():
    lengths = np.minimum(np.random.default_rng(0).lognormal(4, 0.9, (6, 8, 8)).astype(int) + 1, 400).tolist()
    plain, drafted = simulate(lengths), simulate(lengths, drafted=Drafted(4.0, 9))
    assert sum(p.seconds for p in plain) > 1.1 * sum(d.seconds for d in drafted)
    assert 0.2 < drafted[3].drafted_share < 1 and drafted[0].drafted_share == 0


def test_what_is_left_of_a_bubble_goes_to_the_step_after_the_next():
    lengths = [[[2], [9]], [[3], [3]], [[5], [5]]]
    found = simulate(lengths, drafted=Drafted(5.0, 6))
    assert found[0].bubble_tokens == 7, "three tokens of the next step's draft, four of the one after"
    assert [s.drafted_share for s in found] == [0, 3 / 6, (4 + 0) / 10]


def test_sequences_that_leave_their_drafts_gain_less():
    lengths = np.minimum(np.random.default_rng(0).lognormal(4, 0.9, (6, 8, 8)).astype(int) + 1, 400).tolist()
    seconds = [sum(s.seconds for s in simulate(lengths, drafted=Drafted(4.0, 9, leaves))) for leaves in (0.0, 0.02, 0.9)]
    assert seconds[0] < seconds[1] < seconds[2] <= sum(s.seconds for s in simulate(lengths))


def test_equal_lengths_leave_no_bubbles():
    lengths = [[[7, 3, 5]] * 4] * 3
    plain, drafted = simulate(lengths), simulate(lengths, drafted=Drafted(3.0, 4))
    assert plain == drafted
    assert all(s.bubble_tokens == 0 and s.utilisation == 1 for s in drafted)


def test_one_draft_of_every_prompt_before_a_second():
    lengths = [[[1, 1, 1, 1], [4, 4, 4, 4]], [[9, 9, 9, 9], [9, 9, 9, 9]]]
    # Prompts' answers stand in turn: 0 and 1 are of one prompt. Three passes of two slots go to 0 and 2.
    from longspan.decoding.rollouts.simulate import _Rank

    rank = _Rank(np.zeros(4), np.zeros(4), np.full(4, 9.0), [0, 2, 1, 3], MEMORY_BOUND, Drafted(2, 2), 2)
    rank.go_on(0.0)
    assert rank.open == [0, 2]
    assert simulate(lengths, drafted=Drafted(2.0, 2), slots=2, samples=2)[0].bubble_tokens == 6


def test_drafts_are_left_alone_where_checking_costs_more_than_it_gains():
    lengths = drawn()
    dear = PassTimes({(1, 1): 1.0, (1, 4): 5.0})
    plain, drafted = simulate(lengths, dear), simulate(lengths, dear, Drafted(2.5, 4))
    assert [s.seconds for s in plain] == [s.seconds for s in drafted]


def test_a_rank_without_sequences_and_a_step_without_any():
    found = simulate([[[], [4]], [[3], []], [[], []]], drafted=Drafted(3.0, 4))
    assert [s.seconds for s in found] == [4.0, 1.0, 0.0]
    assert found[1].drafted_share == 1


def test_times_between_measured_ones():
    times = PassTimes({(1, 1): 1.0, (3, 1): 2.0, (1, 5): 3.0, (3, 5): 4.0})
    assert times(2, 3) == 2.5 and times(1, 1) == 1.0 and times(5, 1) == 3.0
    assert PassTimes({(1, 1): 1.0, (2, 1): 0.5})(32, 1) == 0.5, "noise never makes a pass take no time"
    for bad in ({}, {(1, 1): 1.0, (2, 2): 1.0}, {(1, 1): 0.0}):
        with pytest.raises(ValueError):
            PassTimes(bad)
    for bad in ((0.5, 2, 0.0), (2.0, 0, 0.0), (2.0, 2, 1.0)):
        with pytest.raises(ValueError):
            Drafted(*bad)
