"""Gradients through segments: full, cut in blocks, and sliding, each against autograd on the objective written out."""

import pytest
import torch

from longspan.training import Batch, Tally, backward
from longspan.training.next_token import NextToken

SEGMENTS = 4


def text_batch(model):
    ids = torch.randint(model.config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:, :-1], ids[:, 1:])


def gradients(model, batch, **plan):
    model.zero_grad()
    tally = Tally()
    backward(model, NextToken(), batch, tally, **plan)
    return {n: p.grad.clone() / tally.weight for n, p in model.named_parameters() if p.grad is not None}, tally


def by_hand(model, batch, first_of):
    """sum_i loss_i / count, where piece i is read from a detached state before piece ``first_of(i)``."""
    model.zero_grad()
    pieces, total = batch.pieces(SEGMENTS), 0.0
    for i, piece in enumerate(pieces):
        first = first_of(i)
        with torch.no_grad():
            state = None
            for early in pieces[:first]:
                state = model(early.ids, state=state).state
        for early in pieces[first:i]:
            state = model(early.ids, state=state).state
        logits = model(piece.ids, state=state).logits
        total = total + torch.nn.functional.cross_entropy(logits.mT, piece.labels, reduction="sum")
    (total / batch.labels.numel()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(have, want):
    assert have.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(have[name], want[name], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_never_detached_is_full_backpropagation(make, kind):
    model = make(kind, dtype=torch.float64)
    batch = text_batch(model)
    whole, one = gradients(model, batch)
    got, cut = gradients(model, batch, segments=SEGMENTS, detach_every=0)
    assert_same(got, whole)
    assert cut.means() == pytest.approx(one.means()) and cut.tokens == one.tokens == 24


@pytest.mark.parametrize("k", [1, 2, 3])
def test_blocks_equal_the_detached_objective(make, k):
    model = make("linear", dtype=torch.float64)
    batch = text_batch(model)
    got, _ = gradients(model, batch, segments=SEGMENTS, detach_every=k)
    assert_same(got, by_hand(model, batch, lambda i: i // k * k))
    assert any((got[n] - w).abs().max() > 1e-6 for n, w in gradients(model, batch)[0].items())


@pytest.mark.parametrize("reach", [0, 1, 2, 3, 9])
def test_sliding_equals_the_detached_objective(make, reach):
    model = make("linear", dtype=torch.float64)
    batch = text_batch(model)
    got, tally = gradients(model, batch, segments=SEGMENTS, reach=reach)
    assert_same(got, by_hand(model, batch, lambda i: max(0, i - reach)))
    assert tally.tokens == 24
    if reach == 0:
        assert_same(got, gradients(model, batch, segments=SEGMENTS, detach_every=1)[0])
    if reach >= SEGMENTS - 1:
        assert_same(got, gradients(model, batch)[0])


def test_an_objective_without_state_cannot_be_cut(make):
    def stateless(model, batch, state):
        outcome = NextToken()(model, batch)
        return type(outcome)(outcome.loss, outcome.weight)

    model = make()
    with pytest.raises(ValueError, match="needs an objective that returns the model's state"):
        backward(model, stateless, text_batch(model), Tally(), segments=2)
