"""The attention account: why the first hard distractors cost most.

Attention to the gold passage's token competes with T_d distractor tokens, a share p of them hard, and T_o others. With margins
Delta_x = z_gold - z_x between logits and

    a = T_d exp(-Delta_e)    b = T_d exp(-Delta_h)    c = T_o exp(-Delta_o)

it is alpha(p) = 1 / (1 + (1-p) a + p b + c): strictly falling and strictly convex for b > a. Its normalised damage is

    D(p) = p (1+g) / (1 + g p)    with    g = (b - a) / (1 + a + c)

so that the height depends on exp(Delta_e) / T_d and, for a, b >> 1, the shape on b/a = exp(Delta_e - Delta_h) alone. The *ink
index* J is the area between D and the diagonal, 0 for linear damage and below 1/2 always. (arXiv:2605.10828; the form of D for
fits is inferred from the lemma.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.registry import Refused

Floats = NDArray[np.float64]
SMALL = 1e-2
"""Below this g the index is computed by its series, where the closed form would lose digits."""


class Competition(NamedTuple):
    """What the gold token competes with: easy (all distractors weak), hard (all hard) and other tokens."""

    a: float
    b: float
    c: float

    @property
    def g(self) -> float:
        """Curvature of the damage; 0 when hard and weak distractors compete alike."""
        return (self.b - self.a) / (1 + self.a + self.c)

    def alpha(self, p: ArrayLike) -> Floats:
        """Attention to the gold token at share `p`."""
        shares = _shares(p)
        return 1 / (1 + (1 - shares) * self.a + shares * self.b + self.c)

    def curvature(self, p: ArrayLike) -> Floats:
        """Second derivative of `alpha`: 2 (b-a)^2 alpha^3."""
        return 2 * (self.b - self.a) ** 2 * self.alpha(p) ** 3


def competition(delta_e: float, delta_h: float, delta_o: float, distractor_tokens: float, other_tokens: float) -> Competition:
    """From margins (in logits) and numbers of tokens."""
    return Competition(distractor_tokens * float(np.exp(-delta_e)), distractor_tokens * float(np.exp(-delta_h)),
                       other_tokens * float(np.exp(-delta_o)))


def damage(p: ArrayLike, g: ArrayLike) -> Floats:
    """D(p), 0 at p = 0 and 1 at p = 1; `g` > -1 may be an array that broadcasts with `p`."""
    shares, curve = _shares(p), np.asarray(g, dtype=np.float64)
    if not (curve > -1).all():
        raise Refused(f"g={curve}: expected more than -1, such as 10.")
    return shares * (1 + curve) / (1 + curve * shares)


def ink_index(g: ArrayLike) -> Floats:
    """J = (1+g) (1/g - ln(1+g)/g^2) - 1/2, for g >= 0."""
    given = np.asarray(g, dtype=np.float64)
    if not (given >= 0).all():
        raise Refused(f"g={given}: expected at least 0.")
    safe = np.maximum(given, SMALL)
    closed = (1 + safe) * (1 / safe - np.log1p(safe) / safe**2) - 0.5
    series = given / 6 - given**2 / 12 + given**3 / 20 - given**4 / 30
    return np.where(given < SMALL, series, closed)


def g_of_attention(p: float, ratio: float) -> float:
    """The g at which attention to the gold token at share `p` is `ratio` of that at 0."""
    if not (0 < p <= 1 and 0 < ratio <= 1):
        raise Refused(f"p={p}, ratio={ratio}: expected both above 0 and at most 1.")
    return (1 / ratio - 1) / p


def hard_share(p: ArrayLike, gap: float) -> Floats:
    """Share of the distractors' competition that comes from hard ones: p r / (p r + 1 - p) with r = exp(gap)."""
    shares, r = _shares(p), float(np.exp(gap))
    return shares * r / (shares * r + 1 - shares)


def recovered_by_replacing(before: float, after: float, g: float) -> float:
    """Share of the damage at `before` that goes away when hard distractors are replaced until their share is `after`."""
    if not 0 <= after <= before or before == 0:
        raise Refused(f"a share from {before} to {after}: expected one that falls.")
    return float(1 - damage(after, g) / damage(before, g))


def _shares(p: ArrayLike) -> Floats:
    shares = np.asarray(p, dtype=np.float64)
    if not ((shares >= 0) & (shares <= 1)).all():
        raise Refused(f"p={shares}: expected shares of hard distractors from 0 to 1.")
    return shares
