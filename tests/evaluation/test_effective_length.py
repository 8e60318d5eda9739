import pytest

from longspan.evaluation.effective_length import (
    RULER_THRESHOLD,
    base_score,
    effective_length,
    nolima_effective_length,
)


def test_effective_length_ends_at_the_first_failure():
    assert effective_length({1024: 1.0, 2048: 0.9, 4096: 0.6, 8192: 0.95}, 0.85) == 2048
    assert effective_length({1024: 0.5}, 0.85) is None
    assert effective_length({4096: RULER_THRESHOLD, 8192: 0.855}) == 4096  # the threshold itself counts
    assert effective_length({}) is None


def test_base_score_is_the_mean_of_each_pairs_best_short_length():
    pairs = {"France": {250: 0.8, 500: 1.0, 1000: 0.6, 2000: 1.0}, "Japan": {250: 0.4, 1000: 0.2}, "long only": {4000: 0.9}}
    assert base_score(pairs) == pytest.approx((1.0 + 0.4) / 2)
    with pytest.raises(ValueError, match="250, 500, 1000"):
        base_score({"long only": {4000: 0.9}})


def test_nolima_length_keeps_85_per_cent_of_the_base_score():
    # The row of Llama 3.3 70B in NoLiMa's table: base score 97.3, effective length 2K.
    llama = {1000: 0.942, 2000: 0.874, 4000: 0.815, 8000: 0.721}
    assert nolima_effective_length(llama, 0.973) == 2000
    # That of Jamba 1.5 Mini: below the threshold at 1K already; short lengths don't count.
    assert nolima_effective_length({250: 0.93, 500: 0.92, 1000: 0.763, 2000: 0.741}, 0.924) is None
