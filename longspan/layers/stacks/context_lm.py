"""ContextLM: a decoder that also predicts what the next few tokens will be about (arXiv:2510.20280).

The n layers are split into a token encoder E (the first a) and a token decoder Dec. Between the two stands a coarse stream:

    h = E(x);   c_k = mean of h over the tokens kw .. kw + w - 1   (the context embedding of chunk k)
    chat_k = P(c_start, c_0 .. c_{k-1})                            (its prediction, from the chunks before it)
    u_t = h_t + chat_{kappa(t)},   kappa(t) = floor((t + lead) / w);   y = Dec(u)

P is a causal model of the backbone's layers with positions 0, 1, .. of its own. With lead 1 a token gets the chunk of the
token after it, which it has to predict; with lead 0 its own chunk. Both need no chunk that isn't complete at t, so
training, chunked prefill and decoding agree; P runs once in w tokens. Nothing but the token loss trains P. Its output ends
in a norm and a projection that starts at a tenth of the usual size, so that training starts near the backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.layers.base import Stack, StackModule
from longspan.layers.context import Context, Cursor
from longspan.layers.stacks.chunks import even_chunks, ragged_chunks, wide
from longspan.layers.state import MixerState
from longspan.registry import Refused, knob, method

START_STD, OUTPUT_SCALE = 0.02, 0.1
COSINE = "contextlm-cosine"
"""Reported for each call in which a chunk ends: mean cosine of a context embedding and its prediction."""


@dataclass(eq=False)
class PredictorState(MixerState):
    """What P remembers of the entries it read: where the rows stand, and the states of its layers."""

    cursor: Cursor
    layers: tuple[MixerState, ...]


@dataclass(eq=False)
class ContextLMState(MixerState):
    """The states of E, Dec and P, and the running chunk of each row."""

    layers: tuple[MixerState, ...]
    predictor: PredictorState | None
    """None until a row has a first token."""
    chat: Float[Tensor, "B C"]
    """P's newest prediction."""
    total: Float[Tensor, "B C"]
    """Sum over the tokens of the running chunk."""
    fill: int | Int[Tensor, " B"]
    """How many there are, 0 to w - 1: one number while all rows stand at the same place."""


class Add(nn.Module):
    """u = h + chat."""

    def forward(self, h: Float[Tensor, "B T C"], chat: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        return h + chat


class Concat(nn.Module):
    """u = W [h; chat] + h. W starts as [0, I], where it is the sum."""

    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Linear(2 * dim, dim, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.cat((torch.zeros(dim, dim), torch.eye(dim)), 1))

    def forward(self, h: Float[Tensor, "B T C"], chat: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        return self.proj(torch.cat((h, chat), -1)) + h


FUSIONS: dict[str, Callable[[int], nn.Module]] = {"add": lambda dim: Add(), "concat": Concat}


class Predictor(nn.Module):
    """P: layers over the entries of each row, one for a document's start and one for each complete chunk."""

    def __init__(self, layers: Sequence[nn.Module], dim: int):
        super().__init__()
        self.start = nn.Parameter(torch.randn(dim) * START_STD)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.proj = nn.Linear(dim, dim, bias=False)
        with torch.no_grad():
            self.proj.weight.mul_(OUTPUT_SCALE)

    def forward(
        self,
        entries: Float[Tensor, "B M C"],
        length: int | None,
        state: PredictorState | None,
        valid: Bool[Tensor, "B M"] | None = None,
        starts: Bool[Tensor, "B M"] | None = None,
    ) -> tuple[Float[Tensor, "B M C"], PredictorState, Context]:
        """Predictions made after each entry; `starts` says which begin a document, where rows hold several.

        `length` is the number of entries declared, for layers that depend on it.
        """
        before = None if state is None else state.cursor
        segments = None
        if starts is not None:
            segments = starts.long().cumsum(1)
            segments = segments if before is None else before.segment[:, None] + segments
        B, M = entries.shape[:2]
        ctx = Context.of(B, M, valid=valid, segments=segments, before=before, length=length, device=entries.device)
        x, after = entries, []
        for index, layer in enumerate(self.layers):
            x, new = layer(x, ctx, None if state is None else state.layers[index])
            after.append(new)
        assert ctx.after is not None
        return self.proj(self.norm(x)), PredictorState(ctx.after, tuple(after)), ctx


class ContextLMModule(StackModule):
    """E, P and Dec. `fusion` may be replaced: it alone sees the predictions."""

    def __init__(self, knobs: ContextLM, make_layer: Callable[[int], nn.Module], n_layers: int, dim: int):
        super().__init__()
        self.w, self.lead, self.encoder = knobs.w, knobs.lead, knobs.encoder_layers(n_layers)
        # The backbone comes first, so that a seed gives it the weights that it gives the plain stack.
        self.layers = nn.ModuleList(make_layer(index) for index in range(n_layers))
        own = [make_layer(min(index, n_layers - 1)) for index in range(knobs.predictor)]
        self.predictor = Predictor(own, dim)
        self.fusion = FUSIONS[knobs.fuse](dim)
        self.reading = nn.RMSNorm(dim, eps=1e-6) if knobs.normalise else nn.Identity()
        # Weights are of use at these settings only, which their shapes don't tell: they go where the weights go.
        self.register_buffer("settings", torch.tensor([self.w, self.lead, self.encoder]))
        self.register_load_state_dict_pre_hook(_refuse_other_settings)

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], ContextLMState]:
        """Raises ValueError for a call without tokens, FloatingPointError when the encoder gives NaN."""
        assert state is None or isinstance(state, ContextLMState)
        if not x.shape[1]:
            raise ValueError(f"contextlm reads at least one token in a call, got {tuple(x.shape)}")
        held = [None] * len(self.layers) if state is None else state.layers
        after: list[MixerState] = []

        def through(part: slice, x: Tensor) -> Tensor:
            for layer, own in zip(self.layers[part], held[part]):  # type: ignore[arg-type]
                x, new = layer(x, ctx, own)
                after.append(new)
            return x

        h = through(slice(None, self.encoder), x)
        even = ctx.valid is None and ctx.starts is None and (state is None or isinstance(state.fill, int))
        chat, rest = (self._even if even else self._ragged)(h, ctx, state)
        y = through(slice(self.encoder, None), self.fusion(h, chat))
        return y, ContextLMState(tuple(after), *rest)

    def _even(self, h: Tensor, ctx: Context, state: ContextLMState | None) -> tuple[Tensor, tuple]:
        """Each token's prediction where all rows stand at the same place; and the state's last four fields."""
        (B, T, C), w = h.shape, self.w
        read = self._checked(self.reading(h))
        total, fill = (read.new_zeros(B, C, dtype=wide(read)), 0) if state is None else (state.total, int(state.fill))
        means, running = even_chunks(read, w, total, fill)
        entries, held = means.to(h.dtype), None if state is None else state.predictor
        if state is None:
            entries = torch.cat((self.predictor.start.to(h.dtype).expand(B, 1, C), entries), 1)
        found = [] if state is None else [state.chat[:, None]]
        if entries.shape[1]:
            made, held = self._predict(entries, ctx, held)
            found.append(made)
        chats = torch.cat(found, 1)
        if means.shape[1]:
            self._report(ctx, chats[:, :-1], means)
        at = fill + self.lead
        spread = chats[:, :, None].expand(-1, -1, w, -1).reshape(B, -1, C)[:, at : at + T]
        newest = chats[:, -1].clone()  # a view would keep them all
        return spread, (held, newest, running, (fill + T) % w)

    def _ragged(self, h: Tensor, ctx: Context, state: ContextLMState | None) -> tuple[Tensor, tuple]:
        """The same with padding and documents: every row has chunks of its own."""
        B, T, C = h.shape
        real = torch.ones(B, T, dtype=torch.bool, device=h.device) if ctx.valid is None else ctx.valid
        starts = real & (ctx.order == 0) if ctx.starts is None else ctx.starts
        read = self._checked(self.reading(h).masked_fill(~real[..., None], 0.0))
        if state is None:
            held, chat, total = None, h.new_zeros(B, C), read.new_zeros(B, C, dtype=wide(read))
        else:
            held, chat, total = state.predictor, state.chat, state.total
        fill = torch.as_tensor(0 if state is None else state.fill, device=h.device).expand(B)
        found = ragged_chunks(read, self.w, real, starts, total, fill)
        chats = chat[:, None]
        if found.means.shape[1]:
            entries = torch.where(found.starts[..., None], self.predictor.start, found.means).to(h.dtype)
            documents = None if ctx.segments is None else found.starts
            made, held = self._predict(entries, ctx, held, found.valid, documents)
            chats = torch.cat((chats, made), 1)
            ends = found.valid & ~found.starts
            if bool(ends.any()):
                self._report(ctx, chats[:, :-1][ends], found.means[ends])
        index = found.after if self.lead else found.before
        spread, newest = (chats.gather(1, i[..., None].expand(-1, -1, C)) for i in (index, found.after[:, -1:]))
        return spread, (held, newest[:, 0], found.total, found.fill)

    def _checked(self, h: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        if bool(h.isnan().any()):
            raise FloatingPointError("contextlm: the token encoder gave NaN, which would stay in every later prediction.")
        return h

    def _predict(self, entries: Tensor, ctx: Context, state: PredictorState | None, valid: Tensor | None = None,
                 starts: Tensor | None = None) -> tuple[Tensor, PredictorState]:
        """P's predictions, in the type of its entries; what its layers report for themselves is passed on."""
        length = None if ctx.length is None else ctx.length // self.w + 1
        chats, after, own = self.predictor(entries, length, state, valid, starts)
        for name, terms in own.auxiliary.items():
            for term in terms:
                if not term.ndim:  # a term for each entry has no place among those for each token
                    ctx.report(name, term)
        return chats.to(entries.dtype), after

    @torch.no_grad()
    def _report(self, ctx: Context, chats: Float[Tensor, "*K C"], means: Float[Tensor, "*K C"]) -> None:
        ctx.report(COSINE, F.cosine_similarity(chats.to(means.dtype), means, dim=-1).mean())


def _refuse_other_settings(module: Any, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    given = state_dict.get(f"{prefix}settings")
    if given is None:  # weights of a plain stack, to start from
        return
    for name, had, has in zip(("w", "lead", "a"), given.tolist(), (module.w, module.lead, module.encoder)):
        if had != has:
            raise Refused(f"contextlm({name}={has}): these weights were trained with {name}={had}; expected the same.")


@method("contextlm", kind="stack", system="contextlm", paper="arXiv:2510.20280",
        summary="Every few tokens, a small model predicts the mean state of the next ones and adds it to the decoder's input.")
class ContextLM(Stack):
    """A token encoder, a predictor over chunks of tokens, and a token decoder."""

    w: int = knob(4, "tokens of a chunk", low=1)
    a: int | None = knob(None, "layers of the token encoder; None for half of them", low=1)
    predictor: int = knob(2, "layers of the chunk predictor, beside the model's own", low=1)
    lead: int = knob(1, "give a token the chunk of the token this far ahead", low=0, high=1)
    fuse: str = knob("add", "how a prediction joins the token's state", choices=tuple(FUSIONS))
    normalise: bool = knob(False, "pool states of unit root mean square (times learned weights) instead of raw ones")

    def encoder_layers(self, n_layers: int) -> int:
        """a for a model of `n_layers`. `Refused` unless encoder and decoder have at least one each."""
        if n_layers < 2:
            raise Refused(f"{self} with {n_layers} layer: an encoder and a decoder need one each; expected at least 2 layers.")
        a = n_layers // 2 if self.a is None else self.a
        if a >= n_layers:
            raise Refused(f"contextlm(a={a}): a model of {n_layers} layers has at most {n_layers - 1} for its token encoder; "
                          f"expected a={n_layers - 1} or less.")
        return a

    def build(self, make_layer: Callable[[int], nn.Module], n_layers: int, dim: int) -> ContextLMModule:
        return ContextLMModule(self, make_layer, n_layers, dim)
