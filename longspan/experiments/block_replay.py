"""What the experiments on block diffusion share: recorded blocks, and methods replayed on their token states.

A model denoises blocks of held-out text greedily, one commit a step, reading the whole prefix; those trajectories are
kept. A method is then run on the very same token states, so that nothing but its attention differs. Compared are the
distributions at masked positions (KL divergence from the dense run's, in nats), and which token it would have committed
where.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from longspan.decoding.block_sampler import ONE_A_STEP, Trajectory, choose, denoise, replay
from longspan.decoding.blocks import BlockReader, Denoising, Prefix, Reads, block_attention, read_blocks
from longspan.evaluation.statistics import mean_interval
from longspan.kernels import attend
from longspan.models import load
from longspan.models.block_diffusion import BlockDiffusion, BlockDiffusionConfig
from longspan.training.block_diffusion import batches

SHORTEST, LONGEST = 128, 224
"""Bytes of the prefixes."""


def the_model(scale: str) -> BlockDiffusion:
    """The trained model; for the smoke scale a small random one."""
    if scale != "smoke":
        return load("block-diffusion", dtype="float32", device="cpu").model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BlockDiffusion(BlockDiffusionConfig(dim=32, n_layers=2, n_kv_heads=2, mlp_dim=32)).eval()


def held_out_prefixes(model: BlockDiffusion, count: int, seed: int = 1) -> Iterator[Prefix]:
    """Prefixes of held-out text, from 128 to 224 bytes in whole blocks; a third of the texts have a planted line."""
    block = model.config.block
    sizes = range(SHORTEST // block, LONGEST // block + 1)
    source = batches(model.config, "held-out", batch=1, seed=seed)
    for index in range(count):
        length = block * sizes[index % len(sizes)]
        yield read_blocks(model, Prefix.empty(model), source(index).ids[:, :length])


def recorded(model: BlockDiffusion, prefix: Prefix) -> Trajectory:
    """A block after `prefix`, denoised densely, greedily, one commit a step."""
    trajectory, block = Trajectory(prefix), model.config.block
    masks = torch.full((prefix.rows, block), model.config.mask_id, device=model.device)
    denoise(model, prefix, masks, Denoising(), ONE_A_STEP, record=trajectory, finish=False)
    return trajectory


@dataclass(frozen=True)
class Compared:
    """One block under one method, against the dense run; means over the steps after the first."""

    kl: float
    agreement: float
    reads: Reads

    @property
    def density(self) -> float:
        return self.reads.density


def compare(model: BlockDiffusion, method: Denoising, trajectory: Trajectory) -> Compared:
    """Replay a method on a recorded block."""
    reads = Reads()
    found = replay(model, method, trajectory, reads=reads)
    kls, same = [], []
    for step, (ids, dense, own) in enumerate(zip(trajectory.states, trajectory.logits, found, strict=True)):
        if step:
            masked = ids == model.config.mask_id
            kls.append(divergence(dense[masked], own[masked]))
            same.append(committed(dense, masked, step) == committed(own, masked, step))
    return Compared(float(np.mean(kls)), float(np.mean(same)), reads)


def divergence(dense: Float[Tensor, "N V"], own: Float[Tensor, "N V"]) -> float:
    """KL(dense || own) in nats, mean over positions."""
    p, q = dense.double().log_softmax(-1), own.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def committed(logits: Float[Tensor, "1 T V"], masked: Tensor, step: int) -> tuple[int, int]:
    """The position and the token that a step with one commit chooses."""
    places = torch.zeros_like(masked, dtype=torch.long)
    tokens, commit = choose(logits, masked, 1, ONE_A_STEP, places, step, [0])
    place = int(commit[0].nonzero()[0, 0])
    return place, int(tokens[0, place])


def over_blocks(model: BlockDiffusion, methods: dict[str, Denoising], trajectories: Sequence[Trajectory],
                progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every method on every block: means with 95 % intervals over blocks, and what was read of the prefixes."""
    rows = []
    for name, method in methods.items():
        progress(name)
        found = [compare(model, method, t) for t in trajectories]
        total = Reads()
        for one in found:
            total.add(one.reads)
        kl, agreement = (mean_interval([getattr(one, what) for one in found]) for what in ("kl", "agreement"))
        rows.append({"method": name, "kl": kl[0], "kl_ci95": kl[1:], "agreement": agreement[0], "agreement_ci95": agreement[1:],
                     "prefix_reads": total.share, "density": float(np.mean([one.density for one in found])),
                     "page_bounds_read": total.bounds, "blocks": len(found)})
    return rows


@dataclass(eq=False)
class Seen:
    """Both parts of attention in every step and layer of a block, and its queries."""

    outside: list[list[Tensor]]
    inside: list[list[Tensor]]
    queries: list[list[Tensor]]


@torch.no_grad()
def watched(model: BlockDiffusion, trajectory: Trajectory) -> Seen:
    """Run a recorded block densely again and note what every layer attends to outside and inside the block."""
    seen = Seen([], [], [])
    reader = Denoising().begin(trajectory.prefix, trajectory.states[0].shape[1], model.config.block)
    plain = block_attention(reader)
    for step, ids in enumerate(trajectory.states):
        reader.begin(step)
        for one in (seen.outside, seen.inside, seen.queries):
            one.append([])

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.outside[-1].append(reader.read(layer, q)[0])
            seen.inside[-1].append(attend(q, k, v, causal=False)[0])
            seen.queries[-1].append(q)
            return plain(layer, q, k, v)

        model(ids, trajectory.prefix.places(ids.shape[1]), attention)
    return seen


def neighbour_cosine(steps: Sequence[Sequence[Tensor]], layer: int) -> float:
    """Mean cosine between a layer's outputs (B,H,T,D) in neighbouring steps, over heads and rows."""
    pairs = itertools.pairwise(steps)
    return float(torch.stack([torch.cosine_similarity(a[layer], b[layer], dim=-1).mean() for a, b in pairs]).mean())


def random_prefix(keys: int, heads: int, size: int, seed: int) -> Prefix:
    """One layer's keys and values, random."""
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, heads, keys, size, generator=draw) for _ in range(2))
    return Prefix([k], [v])


@torch.no_grad()
def layer_seconds(reader: BlockReader, steps: Sequence[tuple[Tensor, Tensor, Tensor]], repeats: int) -> float:
    """Median seconds of one layer's attention to prefix and block, in the steps after the first.

    Args:
        steps: queries, keys and values of a block, step by step.
    """
    attention, found = block_attention(reader), []
    for repeat in range(repeats + 1):
        for step, (q, k, v) in enumerate(steps):
            reader.begin(step if not repeat else max(1, step))
            start = time.perf_counter()
            attention(0, q, k, v)
            if repeat and step:
                found.append(time.perf_counter() - start)
    return statistics.median(found)
