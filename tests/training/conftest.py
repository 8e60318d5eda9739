"""A tiny model and a tiny task, made anew for every run."""

from __future__ import annotations

import pytest
import torch

from longspan.layers.attention.softmax import Softmax
from longspan.layers.memory.linear import LinearAttention
from longspan.layers.positions.none import NoPositions
from longspan.layers.positions.rope import Rope
from longspan.layers.sidepaths.short_conv import ShortConv
from longspan.layers.stacks.plain import Plain
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.training import Recall

TASK = Recall(pairs=4, queries=2, keys=6, values=5, batch=8)
PARTS = {
    "softmax": {"mixer": Softmax(), "position": Rope()},
    "linear": {"mixer": LinearAttention(gated=True), "position": NoPositions(), "side_path": ShortConv()},
}


def make_model(kind="softmax", seed=0, dropout=0.0, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = DecoderConfig(TASK.vocab_size, dim=16, n_heads=2, dropout=dropout, stack=Plain(), **PARTS[kind])
        return Decoder(config).to(dtype)


@pytest.fixture
def make():
    return make_model


@pytest.fixture
def task():
    return TASK
