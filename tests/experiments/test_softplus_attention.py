"""The dilution test's own formulas against the operator."""

import pytest
import torch

from longspan.experiments.softplus_attention import ROWS, dilution, ours, row, without


def test_the_formula_with_nothing_left_out_is_the_operator():
    for seed in range(3):
        c = row(500, 64, 0.6, seed)
        torch.testing.assert_close(without("nothing", 3.0)(c, 64), ours(3.0)(c, 64), atol=1e-6, rtol=1e-4)


def test_rows_of_cosines_are_as_told():
    c = row(20000, 64, 0.6, 0)
    assert c[0, 0] == pytest.approx(0.6) and c[0, 1:].std() == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(c, row(20000, 64, 0.6, 0)) and not torch.equal(c, row(20000, 64, 0.6, 1))


@pytest.mark.parametrize("name", ROWS)
def test_a_lone_key_has_all_the_mass(name):
    weights, width, cosine = ROWS[name]
    assert dilution(weights, width, cosine, 1, 2).tolist() == pytest.approx([1.0, 1.0])
