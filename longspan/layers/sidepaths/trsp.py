"""TRSP: a causal smoothing path beside attention, whose window doubles from layer to layer (arXiv:2607.20484).

Layer l (from 0) adds to its un-normalised residual stream X

    gamma_l triBox_b(X),   b = min(2^l, L),   W = b + 1,   box_W(X)_t = (1/W) sum_{s = max(0, t-W+1)}^{t} X_s,
    triBox_b(X) = box_W(box_W(X))

with L the length of the text: a triangular kernel of mean lag b that keeps neighbours alike in early layers and spreads
information far in late ones. The divisor is W at the start of a text too. A gate says how much, from the length alone:

    r = b / L,   gamma = sigmoid(w2 . tanh(w1 log2 r + c1) + c2) r^phi,   phi = softplus(kappa)

Its 50 numbers are shared by all layers and are all that is trained. gamma is about 0.5 r^0.69 at the start, not 0.

To go on after a call, a layer remembers its last 2W - 2 inputs. Where the text is known to end before the window does (a
length is declared and 2^l reaches it), the window never slides, and two sums per channel are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.layers.base import SidePath, SidePathModule
from longspan.layers.context import Context
from longspan.layers.sidepaths.line import Line, take
from longspan.layers.sidepaths.triangular import bandwidth, newest_tri_box, tri_box, wide, window_sums
from longspan.layers.state import MixerState
from longspan.registry import Refused, knob, method, nearest

HIDDEN = 16
"""Width of the gate's network."""
LEAST_RATIO = 1e-6
LENGTHS = ("declared", "current")

# --------------------------------------------------------------------------------------------------------------- the gate


def gamma(
    r: Float[Tensor, ""] | float,
    w1: Float[Tensor, " h"],
    c1: Float[Tensor, " h"],
    w2: Float[Tensor, " h"],
    c2: Float[Tensor, ""],
    kappa: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """sigmoid(w2 . tanh(w1 log2 r + c1) + c2) r^softplus(kappa), for r = b / L_ctx clamped to [1e-6, 1]."""
    r = torch.as_tensor(r, dtype=w1.dtype, device=w1.device).clamp(LEAST_RATIO, 1.0)
    opened = (w2 * torch.tanh(w1 * r.log2() + c1)).sum() + c2
    return torch.sigmoid(opened) * r ** F.softplus(kappa)


class LengthGate(nn.Module):
    """The gate of all layers: 50 parameters, computed in float32."""

    def __init__(self, init_bias: float | None = None):
        super().__init__()
        # Drawn aside: a model with the gate has the same other first weights as one without.
        with torch.random.fork_rng(devices=[]):
            self.first, self.second = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, 1)
        self.kappa = nn.Parameter(torch.zeros(()))
        if init_bias is not None:
            nn.init.constant_(self.second.bias, init_bias)

    def forward(self, bandwidth: int, length: int) -> Float[Tensor, ""]:
        """gamma of a layer with this bandwidth in a text of this length."""
        w1, c1, w2, c2, kappa = (wide(p) for p in (
            self.first.weight[:, 0], self.first.bias, self.second.weight[0], self.second.bias[0], self.kappa))
        return gamma(bandwidth / length, w1, c1, w2, c2, kappa)


# ------------------------------------------------------------------------------------------------------------- the module


@dataclass(eq=False)
class TRSPState(MixerState):
    """What a layer remembers of the current document of each row."""

    count: Int[Tensor, " B"]
    """Tokens read."""
    inputs: Float[Tensor, "B K C"] | None = None
    """The last inputs, zeros where there were fewer."""
    sums: tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]] | None = None
    """Instead of inputs: the sum of all, and the sum of the sums up to each token."""


class TRSPModule(SidePathModule):
    """The side path of one layer; reads ``ctx.residual``."""

    def __init__(self, knobs: TRSP, layer: int, gate: LengthGate):
        super().__init__()
        self.knobs, self.layer, self.gate = knobs, layer, gate

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], TRSPState]:
        """gamma triBox(residual), and the state. `Refused` for a text longer than L_ctx."""
        assert (state is None or isinstance(state, TRSPState)) and ctx.after is not None
        if ctx.residual is None or ctx.residual.ndim != 3:
            got = None if ctx.residual is None else tuple(ctx.residual.shape)
            raise ValueError(f"trsp reads the residual stream ctx.residual (B,T,C), got {got}")
        longest = _longest(ctx, None if state is None else state.count)
        fixed = self.knobs.fixed(ctx.length)
        if fixed is not None and longest > fixed and not self.knobs.allow_longer:
            raise Refused(f"{self.knobs}: a text of {longest} tokens, L_ctx={fixed}; expected no more tokens than that, or "
                          'l_ctx="current", or allow_longer=True.')
        length = longest if fixed is None else fixed
        b = bandwidth(self.layer, length)
        ends = fixed is not None and not self.knobs.allow_longer and 2**self.layer >= fixed
        if ends if state is None else state.sums is not None:
            out, state = _never_sliding(ctx, b + 1, longest, state)
        else:
            keep = 2 * (b if fixed is not None else 2**self.layer)
            out, state = _sliding(ctx, b + 1, keep, state)
        return (self.gate(b, length).to(out.device) * out).to(x.dtype), state


def _longest(ctx: Context, before: Int[Tensor, " B"] | None) -> int:
    """Tokens of the longest document that the call reads from, up to its end; at least 1."""
    assert ctx.after is not None
    if ctx.starts is None:
        return max(1, int(ctx.after.count.max()))
    valid = torch.ones_like(ctx.starts) if ctx.valid is None else ctx.valid
    read = valid.cumsum(1)
    count = torch.zeros_like(read[:, 0]) if before is None else before
    begins = torch.where(ctx.starts, read - 1, -count[:, None]).cummax(1).values
    return max(1, int(((read - begins) * valid).max()))


def _sliding(ctx: Context, window: int, keep: int, state: TRSPState | None) -> tuple[Tensor, TRSPState]:
    """From the last inputs, of which `keep` will be remembered."""
    x: Tensor = ctx.residual  # type: ignore[assignment]
    past = x.new_zeros(x.shape[0], 0, x.shape[2]) if state is None else state.inputs
    assert past is not None and ctx.after is not None
    line = Line.of(x, past, ctx)
    if x.shape[1] == 1 and line.valid is None and line.first is None:
        out = newest_tri_box(wide(line.tokens), window)
    else:
        out = tri_box(line.tokens, window, line.first)[:, line.remembered :]
    held = line.tokens.shape[1] if line.valid is None else int(line.end().max())
    return line.back(out), TRSPState(ctx.after.count, line.newest(min(keep, held)))


def _never_sliding(ctx: Context, window: int, longest: int, state: TRSPState | None) -> tuple[Tensor, TRSPState]:
    """From sums over all that was read of the document: both windows still begin at its first token."""
    x: Tensor = ctx.residual  # type: ignore[assignment]
    if longest > window:
        raise ValueError(f"a text of {longest} tokens under a window of {window}, whose inputs weren't remembered since a "
                         "greater length had been declared: declare the same length in every call")
    line = Line.of(x, x.new_zeros(x.shape[0], 0, x.shape[2]), ctx)
    tokens = wide(line.tokens)
    sums = window_sums(tokens, tokens.shape[1], line.first)
    twice = window_sums(sums, tokens.shape[1], line.first)
    if state is not None and state.sums is not None:
        once_before, twice_before = (s[:, None] for s in state.sums)
        steps = torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=tokens.dtype)[:, None]
        added = once_before.expand_as(sums), twice_before + steps * once_before
        if line.documents is not None:
            ours = (line.documents == 0)[..., None]
            added = torch.where(ours, added[0], 0), torch.where(ours, added[1], 0)
        sums, twice = sums + added[0], twice + added[1]
    assert ctx.after is not None
    return line.back(twice / window**2), TRSPState(ctx.after.count, sums=_at_the_end(line, sums, twice, state))


def _at_the_end(line: Line, sums: Tensor, twice: Tensor, state: TRSPState | None) -> tuple[Tensor, Tensor]:
    """Both sums at each row's last real token; what they were where a row read none."""
    last = line.end() - 1
    found = [take(s, last.clamp(min=0))[:, 0] for s in (sums, twice)]
    if line.valid is not None:
        before = [torch.zeros_like(s) for s in found] if state is None or state.sums is None else state.sums
        found = [torch.where(last >= 0, new, old) for new, old in zip(found, before)]
    return found[0], found[1]


# ------------------------------------------------------------------------------------------------------------- the method


@method("trsp", kind="side-path", system="trsp", paper="arXiv:2607.20484", capabilities=("trains",),
        summary="Adds a moving average of the residual stream, with a window that doubles per layer and a gate on the length.")
class TRSP(SidePath):
    """Smooth the residual stream beside attention.

    The gate depends on the length L_ctx. By default that is the declared length of the stream; training, reading in chunks
    and writing then agree. Where none is declared it is the number of tokens read so far, as in the reference
    implementation: text read in pieces then gets another gate than text read at once. A number fixes it for all texts.
    """

    l_ctx: str | int = knob("declared", 'L_ctx: "declared" (else the tokens read), "current" (the tokens read), or a number')
    init_bias: float | str | None = knob(
        None, 'first c2 of the gate; -6 hardly changes a trained model, "-inf" not at all; None: drawn')
    allow_longer: bool = knob(False, "let texts be longer than L_ctx")

    def check(self) -> None:
        _check_length(self)
        _check_bias(self)

    def fixed(self, declared: int | None) -> int | None:
        """L_ctx where it doesn't grow with the text; None where it does."""
        if isinstance(self.l_ctx, int):
            return self.l_ctx
        return declared if self.l_ctx == "declared" else None

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> TRSPModule:
        return TRSPModule(self, layer, self.gate())

    def gate(self) -> LengthGate:
        """A new gate."""
        return LengthGate(None if self.init_bias is None else float(self.init_bias))

    def tie(self, modules: Sequence[TRSPModule]) -> None:
        """One gate for all layers."""
        for module in modules[1:]:
            module.gate = modules[0].gate


def _check_length(knobs: TRSP) -> None:
    """Refuse an ``l_ctx`` that is none of the three."""
    value = knobs.l_ctx
    if isinstance(value, str):
        if value not in LENGTHS:
            raise Refused(f"{knobs.card.name}(l_ctx={value!r}): {nearest(value, LENGTHS, 'choice')} A number is taken too.")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{knobs.card.name}(l_ctx={value!r}): expected a whole number of at least 1, \"declared\" or \"current\".")


def _check_bias(knobs: TRSP) -> None:
    """Refuse an ``init_bias`` that is no number below infinity; -inf is kept as text, which JSON can hold."""
    value = knobs.init_bias
    if value is None:
        return
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number < math.inf or (isinstance(value, str) and math.isfinite(number)):
        raise Refused(f'{knobs.card.name}(init_bias={value!r}): expected a number such as -6, or "-inf".')
    if number == -math.inf:
        object.__setattr__(knobs, "init_bias", "-inf")
