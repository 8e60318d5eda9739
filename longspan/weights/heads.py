"""Changing single heads in a model's weights: scaling a head's query channels, or silencing a head."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.models import Parts
from longspan.models.frequency_kernels import query_norm, rotary_pairs
from longspan.registry import Refused
from longspan.weights.base import edited

Head = tuple[int, int]
"""Layer and query head."""


@contextmanager
def scaled_queries(parts: Parts, gains: Mapping[Head, Float[Tensor, P]]) -> Iterator[None]:
    """Multiply both query channels of every rotated pair by a number, for some heads, until the block ends.

    Rows of the query weights (and bias) are scaled. Where a norm follows them, which would undo part of that, the
    norm's output is scaled instead: its weight is the same for all heads, so it can't be.

    Args:
        gains: per (layer, head) one number a pair, highest frequency first. Channels without rotation stay.

    Raises:
        Refused: no such head, another number of pairs, or weights that aren't plain numbers.
    """
    check_heads(parts, list(gains))
    with ExitStack() as stack:
        for layer in sorted({layer for layer, _ in gains}):
            own = {head: _by_channel(parts, layer, g) for (at, head), g in gains.items() if at == layer}
            norm = query_norm(parts.attention(layer))
            if norm is not None:
                stack.callback(norm.register_forward_hook(_scaling(own, parts.n_heads, parts.head_dim)).remove)
                continue
            attention = parts.attention(layer)
            module = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj
            for weight in _plain(module, f"layer {layer}'s query projection"):
                for head, gain in own.items():
                    rows = slice(head * parts.head_dim, (head + 1) * parts.head_dim)
                    factor = gain.to(weight.device).view(-1, *[1] * (weight.dim() - 1))
                    stack.enter_context(edited(weight, (rows,), functools.partial(_times, factor)))
        yield


@contextmanager
def silent_heads(parts: Parts, heads: Sequence[Head]) -> Iterator[None]:
    """Take heads out until the block ends: their columns of the output projection are 0."""
    check_heads(parts, heads)
    with ExitStack() as stack:
        for layer, head in dict.fromkeys(heads):
            weight = _plain(parts.attention(layer).o_proj, f"layer {layer}'s output projection")[0]
            columns = slice(head * parts.head_dim, (head + 1) * parts.head_dim)
            stack.enter_context(edited(weight, (slice(None), columns), torch.zeros_like))
        yield


def check_heads(parts: Parts, heads: Sequence[Head]) -> None:
    """Refuse heads that the model doesn't have."""
    for layer, head in heads:
        if not (0 <= layer < parts.n_layers and 0 <= head < parts.n_heads):
            near = min(max(layer, 0), parts.n_layers - 1), min(max(head, 0), parts.n_heads - 1)
            raise Refused(f"there is no head {(layer, head)}; the model has {parts.n_layers} layers of {parts.n_heads} "
                          f"query heads, counted from 0, and the nearest is {near}.")


def _by_channel(parts: Parts, layer: int, gain: Float[Tensor, P]) -> Float[Tensor, D]:
    """A number for every channel of a head, from one for every pair."""
    pairs = rotary_pairs(parts, layer)
    if gain.shape != (pairs,):
        raise Refused(f"{gain.numel()} multipliers were given for a head of {pairs} rotated pairs; expected {pairs}.")
    both = torch.cat((gain, gain)) if parts.pairing == "halves" else gain.repeat_interleave(2)
    return torch.cat((both, both.new_ones(parts.head_dim - 2 * pairs)))


def _plain(module: Any, what: str) -> list[Tensor]:
    """Weight and bias of a linear layer that holds plain numbers."""
    if type(module) is not nn.Linear or module.weight.is_meta or not module.weight.is_floating_point():
        kind = "offloaded" if type(module) is nn.Linear and module.weight.is_meta else type(module).__name__
        raise Refused(f"{what} is {kind}, whose weights can't be changed in place; expected a plain nn.Linear: load the "
                      "model unquantised, on a device, with adapters merged.")
    return [module.weight] if module.bias is None else [module.weight, module.bias]


def _scaling(gains: Mapping[int, Float[Tensor, D]], heads: int, dim: int) -> Any:
    """A forward hook that scales the channels of some heads in what a query norm returns."""
    table = torch.ones(heads, dim)
    for head, gain in gains.items():
        table[head] = gain

    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        factor = table.to(out.device)
        if out.shape[-1] == heads * dim:
            factor = factor.flatten()
        elif _heads_before_tokens(args[0], heads, dim):
            factor = factor[:, None]
        return _times(factor, out).to(out.dtype)

    return hook


def _times(factor: Tensor, x: Tensor) -> Tensor:
    """A product in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * factor.to(dtype)


def _heads_before_tokens(x: Tensor, heads: int, dim: int) -> bool:
    """Whether x is (B,H,T,D) rather than (B,T,H,D). Families norm before or after they move the heads; where T = H, the
    memory tells, for the projection wrote heads next to each other."""
    if x.shape[-2] == heads and x.shape[-3] != heads:
        return False
    if x.shape[-3] == heads and x.shape[-2] != heads:
        return True
    return x.stride(-3) == dim and x.stride(-2) != dim
