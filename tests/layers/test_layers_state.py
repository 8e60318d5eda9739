"""States of any shape: nested, with tuples, numbers and None."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from longspan.layers import MixerState


@dataclass(eq=False)
class Leaf(MixerState):
    x: Tensor
    count: int = 0


@dataclass(eq=False)
class Tree(MixerState):
    leaves: tuple
    extra: Tensor | None = None
    named: dict = field(default_factory=dict)


def tree():
    return Tree((Leaf(torch.arange(6.0).view(3, 2), 5), None), named={"a": torch.arange(3)})


def test_reorder_reaches_every_tensor_and_leaves_the_rest():
    got = tree().reorder(torch.tensor([2, 0]))
    assert got.leaves[0].x.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert got.named["a"].tolist() == [2, 0]
    assert got.leaves[0].count == 5 and got.leaves[1] is None and got.extra is None


def test_restore_undoes_changes_at_any_depth_and_can_be_repeated():
    state = tree()
    snap = state.snapshot()
    for _ in range(2):
        state.leaves[0].x = torch.zeros(1)
        state.leaves[0].count = 9
        state.extra = torch.ones(2)
        state.restore(snap)
        assert state.leaves[0].x.shape == (3, 2) and state.leaves[0].count == 5 and state.extra is None


def test_restore_refuses_another_kind():
    with pytest.raises(ValueError, match="Leaf can't be restored from a Tree"):
        Leaf(torch.ones(1)).restore(tree().snapshot())


def test_bytes_count_whole_storages_once():
    base = torch.zeros(10, dtype=torch.float32)
    state = Tree((Leaf(base[:2]), Leaf(base[5:])), extra=torch.zeros(3, dtype=torch.int64))
    assert state.nbytes == 40 + 24
    assert Leaf(torch.zeros(0)).nbytes == 0


def test_detach_cuts_the_graph():
    x = torch.ones(2, requires_grad=True)
    state = Leaf(x * 2)
    assert state.x.requires_grad and not state.detach().x.requires_grad
