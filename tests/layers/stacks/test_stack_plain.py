"""The plain stack: layers in order, each with its own state."""

from dataclasses import dataclass

import torch
from torch import nn

from longspan.layers import Context, MixerState
from longspan.layers.stacks.plain import Plain


@dataclass(eq=False)
class Count(MixerState):
    seen: torch.Tensor


class Scale(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x, ctx, state=None):
        seen = torch.zeros(x.shape[0], dtype=torch.long) if state is None else state.seen
        return x * 10 + self.index, Count(seen + x.shape[1] + self.index)


def test_layers_run_in_order_and_keep_their_states_apart():
    stack = Plain().build(Scale, 3, 4)
    x = torch.ones(2, 5, 4)
    y, state = stack(x, Context.of(2, 5))
    assert y[0, 0, 0] == ((1 * 10 + 0) * 10 + 1) * 10 + 2
    _, state = stack(x[:, :1], Context.of(2, 1), state)
    assert [s.seen.tolist() for s in state.layers] == [[6, 6], [8, 8], [10, 10]]
