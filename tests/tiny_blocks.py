"""A tiny random block-diffusion model, and what the tests of denoising methods do with it."""

from __future__ import annotations

import torch

from longspan.decoding.block_sampler import ONE_A_STEP, Trajectory, denoise
from longspan.decoding.blocks import Denoising, Prefix, read_blocks
from longspan.kernels import attend_reference
from longspan.models.block_diffusion import BlockDiffusion, BlockDiffusionConfig

BLOCK = 8


def tiny_blocks(seed=0, **changes):
    """Two layers, four query heads on two key-value heads; attention matters to what it writes."""
    sizes = {"block": BLOCK, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_dim": 32, "window": 128} | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BlockDiffusion(BlockDiffusionConfig(**sizes)).eval().requires_grad_(False)
        for layer in model.layers:  # sharp scores and a loud attention, so that mistakes show
            layer.q_proj.weight.data *= 4
            layer.o_proj.weight.data *= 3
    return model


def random_ids(rows, length, seed=0):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model, length, rows=1, seed=0):
    """A prefix of random bytes."""
    return read_blocks(model, Prefix.empty(model, rows), random_ids(rows, length, seed))


def masks(model, rows=1, length=BLOCK):
    return torch.full((rows, length), model.config.mask_id)


def record(model, prefix, length=BLOCK, method=None, sampling=ONE_A_STEP):
    trajectory = Trajectory(prefix)
    denoise(model, prefix, masks(model, prefix.rows, length), method or Denoising(), sampling, record=trajectory, finish=False)
    return trajectory


def a_prefix(n, heads=2, width=8, rows=1, layers=1, seed=0, dtype=torch.float32):
    """Random keys and values, without a model."""
    draw = torch.Generator().manual_seed(seed)
    k, v = ([torch.randn(rows, heads, n, width, generator=draw, dtype=dtype) for _ in range(layers)] for _ in range(2))
    return Prefix(k, v)


def queries(t=BLOCK, heads=4, width=8, rows=1, seed=1, dtype=torch.float32):
    return 2 * torch.randn(rows, heads, t, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(prefix, q, layer=0):
    """Attention to the whole prefix by the reference."""
    return attend_reference(q, prefix.k[layer], prefix.v[layer], causal=False)


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)
