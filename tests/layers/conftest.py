"""The contract of `longspan.layers.base`, as checks that any layer module can be put through."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

from longspan.layers import Context, PositionModule

DIM, HEADS, KV_HEADS, HEAD_DIM, TIME = 16, 4, 2, 16, 13
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


def build(method, layer=0, n_layers=2, seed=0, head_dim=HEAD_DIM):
    """A module of `method` at the test size, with weights that are all in use."""
    torch.manual_seed(seed)
    module = method.build(DIM, HEADS, KV_HEADS, head_dim, layer, n_layers).eval()
    with torch.no_grad():
        for p in module.parameters():
            if not p.any():
                p.normal_(std=0.3)
    return module


class Contract:
    """One module with its position scheme, and what every such module promises."""

    def __init__(self, method, position=None):
        self.module = build(method)
        self.position = PositionModule()
        if position is not None:
            self.position = build(position, head_dim=method.rotated(HEAD_DIM))

    def run(self, x, cuts=None, valid=None, segments=None, state=None, before=None, positions=None):
        """Outputs and state after reading `x` in pieces of the lengths `cuts`."""
        out, a = [], 0
        for n in cuts or [x.shape[1]]:
            part = slice(a, a + n)
            piece = [None if t is None else t[:, part] for t in (valid, segments, positions)]
            ctx = Context.of(
                x.shape[0], n, valid=piece[0], segments=piece[1], positions=piece[2], before=before, length=TIME
            )
            ctx = dataclasses.replace(ctx, residual=x[:, part], position=self.position)
            y, state = self.module(x[:, part], ctx, state)
            out.append(y)
            before, a = ctx.after, a + n
        assert a == x.shape[1]
        return torch.cat(out, 1), state, before

    def check_cuts(self):
        """Whole sequence, chunks and single tokens agree, in outputs and gradients."""
        x = inputs(2).requires_grad_()
        parameters = [x, *self.module.parameters()]
        weights = torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(9))

        def outputs_and_gradients(cuts):
            y = self.run(x, cuts)[0]
            grads = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
            return y, [g for g in grads if g is not None]

        whole, whole_grads = outputs_and_gradients(None)
        assert whole.abs().max() > 1e-3
        for cuts in ([1] * TIME, [5, 1, 6, 1], [12, 1]):
            y, grads = outputs_and_gradients(cuts)
            torch.testing.assert_close(y, whole, **TOLERANCE)
            assert len(grads) == len(whole_grads)
            for have, want in zip(grads, whole_grads):
                torch.testing.assert_close(have, want, atol=2e-4, rtol=1e-3)

    def check_padding(self):
        """Padding on the left, in the middle and on the right is as if it weren't there; its own output is 0."""
        x, valid = inputs(3), torch.ones(3, TIME, dtype=torch.bool)
        valid[0, :4] = False
        valid[1, 5:9] = False
        valid[2, -3:] = False
        loud = torch.where(valid[..., None], x, torch.full_like(x, 50.0))
        for cuts in (None, [1] * TIME, [2, 5, 6]):
            y = self.run(loud, cuts, valid=valid)[0]
            assert not y[~valid].any()
            for row in range(3):
                alone = self.run(x[row : row + 1, valid[row]])[0][0]
                torch.testing.assert_close(y[row, valid[row]], alone, **TOLERANCE)

    def check_packed(self):
        """Documents packed into one row equal separate runs, also with padding between and cuts inside."""
        x = inputs(2)
        segments = torch.tensor([[3] * 4 + [1] * 7 + [3] * 2, [0] * 6 + [8] * 7])
        for cuts in (None, [1] * TIME, [3, 5, 5]):
            y = self.run(x, cuts, segments=segments)[0]
            for row, edges in enumerate(([0, 4, 11, 13], [0, 6, 13])):
                for a, b in pairwise(edges):
                    alone = self.run(x[row : row + 1, a:b])[0][0]
                    torch.testing.assert_close(y[row, a:b], alone, **TOLERANCE)
        valid = torch.ones(1, TIME, dtype=torch.bool)
        valid[0, 3:6] = False
        segments = torch.tensor([[0] * 5 + [1] * 8])
        for cuts in (None, [1] * TIME, [4, 9]):
            y = self.run(x[:1], cuts, valid=valid, segments=segments)[0]
            torch.testing.assert_close(y[0, :3], self.run(x[:1, :3])[0][0], **TOLERANCE)
            torch.testing.assert_close(y[0, 6:], self.run(x[:1, 6:])[0][0], **TOLERANCE)

    def check_all_masked(self):
        """A row without any real token gives 0 and finite gradients."""
        x, valid = inputs(2).requires_grad_(), torch.ones(2, TIME, dtype=torch.bool)
        valid[0] = False
        y = self.run(x, valid=valid)[0]
        assert not y[0].any() and y[1].any()
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert grad.isfinite().all() and not grad[0].any()

    def check_causality(self):
        """A later token changes no earlier output."""
        x = inputs(1)
        y = self.run(x)[0]
        x[:, 7:] += 3.0
        torch.testing.assert_close(self.run(x)[0][:, :7], y[:, :7], atol=1e-6, rtol=0)

    def check_state(self):
        """Snapshot and restore, reorder, detach, and bytes."""
        x = inputs(3).requires_grad_()
        _, state, cursor = self.run(x[:, :6])
        snap, (want, _, _) = state.snapshot(), self.run(x[:, 6:], state=state, before=cursor)
        self.run(x[:, 6:] * 2, state=state, before=cursor)
        state.restore(snap)
        assert torch.equal(self.run(x[:, 6:], state=state, before=cursor)[0], want)
        order = torch.tensor([2, 0, 2])
        y = self.run(x[order][:, 6:], [1] * 7, state=state.reorder(order), before=cursor.reorder(order))[0]
        torch.testing.assert_close(y, want[order], **TOLERANCE)
        assert any(t.requires_grad for t in state.tensors())
        assert not any(t.requires_grad for t in state.detach().tensors())
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.tensors()}
        assert state.nbytes == sum(held.values())

    def check_all(self):
        for name in ("cuts", "padding", "packed", "all_masked", "causality", "state"):
            getattr(self, f"check_{name}")()


def inputs(batch, seed=1):
    return torch.randn(batch, TIME, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def contract():
    """Makes the checks for a method: ``contract(method, position).check_all()``."""
    return Contract
