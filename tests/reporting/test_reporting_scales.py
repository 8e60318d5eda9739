from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.reporting.scales import linear_ticks, log_ticks, scale

MIB = 2**20


def test_round_ticks() -> None:
    assert linear_ticks(0.13, 0.98, count=5) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert linear_ticks(3 * MIB, 21 * MIB, 1024, 5) == [5 * MIB, 10 * MIB, 15 * MIB, 20 * MIB]
    assert log_ticks(3 * MIB, 40 * MIB, 1024) == [4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]
    assert log_ticks(0.9, 60, count=9) == pytest.approx([1, 2, 5, 10, 20, 50])
    assert log_ticks(1, 2**20, 1024, 5) == [1, 16, 256, 4096, 65536, 2**20]


def test_wide_ranges_become_logarithmic() -> None:
    assert scale([1, 3.9], 0, 100, log=None).log is False
    wide = scale([1, 4], 0, 100, log=None, pad=0)
    assert wide.log and wide(2) == pytest.approx(50)
    assert scale([0, 100], 0, 1, log=None).log is False


def test_a_single_value_and_none_at_all_still_give_a_range() -> None:
    flat = scale([1.0, 1.0], 300, 0, low=0, high=1, least=0.1)
    assert flat.hi == 1 and flat.lo < 0.9 and flat(1.0) == 0
    assert scale([], 0, 10)(0.5) == pytest.approx(5)
    assert scale([5.0], 0, 10)(5.0) == pytest.approx(5)


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=6), st.sampled_from([10.0, 1024.0]), st.booleans())
def test_every_value_and_tick_falls_inside_the_picture(values: list[float], base: float, may_log: bool) -> None:
    found = scale(values, 10, 210, base=base, log=None if may_log else False, low=0)
    assert all(10 - 1e-6 <= found(v) <= 210 + 1e-6 for v in [*values, *found.ticks])
    assert list(found.ticks) == sorted(set(found.ticks)) and len(found.ticks) <= 12
