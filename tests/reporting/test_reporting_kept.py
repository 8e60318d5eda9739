from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.reporting.kept import kept_mask, kept_payload


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_masks_come_back_as_they_were(layers: int, heads: int, n: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((layers, heads, n)) < 0.4
    payload = json.loads(json.dumps(kept_payload(["t"] * n, [("a", mask), ("b", ~mask)])))
    assert (kept_mask(payload, "a") == mask).all() and (kept_mask(payload, "b") == ~mask).all()
    assert (payload["layers"], payload["heads"]) == (layers, heads)


def test_bits_are_lowest_first_and_every_head_begins_a_byte() -> None:
    mask = np.zeros((1, 2, 9), dtype=bool)
    mask[0, 0, [0, 8]] = True
    mask[0, 1, 1] = True
    payload = kept_payload(list("abcdefghi"), [("x", mask)])
    assert base64.b64decode(payload["recipes"][0]["bits"]) == bytes([1, 1, 2, 0])


def test_a_long_prompt_stays_small() -> None:
    mask = np.random.default_rng(0).random((30, 3, 4000)) < 0.2
    assert len(kept_payload(["w"] * 4000, [("x", mask)])["recipes"][0]["bits"]) == 4 * 90 * 500 // 3


def test_numbers_0_and_1_are_taken_as_no_and_yes() -> None:
    payload = kept_payload(["a", "b"], [("x", [[[1, 0]]])], spans=[("needle", 1, 2)], title="t")
    assert kept_mask(payload, "x").tolist() == [[[True, False]]]
    assert payload["spans"] == [["needle", 1, 2]] and payload["title"] == "t"


def test_what_does_not_belong_together_is_an_error() -> None:
    two = np.ones((1, 1, 2), dtype=bool)
    with pytest.raises(ValueError, match=r"'x' has shape \(1, 1, 2\); expected \(layers, heads, 3 tokens\)"):
        kept_payload(["a", "b", "c"], [("x", two)])
    with pytest.raises(ValueError, match=r"\(2, 1, 2\), the recipe before it \(1, 1, 2\)"):
        kept_payload(["a", "b"], [("x", two), ("y", np.ones((2, 1, 2), dtype=bool))])
    with pytest.raises(ValueError, match="other than true and false"):
        kept_payload(["a", "b"], [("x", 0.5 * two)])
    with pytest.raises(ValueError, match="span 'n' is"):
        kept_payload(["a", "b"], [("x", two)], spans=[("n", 1, 3)])
    with pytest.raises(ValueError, match="at least one recipe"):
        kept_payload(["a"], [])
    with pytest.raises(KeyError):
        kept_mask(kept_payload(["a", "b"], [("x", two)]), "y")
