"""Reading and changing what attention heads put out, before the output projection.

A forward pre-hook on the output projection sees the outputs of all query heads side by side, (B,T,Hq D), whatever the model
is: one of transformers with the usual layout, or the project's own decoder. Heads are query heads; under grouped queries
several of them share keys and values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longspan.evaluation.order.edits import Change
from longspan.layers.attention.base import AttentionModule
from longspan.models.decoder import Decoder
from longspan.models.parts import find_parts
from longspan.registry import Refused


@dataclass(frozen=True, eq=False)
class Heads:
    """The output projections of a model's layers, and how their input is cut into heads."""

    projections: tuple[nn.Module, ...]
    n_heads: int
    head_dim: int


def find_heads(model: Any) -> Heads:
    """The heads of a causal LM of transformers, or of a `Decoder` (or a module that holds one).

    Raises:
        Refused: the model has no attention heads of a known layout; the task itself can still be asked of it.
    """
    decoder = next((m for m in model.modules() if isinstance(m, Decoder)), None) if isinstance(model, nn.Module) else None
    if decoder is None:
        try:
            parts = find_parts(model)
        except Refused as error:
            raise Refused(f"heads can't be read, only the task can be asked: {error}") from error
        return Heads(tuple(parts.attention(i).o_proj for i in range(parts.n_layers)), parts.n_heads, parts.head_dim)
    found = [m for m in decoder.modules() if isinstance(m, AttentionModule)]
    shapes = {(m.n_heads, m.o_proj.in_features // m.n_heads) for m in found}
    if len(shapes) != 1:
        raise Refused(f"{type(model).__name__}: {len(found)} attention layers with {len(shapes)} shapes of heads; expected "
                      "layers of one shape, otherwise heads can't be read and only the task can be asked.")
    (n_heads, head_dim), = shapes
    return Heads(tuple(m.o_proj for m in found), n_heads, head_dim)


def averaging(spans: Sequence[Sequence[tuple[int, int]]], T: int) -> Float[Tensor, "B S T"]:
    """The matrix that averages tokens over spans: one list of (first, end) for each row of the batch.

    Raises ValueError for an empty span, one beyond the T tokens, or rows with different numbers of spans.
    """
    if len({len(row) for row in spans}) != 1:
        raise ValueError(f"rows have different numbers of spans: {sorted({len(row) for row in spans})}")
    made = torch.zeros(len(spans), len(spans[0]), T)
    for b, row in enumerate(spans):
        for s, (first, end) in enumerate(row):
            if not 0 <= first < end <= T:
                raise ValueError(f"span ({first}, {end}) should lie in 0 to {T} and hold a token")
            made[b, s, first:end] = 1 / (end - first)
    return made


@contextlib.contextmanager
def recorded(heads: Heads, pool: Float[Tensor, "B S T"]) -> Iterator[list[Float[Tensor, "B S Hq D"]]]:
    """While inside, each forward adds the pooled outputs of every layer to the list that is given, in order of layers.

    `pool` is that of `averaging`; a single row of it serves every row of the batch. Meant for one forward.
    """
    found: list[Tensor] = []

    def note(x: Tensor) -> None:
        if x.shape[1] != pool.shape[2]:
            raise ValueError(f"a pass of {x.shape[1]} tokens, but the spans are of {pool.shape[2]}")
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        pooled = pool.to(wide).expand(x.shape[0], -1, -1) @ wide
        found.append(pooled.view(*pooled.shape[:2], heads.n_heads, heads.head_dim))

    with contextlib.ExitStack() as hooks:
        for module in heads.projections:
            hooks.enter_context(_before(module, lambda x: note(x)))
        yield found


@contextlib.contextmanager
def changed(heads: Heads, layer: int, head: int, change: Change, places: Bool[Tensor, "#B T"]) -> Iterator[None]:
    """While inside, one head's outputs at these places are what `change` makes of them.

    Raises ValueError for a layer or head that the model doesn't have.
    """
    if not (0 <= layer < len(heads.projections) and 0 <= head < heads.n_heads):
        raise ValueError(f"no head {head} in layer {layer}: there are {heads.n_heads} heads in {len(heads.projections)} layers")

    def edit(x: Tensor) -> Tensor:
        split = x.view(*x.shape[:2], heads.n_heads, heads.head_dim)
        new = torch.where(places.to(x.device)[..., None], change(split[:, :, head]), split[:, :, head])
        return torch.cat((split[:, :, :head], new[:, :, None], split[:, :, head + 1 :]), 2).flatten(2)

    with _before(heads.projections[layer], edit):
        yield


@contextlib.contextmanager
def _before(module: nn.Module, what: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """A forward pre-hook on the module's first argument, for a while."""

    def hook(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        found = what(arguments[0])
        return None if found is None else (found, *arguments[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
