"""The small trainable decoder: any mixer, position scheme, side path and stack, trained from scratch in minutes.

A pre-norm decoder in the Llama manner (RMSNorm, SwiGLU, no biases, output head tied to the embedding):

    x = embed(ids);  x <- stack of layers;  logits = head(norm(x))
    layer:  x <- x + Mixer(norm(x)) [+ SidePath(norm(x))];   x <- x + W_2 (silu(W_1 norm(x)) * W_3 norm(x))

It keeps the promise of its parts: whole sequences, chunks and single tokens give the same logits, padding and other
documents in a row change nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Real
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from longspan.layers import Context, Cursor, Mixer, MixerState, Position, SidePath, Stack, choose, to_json
from longspan.registry import Refused, nearest

PARTS = {"mixer": "mixer", "position": "position", "side_path": "side-path", "stack": "stack"}
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and parts of a decoder. Parts may be given as methods or by name.

    Without a position scheme it is the mixer's usual one: ``rope`` for most that rotate queries and keys, else none.
    """

    vocab_size: int
    dim: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    mixer: Mixer | str = "softmax"
    position: Position | str | None = None
    side_path: SidePath | str | None = None
    stack: Stack | str = "plain"
    dropout: float = 0.0
    tie_head: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("vocab_size", "dim", "n_layers", "n_heads"):
            _at_least_one(name, getattr(self, name))
        if self.head_dim is None and self.dim % self.n_heads:
            raise Refused(f"dim={self.dim}: expected a multiple of n_heads={self.n_heads}, or head_dim given.")
        sizes = {"n_kv_heads": self.n_heads, "head_dim": self.dim // self.n_heads, "mlp_dim": _multiple_of_8(self.dim)}
        for name, usual in sizes.items():
            value = getattr(self, name)
            set_(self, name, usual if value is None else _at_least_one(name, value))
        if self.n_heads % self.n_kv_heads:  # type: ignore[operator]
            raise Refused(f"n_kv_heads={self.n_kv_heads}: expected a divisor of n_heads={self.n_heads}.")
        if not 0.0 <= self.dropout < 1.0:
            raise Refused(f"dropout={self.dropout}: expected a share from 0 up to, not including, 1.")
        set_(self, "mixer", choose(self.mixer, "mixer"))
        default = self.mixer.usual_position or ("rope" if "rotate" in self.mixer.positions else "nope")  # type: ignore[union-attr]
        for name, kind in PARTS.items():
            value = default if name == "position" and self.position is None else getattr(self, name)
            set_(self, name, None if value is None else choose(value, kind))
        unused = self.position.hooks - self.mixer.positions  # type: ignore[union-attr]
        if unused:
            rotates = "rotate" in self.mixer.positions  # type: ignore[union-attr]
            fits = "one that rotates, such as 'rope', or 'nope'" if rotates else "'nope'"
            raise Refused(
                f"position={self.position}: {self.mixer} takes no {' and no '.join(sorted(unused))} from a position "
                f"scheme; expected {fits}."
            )

    def as_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return found | {name: None if found[name] is None else to_json(found[name]) for name in PARTS}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The config that `as_json` wrote. Raises `Refused` for unknown entries, knobs or methods."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in data:
            if name not in names:
                raise Refused(f"decoder config: {nearest(name, names, 'entry')}")
        parts = {name: choose(data[name], kind) for name, kind in PARTS.items() if data.get(name) is not None}
        return cls(**(data | parts))


def _multiple_of_8(dim: int) -> int:
    """The usual hidden width of a gated MLP, 8/3 of the model's, in whole vectors."""
    return math.ceil(dim / 3) * 8


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{name}={value!r}: expected a whole number of at least 1.")
    return value


@dataclass(eq=False)
class LayerState(MixerState):
    """What one layer remembers."""

    mixer: MixerState
    side: MixerState | None


@dataclass(eq=False)
class DecoderState(MixerState):
    """What the decoder remembers of the tokens read: where each row stands, and the states of its parts."""

    cursor: Cursor
    stack: MixerState


@dataclass(frozen=True, eq=False)
class DecoderOutput:
    """Logits of the positions asked for, the normalised residual stream of all, the state, and the call's context."""

    logits: Float[Tensor, "B N V"]
    hidden: Float[Tensor, "B T C"]
    state: DecoderState
    ctx: Context


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x) (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """One pre-norm layer with its residual connections."""

    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        shape = (config.dim, config.n_heads, config.n_kv_heads, config.head_dim, index, config.n_layers)
        self.mixer_norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.mixer = config.mixer.build(*shape)  # type: ignore[union-attr, arg-type]
        turned = config.mixer.rotated(config.head_dim)  # type: ignore[union-attr, arg-type]
        self.position = config.position.build(*shape[:3], turned, *shape[4:])  # type: ignore[union-attr, arg-type]
        self.side_path = config.side_path.build(*shape) if config.side_path else None  # type: ignore[union-attr, arg-type]
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.mlp = SwiGLU(config.dim, config.mlp_dim)  # type: ignore[arg-type]
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], LayerState]:
        assert state is None or isinstance(state, LayerState)
        here = dataclasses.replace(ctx, residual=x, position=self.position)
        normed = self.mixer_norm(x)
        mixed, mixer_state = self.mixer(normed, here, None if state is None else state.mixer)
        side_state = None
        added = self.dropout(mixed)
        if self.side_path is not None:
            side, side_state = self.side_path(normed, here, None if state is None else state.side)
            added = added + side
        x = x + added
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x, LayerState(mixer_state, side_state)


class Decoder(nn.Module):
    """A decoder language model over `config.vocab_size` tokens."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        layers: list[DecoderLayer] = []

        def make_layer(index: int) -> DecoderLayer:
            layers.append(DecoderLayer(config, index))
            return layers[-1]

        self.stack = config.stack.build(make_layer, config.n_layers, config.dim)  # type: ignore[union-attr]
        for name in ("mixer", "position", "side_path"):
            part = getattr(config, name)
            if part is not None:
                part.tie([getattr(layer, name) for layer in layers])
        self.norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.head = None if config.tie_head else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        ids: Int[Tensor, "B T"] | None = None,
        *,
        embeds: Float[Tensor, "B T C"] | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        positions: Real[Tensor, "B T"] | None = None,
        length: int | None = None,
        state: DecoderState | None = None,
        keep: int | None = None,
    ) -> DecoderOutput:
        """Read tokens, continuing at `state`; logits predict the token after each one.

        Give either token `ids` or `embeds`. `valid`, `segments`, `positions` and `length` are those of `Context.of`.
        ``keep=n`` computes the logits of the last n positions only (0 for none). Raises ValueError on shapes that don't
        fit and on an empty call.
        """
        if (ids is None) == (embeds is None):
            raise ValueError("forward takes either ids or embeds")
        given = ids if ids is not None else embeds
        assert given is not None
        if given.ndim != (2 if embeds is None else 3) or not given.shape[1]:
            raise ValueError(f"forward takes ids (B,T) or embeds (B,T,C) with T >= 1, got {tuple(given.shape)}")
        x = self.embed(ids) if embeds is None else embeds
        ctx = Context.of(
            x.shape[0],
            x.shape[1],
            valid=valid,
            segments=segments,
            positions=positions,
            before=None if state is None else state.cursor,
            length=length,
            device=x.device,
        )
        x, stack_state = self.stack(x, ctx, None if state is None else state.stack)
        hidden = self.norm(x)
        assert ctx.after is not None
        kept = hidden if keep is None else hidden[:, hidden.shape[1] - keep :]
        return DecoderOutput(self.logits(kept), hidden, DecoderState(ctx.after, stack_state), ctx)

    def logits(self, hidden: Float[Tensor, "B T C"]) -> Float[Tensor, "B T V"]:
        """The output head on normalised hidden states."""
        return F.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "B T"],
        max_new_tokens: int,
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        temperature: float = 0.0,
        end: int | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
    ) -> Int[Tensor, "B N"]:
        """Continue each row: read the prompt (in chunks if asked), then one token at a time with states.

        `temperature` 0 takes the likeliest token. A row that wrote `end` is filled with it; all rows done ends early.
        Raises ValueError for a row without a real token. Padding may stand anywhere in the prompt.
        """
        if valid is not None and not bool(valid.any(1).all()):
            raise ValueError("generate needs at least one real token in every row")
        if not ids.shape[1] or max_new_tokens < 0 or (chunk is not None and chunk < 1):
            raise ValueError("generate needs a prompt of at least one token, max_new_tokens of at least 0 and chunks of at least "
                             f"1, got {tuple(ids.shape)}, {max_new_tokens} and {chunk}")
        was_training = self.training
        self.eval()
        try:
            last, state = self._read(ids, valid, chunk)
            tokens: list[Tensor] = []
            done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
            for _ in range(max_new_tokens):
                if tokens:
                    real = None if end is None else ~done[:, None]
                    out = self(tokens[-1][:, None], valid=real, state=state, keep=0)
                    last, state = out.hidden[:, 0], out.state
                token = _sample(self.logits(last), temperature, generator)
                if end is not None:
                    token = token.masked_fill(done, end)
                    done = done | (token == end)
                tokens.append(token)
                if end is not None and bool(done.all()):
                    break
        finally:
            self.train(was_training)
        return torch.stack(tokens, 1) if tokens else ids.new_empty(ids.shape[0], 0)

    def _read(self, ids: Tensor, valid: Tensor | None, chunk: int | None) -> tuple[Tensor, DecoderState]:
        """The hidden state of every row's last real token, and the state after the prompt."""
        step, state, last = chunk or ids.shape[1], None, None
        for a in range(0, ids.shape[1], step):
            real = None if valid is None else valid[:, a : a + step]
            out = self(ids[:, a : a + step], valid=real, state=state, keep=0)
            state, newest = out.state, out.hidden[:, -1]
            if real is not None:
                where = torch.arange(1, real.shape[1] + 1, device=ids.device) * real
                newest = out.hidden[torch.arange(len(ids), device=ids.device), where.argmax(1)]
                newest = newest if last is None else torch.where(real.any(1)[:, None], newest, last)
            last = newest
        if state is None or last is None:
            raise ValueError("generate needs a prompt of at least one token")
        return last, state

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json`` into `folder`, which is made if missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self, str(folder / WEIGHTS_FILE))
        (folder / CONFIG_FILE).write_text(json.dumps(self.config.as_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str | None = None) -> Self:
        """The decoder that `save` wrote. `Refused` when the folder doesn't hold one."""
        folder = Path(folder)
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
        if missing:
            raise Refused(f"{str(folder)!r}: no {missing[0]} there; expected a folder that `Decoder.save` wrote.")
        config = DecoderConfig.from_json(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
        with torch.random.fork_rng(devices=[]):  # the initial weights are thrown away; the caller's dice stay put
            model = cls(config)
        load_model(model, str(folder / WEIGHTS_FILE))
        return model.to(device) if device is not None else model


def _sample(logits: Float[Tensor, "B V"], temperature: float, generator: torch.Generator | None) -> Int[Tensor, " B"]:
    if temperature <= 0.0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator)[:, 0]


def count_parameters(models: nn.Module | Sequence[nn.Module]) -> int:
    """Trainable numbers, shared ones counted once."""
    modules = [models] if isinstance(models, nn.Module) else models
    unique = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return sum(p.numel() for p in unique.values())
