"""How much of the available information a predictor uses.

The score of a slot is the divergence of the predicted normal distribution from the exact one, in which x_t itself isn't
drawn:

    KL = 1/2 (log(var/var*) + (var* + (mu - mu*)^2)/var - 1)

averaged over held-out sequences. Everything else is a ratio of sums of it:

    utilisation of a token       U(t) = 1 - KL_t / A_t           where the past says something (A_t > 0), else NaN
    utilisation of a level       U_h  = 1 - sum KL / sum A       over its owned slots: use of what lies 2^(h-1) back
    across a cut                 U_BP = I_hat / I_BP,  I_hat(l) = I_BP(l) - KL of slots after l with a source before it

1 is perfect, 0 no better than knowing nothing; it can be negative. With several copies a half (r > 1) a slot may have
sources on both sides of a cut; then I_hat(l) = I_BP(l) - (KL of all slots after l - KL of a reading that starts at l).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.evaluation.lcube.plan import LCube
from longspan.evaluation.lcube.references import Predict
from longspan.evaluation.lcube.truth import Prediction, Seen, available, bipartite, conditional, owned, past, variances
from longspan.evaluation.statistics import mean_interval
from longspan.registry import Refused

LEAST_UTILISED = 0.9


def check_prediction(found: Prediction, shape: Sequence[int]) -> None:
    """`Refused` unless mu and var have `shape` and are finite, and var is above 0."""
    for name, part in found._asdict().items():
        if tuple(part.shape) != tuple(shape):
            raise Refused(f"l-cube: {name} has shape {tuple(part.shape)}; expected {tuple(shape)}, one number for each slot.")
        odd = int((~part.isfinite()).sum())
        if odd:
            raise Refused(f"l-cube: {name} holds {odd} values that are not finite; expected numbers only.")
    if bool((found.var <= 0).any()):
        raise Refused(f"l-cube: var={float(found.var.min()):g}; expected variances above 0, such as exp(log var).")


def divergence(truth: Prediction, found: Prediction) -> Float[Tensor, "B T D"]:
    """KL of every slot, in float64 and nats."""
    check_prediction(found, truth.mu.shape)
    mu, var = (part.double() for part in truth)
    off = (mu - found.mu.double()).square()
    there = found.var.double()
    return 0.5 * ((there / var).log() + (var + off) / there - 1.0)


def nll(found: Prediction, x: Float[Tensor, "B T D"]) -> Float[Tensor, " B"]:
    """Negative log-likelihood of every sequence, in float64 and nats."""
    check_prediction(found, x.shape)
    mu, var = (part.double() for part in found)
    return 0.5 * ((2.0 * math.pi * var).log() + (x.double() - mu).square() / var).sum((1, 2))


def expected_divergence(plan: LCube, seen: Seen) -> Float[Tensor, "L D"]:
    """The mean KL over all sequences of the exact rule on a part of the past: 1/2 log(var_seen / var*), in nats."""
    return 0.5 * (variances(plan, seen) / variances(plan)).log()


@dataclass(frozen=True, eq=False)
class Scores:
    """What a predictor's divergences say."""

    plan: LCube
    kl: Float[Tensor, "L D"]
    """Mean over sequences."""
    of_sequences: Float[Tensor, " B"] | None = None
    """Utilisation of each sequence, whose spread gives the interval."""
    truncated: Mapping[int, float] = field(default_factory=dict)
    """Summed mean KL of a reading that starts at a cut, by cut; needed for r > 1 alone."""

    @cached_property
    def utilisation(self) -> Float[Tensor, " L"]:
        """U(t); NaN where A_t = 0."""
        there = available(self.plan)
        return torch.where(there > 0, 1.0 - self.kl.sum(1) / there, math.nan)

    @property
    def overall(self) -> float:
        """1 - sum KL_t / sum A_t over the tokens whose past says something."""
        there = available(self.plan)
        return float(1.0 - self.kl.sum(1)[there > 0].sum() / there.sum())

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of `overall` over sequences; None without them."""
        return None if self.of_sequences is None else mean_interval(self.of_sequences.tolist())[1:]

    @cached_property
    def levels(self) -> Float[Tensor, " H"]:
        """U_h of the levels 1 .. H; NaN for levels that aren't in use."""
        mask, slots = owned(self.plan), -0.5 * variances(self.plan).log()
        there = slots.sum(0)
        return torch.where(there > 0, 1.0 - (self.kl * mask).sum(0) / there, math.nan)

    @cached_property
    def cuts(self) -> Float[Tensor, " cuts"]:
        """U_BP at the cuts 1 .. L-1; NaN where nothing crosses, and for r > 1 where no reading started."""
        return self._extracted / bipartite(self.plan)

    @cached_property
    def _extracted(self) -> Float[Tensor, " cuts"]:
        there = bipartite(self.plan)
        if self.plan.r > 1:
            tails = self.kl.sum(1).flip(0).cumsum(0).flip(0)
            found = [float(tails[cut]) - self.truncated.get(cut, math.nan) for cut in range(1, self.plan.length)]
            return there - torch.tensor(found, dtype=torch.float64)
        # The right slot of a pair (u, v) counts at the cuts u < l <= v.
        times, loss = self.plan.times, self.kl.flatten()[self.plan.members[:, 1]]
        steps = torch.zeros(self.plan.length + 1, dtype=torch.float64)
        steps.index_add_(0, times[:, 0] + 1, loss).index_add_(0, times[:, 1] + 1, -loss)
        return there - steps.cumsum(0)[1:-1]

    def extracted(self, cut: int) -> float:
        """I_hat: nats about what follows `cut` that the predictor takes from what stands before it.

        Raises `Refused` for a cut outside the sequence, and for r > 1 where no reading started at the cut.
        """
        self.plan.check_cut(cut)
        if self.plan.r > 1 and cut not in self.truncated:
            raise Refused(f"l-cube: cut={cut} with r={self.plan.r}: no reading started there; expected it among the cuts that "
                          f"score was given, {sorted(self.truncated)}.")
        return float(self._extracted[cut - 1])

    def across(self, cut: int | None = None) -> float:
        """U_BP at `cut`; None for the middle."""
        cut = self.plan.length // 2 if cut is None else cut
        return self.extracted(cut) / float(bipartite(self.plan)[cut - 1])

    def carried(self, cut: int | None = None) -> float:
        """I_hat / I_pair: how many pairs' values the predictor carries across `cut` (None: the middle)."""
        return self.extracted(self.plan.length // 2 if cut is None else cut) / self.plan.pair_information

    def report(self) -> dict[str, Any]:
        """Plain numbers; None stands for what isn't defined."""
        return {
            "length": self.plan.length,
            "utilisation": self.overall,
            "interval": None if self.interval is None else list(self.interval),
            "levels": {2 ** (h - 1): _plain(u) for h, u in enumerate(self.levels.tolist(), 1)},
            "across the middle": self.across(),
            "information across the middle": float(bipartite(self.plan)[self.plan.length // 2 - 1]),
            "pairs carried": self.carried(),
            "pairs across the middle": self.plan.latents(self.plan.H),
        }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def score(
    plan: LCube, predict: Predict, x: Float[Tensor, "B L D"], *, rows: int = 64, cuts: Sequence[int] | None = None
) -> Scores:
    """Judge a predictor on the sequences `x`, `rows` at a time.

    `cuts` matter for r > 1, where each needs a reading of its own (None: the middle). Raises `Refused` for sequences of
    another shape and for predictions that aren't distributions.
    """
    plan.check_sequences(x)
    wanted = [] if plan.r == 1 else [plan.check_cut(cut) for cut in ([plan.length // 2] if cuts is None else cuts)]
    there = available(plan)
    informed, total = there > 0, float(there.sum())
    kl, of_sequences = torch.zeros(plan.length, plan.H, dtype=torch.float64), []
    truncated = dict.fromkeys(wanted, 0.0)
    for part in x.split(rows):
        found = divergence(conditional(plan, part), predict(part, 0)).cpu()
        kl += found.sum(0)
        of_sequences.append(1.0 - found[:, informed].sum((1, 2)) / total)
        for cut in wanted:
            truth = conditional(plan, part, past(plan, cut))
            begun = Prediction(truth.mu[:, cut:], truth.var[:, cut:])
            truncated[cut] += float(divergence(begun, predict(part, cut)).sum()) / len(x)
    return Scores(plan, kl / len(x), torch.cat(of_sequences), truncated)


def utilised_length(across: Mapping[int, float], least: float = LEAST_UTILISED) -> int | None:
    """The largest length whose U_BP is at least `least`; None if there is none. `across` gives U_BP by trained length."""
    return max((length for length, found in across.items() if found >= least), default=None)
