"""Exact verification: which proposed tokens stand, so that what is written follows the target's law.

With p_1 … p_{g+1} the target's laws after each proposed token, three rules give that law whatever was proposed:

- ``match``: draw z_k from p_k with keyed noise; tokens stand while z_k is the proposed one, and the first other z_k is
  written in its place. What is written is what would be written without drafts, token for token.
- ``point-mass``: a proposal x stands with probability p(x), else a token is drawn from p without x.
- ``reject``: x, drawn from a law q that is known, stands with probability min(1, p(x)/q(x)), else a token is drawn from
  max(p - q, 0), normalised (speculative sampling, arXiv:2211.17192).

If all stand, one more token is drawn from p_{g+1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.decoding.law import pick
from longspan.decoding.noise import Noise

RULES = ("match", "point-mass", "reject")


@dataclass(frozen=True)
class Verdict:
    """What one round writes: the accepted proposals, then one token more."""

    tokens: tuple[int, ...]
    accepted: int


def verify(p: Float[Tensor, "g+1 V"], proposed: Sequence[int], noise: Noise, position: int, *, rule: str = "match",
           q: Float[Tensor, "g V"] | None = None) -> Verdict:
    """Judge the tokens `proposed` for the places from `position` on.

    Args:
        p: the target's laws, float64: after what stands, after the first proposal, and so on.
        q: the laws the proposals were drawn from; needed by ``reject``.

    Raises:
        ValueError: shapes that don't fit, laws that don't sum to 1, or a proposal to which its own law gives 0.
    """
    _check(p, proposed, rule, q)
    for k, x in enumerate(proposed):
        stands, instead = _judge(p[k], x, None if q is None else q[k], noise, position + k, rule)
        if not stands:
            return Verdict((*proposed[:k], instead), k)
    return Verdict((*proposed, pick(p[-1], noise, position + len(proposed))), len(proposed))


def verify_greedy(logits: Float[Tensor, "g+1 V"], proposed: Sequence[int]) -> Verdict:
    """What every rule comes to where the law is greedy: tokens stand while they are the likeliest. No laws are made."""
    likeliest = logits.argmax(-1).tolist()
    n = next((k for k, x in enumerate(proposed) if x != likeliest[k]), len(proposed))
    return Verdict((*proposed[:n], likeliest[n]), n)


def _judge(p: Float[Tensor, " V"], x: int, q: Float[Tensor, " V"] | None, noise: Noise, at: int, rule: str) -> tuple[bool, int]:
    """Whether x stands at place `at`, and what is written there."""
    if rule == "match":
        drawn = pick(p, noise, at)
        return drawn == x, drawn
    if rule == "point-mass":
        stands, rest = noise.uniform(at) < float(p[x]), _without(p, x)
    else:
        assert q is not None
        stands, rest = noise.uniform(at) * float(q[x]) < float(p[x]), (p - q).clamp(min=0)
    return stands, x if stands else _other(p, rest, noise, at)


def _without(p: Tensor, x: int) -> Tensor:
    rest = p.clone()
    rest[x] = 0.0
    return rest


def _other(p: Tensor, rest: Tensor, noise: Noise, at: int) -> int:
    """A draw from what is left; from p where rounding left nothing."""
    total = rest.sum()
    return pick(rest / total if float(total) > 0 else p, noise.of("rest"), at)


def _check(p: Tensor, proposed: Sequence[int], rule: str, q: Tensor | None) -> None:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: expected one of {', '.join(RULES)}")
    if p.ndim != 2 or len(p) != len(proposed) + 1:
        raise ValueError(f"{len(proposed)} proposals need laws of {len(proposed) + 1} rows, got {tuple(p.shape)}")
    if proposed and not (min(proposed) >= 0 and max(proposed) < p.shape[1]):
        raise ValueError(f"proposed tokens {list(proposed)} are not all of the vocabulary of {p.shape[1]}")
    if rule != "reject":
        return
    if q is None or q.shape != (len(proposed), p.shape[1]):
        raise ValueError(f"rule 'reject' needs q of shape {(len(proposed), p.shape[1])}, got "
                         f"{None if q is None else tuple(q.shape)}")
    if len(q) and not torch.allclose(q.sum(-1), torch.ones_like(q[:, 0]), atol=1e-6):
        raise ValueError("q is not normalised: its rows must sum to 1")
    for k, x in enumerate(proposed):
        if not float(q[k, x]) > 0:
            raise ValueError(f"token {x} was proposed, but its own law gives it probability 0")
