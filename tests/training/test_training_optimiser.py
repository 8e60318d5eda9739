"""Groups of parameters: what decays, and what a module may ask for."""

import pytest
import torch
from torch import nn

from longspan.registry import Refused
from longspan.training import TrainConfig
from longspan.training.optimiser import clip_gradients, make_optimiser, set_learning_rate


class Special(nn.Module):
    optimiser_settings = {"slow": {"lr_scale": 0.1, "weight_decay": 0.0, "clip": 0.5}}

    def __init__(self):
        super().__init__()
        self.slow, self.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))


def group_of(optimiser, parameter):
    return next(g for g in optimiser.param_groups if any(p is parameter for p in g["params"]))


def test_matrices_decay_and_the_rest_does_not():
    model = nn.ModuleList([nn.Linear(2, 3), nn.Embedding(4, 2), Special()])
    model.append(model[0])  # a shared module is taken once
    optimiser = make_optimiser(model, TrainConfig(weight_decay=0.3))
    assert sum(len(g["params"]) for g in optimiser.param_groups) == 5
    decay = {name: group_of(optimiser, p)["weight_decay"] for name, p in model.named_parameters()}
    assert decay == {"0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "2.slow": 0.0, "2.bias": 0.0}
    set_learning_rate(optimiser, 2.0)
    assert group_of(optimiser, model[2].slow)["lr"] == pytest.approx(0.2)
    assert group_of(optimiser, model[0].weight)["lr"] == 2.0


def test_clipping_all_then_a_group_of_its_own():
    model = Special()
    model.slow.grad, model.bias.grad = torch.full((2, 2), 3.0), torch.full((3,), 4.0)
    optimiser = make_optimiser(model, TrainConfig())
    norm = clip_gradients(optimiser, None)
    assert norm == pytest.approx((4 * 9 + 3 * 16) ** 0.5)
    assert model.slow.grad.norm().item() == pytest.approx(0.5, rel=1e-4)
    assert model.bias.grad.tolist() == [4.0] * 3
    clip_gradients(optimiser, 1.0)
    assert torch.cat((model.slow.grad.flatten(), model.bias.grad)).norm().item() <= 1.0 + 1e-5


def test_frozen_models_are_refused():
    with pytest.raises(Refused, match="nothing to train"):
        make_optimiser(nn.Linear(2, 2).requires_grad_(False), TrainConfig())


def test_unknown_settings_are_named():
    model = Special()
    model.optimiser_settings = {"slow": {"learning": 1}}
    with pytest.raises(ValueError, match=r"Special.slow: unknown optimiser setting 'learning'"):
        make_optimiser(model, TrainConfig())
