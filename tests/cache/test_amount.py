"""Budgets as users write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.cache.amount import Amount, parse_amount
from longspan.registry import Refused


@pytest.mark.parametrize(("text", "value", "unit"), [
    (0.2, 0.2, "fraction"), (1, 1.0, "fraction"), (1.0, 1.0, "fraction"), ("0.25", 0.25, "fraction"), (" .5 ", 0.5, "fraction"),
    ("512 tokens", 512, "tokens"), ("1token", 1, "tokens"), ("64 MiB", 64 * 2**20, "bytes"), ("64mb", 64e6, "bytes"),
    ("1.5 GiB", 1.5 * 2**30, "bytes"), ("100 B", 100, "bytes"), ("2KB", 2000, "bytes"), ("2 KiB", 2048, "bytes"),
])
def test_reads(text, value, unit):
    assert parse_amount(text) == Amount(value, unit)


@pytest.mark.parametrize(("text", "words"), [
    (0, "a fraction lies in (0, 1]"), (-0.1, "a fraction lies in (0, 1]"), (512, 'did you mean "512 tokens"'),
    (1.5, 'did you mean "1 tokens"'), (math.nan, "a fraction lies in"), (math.inf, "a fraction lies in"),
    (True, "expected a fraction"), (None, "expected a fraction"), ("", "expected a fraction"), ("lots", "expected a fraction"),
    ("-3 tokens", "expected a fraction"), ("0 tokens", "must be positive"), ("0 MiB", "must be positive"),
    ("2.5 tokens", 'did you mean "2 tokens"'), ("0.2 tokens", 'did you mean "1 tokens"'),
    ("5 lightyears", "unknown unit 'lightyears'"), ("512", 'did you mean "512 tokens"'),
    ("9" * 400 + " tokens", "no larger than any memory"), ("1 2", "expected a fraction"), (b"0.2", "expected a fraction"),
])
def test_refuses(text, words):
    with pytest.raises(Refused) as error:
        parse_amount(text)
    assert words in str(error.value)
    assert "budget=" in str(error.value)


@pytest.mark.parametrize(("amount", "length", "kept"), [
    (0.2, 100, 20), (0.29, 100, 29), (0.57, 100, 57), (0.5, 7, 3), (1.0, 7, 7), (0.1, 9, 0), ("5 tokens", 9, 5),
    ("50 tokens", 9, 9), ("100 B", 9, 6), ("1 KiB", 9, 9), ("15 B", 9, 0),
])
def test_tokens(amount, length, kept):
    """Floor of the fraction, never more than there is; 16 bytes a token."""
    assert parse_amount(amount).tokens(length, 16.0) == kept


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1000), st.integers(0, 5000))
def test_a_fraction_never_loses_a_token_to_rounding(thousandths, length):
    assert parse_amount(thousandths / 1000).tokens(length, 1.0) == thousandths * length // 1000
