"""Positions, order, documents and cursors against a loop over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.layers import Context


def by_hand(valid, segments):
    """(order, position, document, start) of every token of one row, from the definition."""
    rows, order, position, document, last = [], -1, -1, -1, None
    for real, segment in zip(valid, segments):
        start = False
        if real:
            order += 1
            start = last is None or segment != last
            position, document = (0, document + 1) if start else (position + 1, document)
            last = segment
        rows.append((order, max(position, 0), max(document, 0), start))
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=12), st.data())
def test_any_padding_documents_and_cuts(tokens, data):
    valid, segments = torch.tensor([[v for v, _ in tokens]]), torch.tensor([[s for _, s in tokens]])
    cut = data.draw(st.integers(0, len(tokens)))
    before, rows = None, []
    for part in (slice(0, cut), slice(cut, None)):
        ctx = Context.of(1, valid[:, part].shape[1], valid=valid[:, part], segments=segments[:, part], before=before)
        rows += list(zip(*(t[0].tolist() for t in (ctx.order, ctx.positions, ctx.segments, ctx.starts))))
        before = ctx.after
    want = by_hand(*zip(*tokens))
    assert rows == want
    assert before.total.item() == want[-1][0] + 1
    assert before.documents.item() == sum(start for *_, start in want)


def test_without_padding_rows_share_one_line_of_positions():
    ctx = Context.of(3, 5)
    assert ctx.positions.stride(0) == 0 and ctx.positions[2].tolist() == [0, 1, 2, 3, 4]
    assert ctx.valid is ctx.segments is ctx.starts is None
    assert Context.of(3, 2, before=ctx.after).positions.tolist() == [[5, 6]] * 3


def test_left_padding_counts_real_tokens_only():
    valid = torch.tensor([[False, False, True, True]])
    ctx = Context.of(1, 4, valid=valid)
    assert ctx.positions.tolist() == [[0, 0, 0, 1]] and ctx.after.total.tolist() == [2]


def test_without_segments_a_packed_row_goes_on_with_its_document():
    first = Context.of(1, 3, segments=torch.tensor([[4, 7, 7]]))
    then = Context.of(1, 2, before=first.after)
    assert then.positions.tolist() == [[2, 3]] and then.segments.tolist() == [[1, 1]] and not then.starts.any()


def test_segments_that_come_later_start_at_zero():
    first = Context.of(1, 3)
    same = Context.of(1, 2, segments=torch.tensor([[0, 5]]), before=first.after)
    assert same.segments.tolist() == [[0, 1]] and same.positions.tolist() == [[3, 0]]


def test_given_positions_are_taken_as_they_are():
    places = torch.tensor([[0.0, 0.5, 9.0]])
    assert torch.equal(Context.of(1, 3, positions=places).positions, places)


def test_reported_terms_are_shared_by_copies():
    import dataclasses

    ctx = Context.of(1, 1)
    dataclasses.replace(ctx, length=3).report("rate", torch.tensor(1.0))
    assert len(ctx.auxiliary["rate"]) == 1


@pytest.mark.parametrize("bad", [{"valid": torch.ones(2, 3, dtype=torch.bool)}, {"segments": torch.zeros(1, 4).long()}])
def test_wrong_shapes_are_named(bad):
    with pytest.raises(ValueError, match=rf"{next(iter(bad))} should have shape \(1, 3\)"):
        Context.of(1, 3, **bad)


def test_numbers_are_no_mask():
    with pytest.raises(ValueError, match="Boolean"):
        Context.of(1, 2, valid=torch.ones(1, 2))
