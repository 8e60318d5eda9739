"""Top-p sets of attention rows, and the temperature that makes another metric's sets as large as attention's own.

A query row with logits z needs its Top-p set: the smallest number k* of largest probabilities softmax(z) whose mass
reaches p. A metric g = phi(z) that ranks entries better than raw attention (pooled, or less redundant) is flatter or
sharper than z, so its own Top-p set has another size. *Logits calibration* finds the temperature T at which the k*
largest entries of softmax(g/T) hold the mass p; then the set is again about k* entries large (HARD-KV,
arXiv:2606.28831). Dead entries have logit -inf. A row without live entries has an empty set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

COLDEST, HOTTEST = 1e-3, 10.0
"""Temperatures between which calibration looks."""
HALVINGS = 30
"""Bisections of the log temperature: after these, float32 can't tell the ends of the bracket apart."""
ALIKE, IMPORTANCE = 0.5, 0.07
"""R-KV (arXiv:2505.24133): cosine above which keys repeat each other, and the weight of attention against redundancy."""
ROWS = 256
"""Rows of the key similarity matrix that are held at once."""


def probabilities(logits: Float[Tensor, "... n"], temperature: Float[Tensor, "... 1"] | float = 1.0) -> Float[Tensor, "... n"]:
    """softmax(logits / temperature) in float32; zeros for dead entries, and for rows that are dead altogether."""
    dead = logits == -torch.inf
    # A finite stand-in where all is dead keeps NaN out; NaN in the logits themselves stays visible.
    scaled = (logits.float() / temperature).masked_fill(dead.all(-1, keepdim=True), 0.0)
    return scaled.softmax(-1).masked_fill(dead, 0.0)


def top_p_sizes(logits: Float[Tensor, "... n"], p: float) -> Int[Tensor, " ..."]:
    """k*: how many of the largest probabilities it takes until their mass reaches `p`, for every row.

    An entry is counted while the mass before it is less than p and it has some mass itself, so p = 1 counts all positive
    ones, and any p > 0 at least one. Raises ValueError unless 0 < p <= 1.
    """
    return _leading(_ordered(logits)[0], p).sum(-1)


def top_p_sets(logits: Float[Tensor, "... n"], p: float,
               temperature: Float[Tensor, "... 1"] | float = 1.0) -> Bool[Tensor, "... n"]:
    """The Top-p set of softmax(logits / temperature), for every row; of equal entries the earlier are taken."""
    values, order = _ordered(logits)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, _leading(values, p, temperature))


def calibrate(g: Float[Tensor, "... w n"], k_star: Int[Tensor, "... w"], p: float, *,
              shared: bool = False) -> Tensor:
    """Temperature at which the `k_star` largest entries of softmax(g / T) hold the mass `p`.

    The mass falls as T grows; bisection on log T returns the end of the bracket that still holds p. Where even the lowest
    temperature holds less, because the largest entries tie, that is what is returned. A row so flat that k*/n >= p, and a
    row without live entries, can't be calibrated: T = 1.

    Args:
        g: metric logits, dead entries -inf.
        k_star: size of the Top-p set of each row's attention.
        shared: one temperature (...) from the mean mass over the w rows that can be calibrated, instead of one a row (..., w).
    """
    ordered = _ordered(g)[0]
    can = (k_star > 0) & (k_star < p * (g > -torch.inf).sum(-1))
    last = (k_star - 1).clamp(min=0)[..., None]
    low = torch.full_like(ordered[..., 0, 0] if shared else ordered[..., 0], COLDEST).log()
    high = torch.full_like(low, HOTTEST).log()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        temperature = middle.exp()[..., None, None] if shared else middle.exp()[..., None]
        mass = probabilities(ordered, temperature).cumsum(-1).gather(-1, last)[..., 0]
        if shared:
            mass = (mass * can).sum(-1) / can.sum(-1).clamp(min=1)
        low, high = torch.where(mass >= p, middle, low), torch.where(mass >= p, high, middle)
    return torch.where(can.any(-1) if shared else can, low.exp(), 1.0)


def _ordered(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in descending order, and where they stood; of equal ones the earlier first."""
    if not logits.shape[-1]:
        raise ValueError(f"a row needs at least one entry, got logits {tuple(logits.shape)}")
    values, order = logits.float().sort(dim=-1, descending=True, stable=True)
    return values, order


def _leading(ordered: Tensor, p: float, temperature: Tensor | float = 1.0) -> Bool[Tensor, "... n"]:
    """Which of the entries, in descending order, are in the Top-p set."""
    if not 0 < p <= 1:
        raise ValueError(f"p={p} must lie in (0, 1]")
    probs = probabilities(ordered, temperature)
    if p == 1:  # rounding may bring the mass to 1 before the last small entries
        return probs > 0
    before = F.pad(probs.cumsum(-1)[..., :-1], (1, 0))
    return (before < p) & (probs > 0)


# ---------------------------------------------------------------------------------------------------- metric logits phi


def pooled(z: Float[Tensor, "... n"], kernel: int) -> Float[Tensor, "... n"]:
    """SnapKV's metric: the largest logit among `kernel` (odd) neighbours. Dead entries lend nothing and stay dead."""
    spread = F.max_pool1d(z.reshape(-1, 1, z.shape[-1]), kernel, stride=1, padding=kernel // 2).view(z.shape)
    return spread.masked_fill(z == -torch.inf, -torch.inf)


def less_redundant(z: Float[Tensor, "... w n"], keys: Float[Tensor, "... n D"],
                   live: Bool[Tensor, "... n"]) -> Float[Tensor, "... w n"]:
    """R-KV's metric, as logits: log of attention minus redundancy, shifted to minimum 0 and normalised to sum 1."""
    dead = z == -torch.inf
    u = IMPORTANCE * probabilities(z) - (1 - IMPORTANCE) * redundancy(keys, live)[..., None, :]
    u = (u - u.masked_fill(dead, torch.inf).amin(-1, keepdim=True)).masked_fill(dead, 0.0)
    u = u / u.sum(-1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    return (u + 1e-10).log().masked_fill(dead, -torch.inf)


def redundancy(keys: Float[Tensor, "... n D"], live: Bool[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """softmax over j of the mean over i of cosine(k_i, k_j), where each i forgives the latest j that repeats it.

    The diagonal counts as 0. Entries stand in ascending position; dead ones neither count nor get any.
    """
    n = keys.shape[-2]
    unit = F.normalize(keys.float(), dim=-1)
    total, column = torch.zeros_like(unit[..., 0]), torch.arange(n, device=keys.device)
    for start in range(0, n, ROWS):
        row = column[start : start + ROWS]
        alike = unit[..., row, :] @ unit.mT
        alike = alike.masked_fill((row[:, None] == column) | ~live[..., None, :] | ~live[..., row, None], 0.0)
        latest = torch.where(alike > ALIKE, column, -1).amax(-1, keepdim=True)
        total += alike.masked_fill(column == latest, 0.0).sum(-2)
    mean = total / live.sum(-1, keepdim=True).clamp(min=1)
    return probabilities(mean.masked_fill(~live, -torch.inf))
