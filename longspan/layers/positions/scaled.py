"""Rotary positions stretched beyond the length a model was trained for.

- ``position-interpolation``: every place is divided by the factor (arXiv:2306.15595).
- ``ntk``: the base grows instead, so that fast pairs keep their pace and the slowest one is divided by the factor
  (``theta' = theta * factor^(d/(d-2))``).
- ``yarn``: pairs that turn often within the trained length keep their pace, pairs that turn less than once are divided by
  the factor, those between are mixed, and the rotation grows by ``0.1 ln(factor) + 1`` (arXiv:2309.00071, section 3.4).

In a recipe they change a pretrained model while it runs (``yarn(factor=4) + full``); as ``--position`` they serve decoders
trained here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.layers.base import Position, PositionModule
from longspan.layers.positions.base import inverse_frequencies
from longspan.layers.positions.rope import RopeModule
from longspan.registry import Refused, knob, method

TRAINED_HERE = 128
"""Positions of a decoder trained here, where nothing is said: the default of ``longspan train --context``."""


class ScaledRopeModule(RopeModule):
    """Rotation by given frequencies; queries and keys grow by `scale`."""

    def __init__(self, inv_freq: Float[Tensor, " half"], scale: float):
        super().__init__(inv_freq)
        self.scale = scale

    def rotate(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, places)
        return (q, k) if self.scale == 1 else (q * self.scale, k * self.scale)


class ScaledRope(Position):
    """Base of the three: subclasses say in `stretched` what becomes of the frequencies."""

    hooks = frozenset({"rotate"})
    factor: float
    theta: float
    original: int | None

    def stretched(self, inv_freq: Float[Tensor, " half"], theta: float, original: int) -> tuple[Float[Tensor, " half"], float]:
        """New frequencies (float64) and the growth of cosine and sine, for a model of `original` positions."""
        raise NotImplementedError

    def build(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int
    ) -> PositionModule:
        original = TRAINED_HERE if self.original is None else self.original
        return ScaledRopeModule(*self.stretched(inverse_frequencies(head_dim, self.theta), self.theta, original))

    def window(self, native: int) -> int:
        """Positions that a model made for `native` ones serves with this scaling."""
        return int((self.original or native) * self.factor)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Run a pretrained model with stretched positions until the block ends.

        Raises:
            Refused: the model has no rotary positions, or scales them already.
        """
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        rotaries: list[Any] = [m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]
        if not rotaries:
            raise Refused(f"{self}: {type(model).__name__} has no rotary positions to stretch; leave it out.")
        parameters = getattr(config, "rope_parameters", None) or {}
        kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta", getattr(config, "rope_theta", None))
        if kind != "default" or theta is None:
            raise Refused(f"{self}: {type(model).__name__} scales its positions already ({kind}); leave it out.")
        original = self.original or int(config.max_position_embeddings)
        before = [(m, m.inv_freq, m.attention_scaling) for m in rotaries]
        try:
            for m in rotaries:
                frequencies, scale = self.stretched(m.inv_freq.double(), float(theta), original)
                m.inv_freq, m.attention_scaling = frequencies.to(m.inv_freq), scale
            yield
        finally:
            for m, inv_freq, scale in before:
                m.inv_freq, m.attention_scaling = inv_freq, scale


@method("position-interpolation", kind="position", paper="arXiv:2306.15595",
        summary="Rotary positions with every place divided by a factor.")
class PositionInterpolation(ScaledRope):
    """Squeeze all places into the trained range."""

    factor: float = knob(4.0, "how many times longer the text may be", low=1.0)
    theta: float = knob(10_000.0, "base of the frequencies of a decoder trained here; a pretrained model has its own", low=1.0)
    original: int | None = knob(None, "positions the model was made for; those in its config, or 128 here, if left out", low=1)

    def stretched(self, inv_freq: Float[Tensor, " half"], theta: float, original: int) -> tuple[Float[Tensor, " half"], float]:
        return inv_freq / self.factor, 1.0


@method("ntk", kind="position", paper="arXiv:2309.00071", summary="Rotary positions with a larger base, so that fast pairs stay.")
class Ntk(ScaledRope):
    """NTK-aware interpolation: the slowest pair is divided by the factor, the fastest is untouched."""

    factor: float = knob(4.0, "how many times longer the text may be", low=1.0)
    theta: float = knob(10_000.0, "base of the frequencies of a decoder trained here; a pretrained model has its own", low=1.0)
    original: int | None = knob(None, "positions the model was made for; those in its config, or 128 here, if left out", low=1)

    def stretched(self, inv_freq: Float[Tensor, " half"], theta: float, original: int) -> tuple[Float[Tensor, " half"], float]:
        d = 2 * len(inv_freq)
        if d == 2:
            return inv_freq / self.factor, 1.0
        steps = torch.arange(0, d, 2, dtype=torch.float64, device=inv_freq.device)
        return (theta * self.factor ** (d / (d - 2))) ** (-steps / d), 1.0


@method("yarn", kind="position", paper="arXiv:2309.00071",
        summary="Rotary positions stretched pair by pair, by how often each turns.")
class Yarn(ScaledRope):
    """NTK-by-parts and a growing attention factor."""

    factor: float = knob(4.0, "how many times longer the text may be", low=1.0)
    beta_fast: float = knob(32.0, "pairs that turn more often within the trained length keep their pace", low=0.0)
    beta_slow: float = knob(1.0, "pairs that turn less often are divided by the factor", low=0.0)
    theta: float = knob(10_000.0, "base of the frequencies of a decoder trained here; a pretrained model has its own", low=1.0)
    original: int | None = knob(None, "positions the model was made for; those in its config, or 128 here, if left out", low=1)

    def check(self) -> None:
        if self.beta_fast <= self.beta_slow:
            raise Refused(f"{self}: expected beta_fast above beta_slow={self.beta_slow}.")

    def stretched(self, inv_freq: Float[Tensor, " half"], theta: float, original: int) -> tuple[Float[Tensor, " half"], float]:
        half = len(inv_freq)

        def pair(turns: float) -> float:
            """The pair, counted from the fastest, that turns this often within `original` tokens."""
            return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), 2 * half - 1)
        place = torch.arange(half, dtype=torch.float64, device=inv_freq.device)
        slow = ((place - low) / max(high - low, 1e-3)).clamp(0, 1)
        growth = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return inv_freq / self.factor * slow + inv_freq * (1 - slow), growth


__all__ = ["Ntk", "PositionInterpolation", "ScaledRope", "Yarn"]
