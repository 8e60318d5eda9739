"""What the comparison operators share: they learn inside the decoder, in float32 and half precision, with grouped heads."""

import pytest
import torch

from longspan.layers import Context
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import get

NAMES = ["softmax", "differential", "gated", "selective", "softplus", "performer"]


def decoder(name, **config):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(12, dim=16, n_layers=2, n_heads=2, mixer=name, **config))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_it_learns_a_line(name, autocast):
    model, ids = decoder(name, n_kv_heads=1), torch.randint(12, (4, 25), generator=torch.Generator().manual_seed(0))
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(15):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()))
        optimiser.zero_grad()
        losses[-1].backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_near_single(name):
    module = get(name)().build(16, 4, 2, 8, 1, 2)
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1))
    want, _ = module(x, Context.of(2, 11))
    got, _ = module.bfloat16()(x.bfloat16(), Context.of(2, 11))
    assert got.dtype == torch.bfloat16
    assert (got - want).norm() < 0.1 * want.norm()
