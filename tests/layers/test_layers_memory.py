"""Parts that keep the fused kernel: nowhere in a training step is there a matrix of all pairs of tokens."""

import pytest
import torch

from longspan.layers import choose
from longspan.layers.attention.softplus import Softplus
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.training.peak import PeakMemory

TIME = 1024
FUSED = {
    "softmax": {},
    "sink": {"mixer": choose({"name": "softmax", "knobs": {"sink": True}}, "mixer")},
    "goat": {"mixer": choose({"name": "goat", "knobs": {"R": 1}}, "mixer")},
    "gated": {"mixer": "gated"},
    "differential": {"mixer": "differential"},
    "trsp": {"side_path": "trsp"},
    "repo": {"position": "repo"},
    "contextlm": {"stack": "contextlm"},
}


def largest(**parts):
    """Elements of the largest tensor that a training step makes, embeddings and head left out."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(8, dim=16, n_layers=2, n_heads=2, **parts))
    x = torch.randn(1, TIME, 16, requires_grad=True)
    with PeakMemory() as seen:
        model(embeds=x).logits.square().mean().backward()
    assert x.grad.abs().sum() > 0
    return seen.largest


@pytest.mark.parametrize("parts", FUSED.values(), ids=FUSED)
def test_no_matrix_of_all_pairs(parts):
    assert largest(**parts) < TIME * TIME


def test_the_count_would_notice_one():
    assert largest(mixer=Softplus()) >= TIME * TIME
