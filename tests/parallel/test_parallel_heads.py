"""The order of heads: a bijection, with every query at its key, keys exchanged once."""

from __future__ import annotations

import pytest

from longspan.parallel.heads import Deal
from longspan.registry import Refused

VALID = [(h, k, p, u) for h in (4, 8, 12, 16, 24) for k in range(1, h + 1) if h % k == 0 for p in (1, 2, 3, 4, 6, 8)
         if h % p == 0 and (k % p == 0 or p % k == 0) for u in range(p, h + 1, p) if h % u == 0]


def deals():
    for numbers in VALID:
        try:
            yield Deal(*numbers)
        except Refused as refusal:
            assert "neither divides nor is a multiple" in str(refusal), numbers


def test_many_are_dealt():
    assert sum(1 for _ in deals()) > 100


def test_the_order_is_a_bijection_and_queries_meet_their_keys():
    for deal in deals():
        assert sorted(deal.order()) == list(range(deal.heads)), deal
        for stage in range(deal.stages):
            round = stage // deal.stages_per_round
            for own, keys, sources in zip(deal.queries(stage), deal.keys(round), deal.sources(round), strict=True):
                assert len(own) == deal.per_rank and len(keys) == deal.keys_per_rank
                share = len(own) // len(keys)  # attention reads key i // share with query i
                for i, head in enumerate(own):
                    assert keys[i // share] == head // deal.group, (deal, stage)
                    assert sources[i // share] == head // (deal.heads // deal.kv_heads), (deal, stage)


def test_every_key_head_travels_once():
    for deal in deals():
        dealt = [head for round in range(deal.rounds) for own in deal.keys(round) for head in own]
        assert sorted(dealt) == list(range(deal.effective)), deal
        assert deal.rounds * deal.stages_per_round == deal.stages


@pytest.mark.parametrize("kv_heads", [16, 8, 4])
def test_one_head_a_rank_follows_the_published_rule(kv_heads):
    """kv(t,r) = (t // g) P + r and q(t,r) = kv g + t % g."""
    deal = Deal(16, kv_heads, 4, 4)
    g = 16 // kv_heads
    for t in range(deal.stages):
        assert deal.queries(t) == [[((t // g) * 4 + r) * g + t % g] for r in range(4)]


def test_two_key_heads_a_rank_are_two_rounds():
    """The case that a wrong order of groups fails while all others pass: H=16, Hkv=4, P=2."""
    deal = Deal(16, 4, 2, 2)
    assert [deal.keys(r) for r in range(deal.rounds)] == [[[0], [1]], [[2], [3]]]
    assert deal.order() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert Deal(16, 4, 2, 4).order() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_all_heads_in_one_stage_stand_in_their_own_order():
    assert all(d.order() == list(range(d.heads)) for d in deals() if d.stage == d.heads)


@pytest.mark.parametrize("numbers, words", [
    ((9, 3, 2, 2), r"H=9 .* over P=2 ranks.*P=1"),
    ((12, 3, 2, 2), r"Hkv=3 key heads neither divide over P=2.*P=1"),
    ((16, 4, 4, 6), r"U=6 .* P=4 ranks; expected U=4"),
    ((16, 4, 2, 6), r"H=16 .* stages of U=6; expected U=4"),
    ((16, 4, 2, 32), r"U=32 .* more than H=16"),
    ((16, 3, 2, 2), r"H=16 .* Hkv=3 groups; expected a multiple, such as 18"),
    ((12, 4, 2, 4), r"u=2 .* g=3 that share.*expected U=2"),
    ((16, 0, 2, 2), r"Hkv=0.*at least 1"),
])
def test_numbers_that_do_not_divide_are_refused_by_name(numbers, words):
    with pytest.raises(Refused, match=words):
        Deal(*numbers)
