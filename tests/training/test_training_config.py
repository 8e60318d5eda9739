"""Settings are refused early, and the learning rate follows its curve."""

import math

import pytest

from longspan.registry import Refused
from longspan.training import TrainConfig, learning_rate


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "steps=0: expected a whole number of at least 1"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"lr": 0.0}, "lr=0.0: expected a number above 0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"steps": 5, "warmup": 6}, "warmup=6: expected at most the 5 steps"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "bf16"}, "unknown precision 'bf16'"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0)"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"reach": 1}, "expected segments=2 or more"),
        ({"reach": 1, "segments": 4, "detach_every": 2}, "expected one plan, not two"),
        ({"keep_last": 0}, "keep_last=0"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(Refused) as refused:
        TrainConfig(**bad)
    assert message in str(refused.value)


def test_cosine_with_warmup():
    config = TrainConfig(steps=110, warmup=10, lr=2.0, final_lr=0.1)
    assert [learning_rate(s, config) for s in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert learning_rate(60, config) == pytest.approx(1.1) and learning_rate(110, config) == pytest.approx(0.2)


def test_linear_and_constant():
    linear = TrainConfig(steps=10, lr=1.0, schedule="linear", final_lr=0.0)
    assert [learning_rate(s, linear) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert {learning_rate(s, TrainConfig(steps=10, lr=1.0, schedule="constant")) for s in range(11)} == {1.0}
