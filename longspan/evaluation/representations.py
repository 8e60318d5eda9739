"""How alike a layer's representations are, and how far a disturbance travels: diagnostics of collapse (arXiv:2607.20484).

Pure functions of a layer's residual stream. Everything is computed in float32, or float64 for float64 input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

MOST_TOKENS, NOISE, LEAST = 1000, 1e-3, 1e-6
"""Tokens that `anisotropy` compares at most; the noise on embeddings that `propagation` is meant for; the least change of
an input that counts."""


def singular_values(x: Float[Tensor, "*shape D"]) -> Float[Tensor, " n"]:
    """Of the tokens as rows of one matrix (N,D), not centred; the largest first."""
    return torch.linalg.svdvals(_rows(x))


def stable_rank(x: Float[Tensor, "*shape D"]) -> float:
    """sum sigma^2 / sigma_max^2: 1 when all tokens are multiples of one another, at most min(N,D); 0 for zeros."""
    sigma = singular_values(x)
    return 0.0 if not float(sigma[0]) else float((sigma / sigma[0]).square().sum())


def spectral_flatness(x: Float[Tensor, "*shape D"]) -> float:
    """Geometric over arithmetic mean of the singular values: 1 when all are equal, 0 when one is 0."""
    sigma = singular_values(x)
    return 0.0 if not float(sigma[-1]) else float(sigma.log().mean().exp() / sigma.mean())


def anisotropy(x: Float[Tensor, "*shape D"], seed: int = 0) -> float:
    """Mean cosine between two different tokens, of at most 1,000 drawn with `seed`. ValueError for a single token."""
    rows = _rows(x)
    if len(rows) < 2:
        raise ValueError(f"cosines between tokens need at least two of them, got {len(rows)}")
    if len(rows) > MOST_TOKENS:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:MOST_TOKENS]
        rows = rows[chosen.to(rows.device)]
    n, unit = len(rows), F.normalize(rows, dim=-1)
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1)))


def propagation(
    inputs: Float[Tensor, "*shape D"],
    disturbed_inputs: Float[Tensor, "*shape D"],
    outputs: Float[Tensor, "*shape E"],
    disturbed_outputs: Float[Tensor, "*shape E"],
) -> float:
    """SPR: mean over tokens of |change of the output| / |change of the input|, tokens that hardly changed left out.

    The published figure disturbs the embeddings by 1e-3 N(0,1). NaN when no input changed by more than 1e-6.
    """
    given = (_rows(disturbed_inputs) - _rows(inputs)).norm(dim=-1)
    found = (_rows(disturbed_outputs) - _rows(outputs)).norm(dim=-1)
    counted = given > LEAST
    return float((found[counted] / given[counted]).mean())


def _rows(x: Tensor) -> Tensor:
    rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
    return rows if rows.dtype == torch.float64 else rows.float()
