"""L2A as a retrofit: every layer of a pretrained model gets a second, gated attention (arXiv:2603.17484).

The layer's own attention becomes local (a sliding window). The second attention starts as its copy, norms included, and
sees everything; the router starts at zero, so that all tokens fire. The start is not function-preserving: attention is
added twice, which training with the price of `l2a-next-token` repairs. Trained are attention, norms and router; the
MLP and the embeddings stay. Afterwards the global path of the layers that skip most can be dropped (`prune`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from longspan.layers.attention.l2a import FIRES, IMPLEMENTATIONS, GlobalAttention, L2AModule, check_gate, prune
from longspan.layers.attention.softmax import SoftmaxAttention
from longspan.models import Parts, find_parts
from longspan.registry import Refused, knob, method
from longspan.training.base import Batches
from longspan.training.l2a import firing_rates
from longspan.training.retrofits.base import ENTRY, Retrofit, Tuned
from longspan.training.retrofits.remembering import prepare
from longspan.training.retrofits.two_stores import (
    NormedProjection,
    TwoAttentions,
    TwoStoreCache,
    converted,
    second_projections,
)

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}


@method("l2a-retrofit", kind="retrofit", system="l2a", paper="arXiv:2603.17484", capabilities=("trains",),
        summary="Makes a model's attention local and adds a global one for the tokens a router lets through.")
class L2ARetrofit(Retrofit):
    """For models with Llama's layers (Llama, Mistral, Qwen2, Qwen3); ``--retrofit l2a`` means this one."""

    window: int = knob(256, "tokens the local attention sees, the query's included", low=1)
    temperature: float = knob(0.1, "T of the soft gate sigmoid(z/T)", low=0.0)
    theta: float = knob(0.5, "soft gate from which a token fires", low=0.0, high=1.0)
    leak: float = knob(0.1, "probability, per layer and step, that skipped tokens train the router too", low=0.0, high=1.0)
    implementation: str = knob("sparse", "compute the firing queries, or all and mask", choices=IMPLEMENTATIONS)
    layers: str | None = knob(None, 'which layers, such as "0-5,8"; None for all')

    objective = "l2a-next-token"

    def check(self) -> None:
        check_gate(self.temperature, self.theta)

    def _convert(self, model: Any) -> None:
        parts = find_parts(model)
        chosen = self._chosen(parts)
        for i in chosen:
            _fits(parts, i)
        for i in chosen:
            self._convert_layer(parts, i)
        parts.decoder.register_forward_pre_hook(functools.partial(prepare, kind=TwoStoreCache), with_kwargs=True)

    def _chosen(self, parts: Parts) -> list[int]:
        if self.layers is not None:
            return chosen_layers(self.layers, parts.n_layers)
        sliding = [i for i in range(parts.n_layers) if parts.is_sliding(i)]
        if sliding:
            raise Refused(f"layer {sliding[0]} of {type(parts.model).__name__} already has a window of "
                          f"{parts.window(sliding[0])} tokens; say which layers to convert, such as "
                          f'layers="0-{parts.n_layers - 1}".')
        return list(range(parts.n_layers))

    def _convert_layer(self, parts: Parts, i: int) -> None:
        layer: Any = parts.layers[i]
        attention, norm = layer.self_attn, layer.input_layernorm
        dim = parts.o_proj(i).shape[0]
        shape = (dim, parts.n_heads, parts.n_kv_heads, parts.head_dim)
        with torch.device("meta"):  # every weight is taken from the model
            local, everything = SoftmaxAttention(*shape, self.window), GlobalAttention(*shape)
        second = second_projections(attention)
        for ours, given in ((local, {name: getattr(attention, name) for name in PROJECTIONS}), (everything, second)):
            for name, projection in given.items():
                setattr(ours, name, projection)
            _normalise(ours, attention, parts.head_dim, again=ours is everything)
        mixer = L2AModule(local, copy.deepcopy(norm), everything, dim, self).to(norm.weight.device, norm.weight.dtype)
        layer.self_attn = TwoAttentions(norm, mixer, parts, i).train(attention.training)
        layer.input_layernorm = nn.Identity()

    def _trained(self, model: Any) -> list[nn.Module]:
        decoder = model.get_decoder()
        inside = [child for layer in decoder.layers for name, child in layer.named_children() if name != "mlp"]
        return [*inside, decoder.norm]

    def prune(self, model: Any, layers: Sequence[int], *, allow_local_only: bool = False) -> None:
        """Drop the global path of these layers: weights, and keys and values in caches from now on.

        Raises `Refused` for a layer that has none to drop, and when none would be left unless `allow_local_only`.
        """
        decoder = model.get_decoder()
        inside = converted(decoder)
        for layer in layers:
            if layer not in inside:
                raise Refused(f"layer {layer} has no global path of l2a; expected one of {_spans(inside)}.")
        mixers = [decoder.layers[i].self_attn.mixer for i in inside]
        prune(mixers, [inside.index(layer) for layer in layers], allow_local_only=allow_local_only)
        if entry := getattr(model.config, ENTRY, None):
            entry["pruned"] = sorted({*entry["pruned"], *layers})


# ------------------------------------------------------------------------------------------------------ what is asked


@torch.no_grad()
def skip_rates(model: Any, batches: Batches, count: int) -> dict[int, float]:
    """The share of real tokens that skip global attention, by layer (pruned ones left out): 1 - mean(m) over batches."""
    decoder, tuned, was_training = model.get_decoder(), Tuned(model), model.training
    layers = [i for i in converted(decoder) if decoder.layers[i].self_attn.mixer.everything is not None]
    fired, tokens = torch.zeros(len(layers)), 0.0
    model.eval()
    try:
        for index in range(count):
            batch = batches(index).to(model.device)
            ctx = tuned(batch.ids, valid=batch.valid, segments=batch.segments).ctx
            real = float(batch.ids.numel() if batch.valid is None else batch.valid.sum())
            fired += firing_rates(ctx.auxiliary[FIRES], ctx.valid).cpu() * real
            tokens += real
    finally:
        model.train(was_training)
    return dict(zip(layers, (1.0 - fired / tokens).tolist()))


def most_skipped(rates: dict[int, float], n: int) -> list[int]:
    """The `n` layers that skip most, in order of the model; of equals the later."""
    return sorted(sorted(rates, key=lambda layer: (rates[layer], layer))[len(rates) - n :])


def chosen_layers(text: str, n_layers: int) -> list[int]:
    """The layers that a text such as ``"0-5,8"`` names. `Refused` for anything else."""
    found: set[int] = set()
    for piece in text.split(","):
        ends = [end.strip() for end in piece.split("-")]
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[-1]):
            raise Refused(f'layers={text!r}: expected numbers and ranges, such as "0-{n_layers - 1}".')
        found.update(range(int(ends[0]), int(ends[-1]) + 1))
    if max(found) >= n_layers:
        raise Refused(f'layers={text!r}: expected layers from 0 to {n_layers - 1}, such as "0-{n_layers - 1}".')
    return sorted(found)


def _fits(parts: Parts, i: int) -> None:
    """Refuse a layer that isn't Llama's, before anything is changed."""
    layer, attention = parts.layers[i], parts.attention(i)
    name = type(parts.model).__name__
    strange = {n for n, _ in layer.named_children()} ^ LAYER
    if strange:
        raise Refused(f"{name}: layer {i} differs from Llama's in {min(strange)}; expected a layer of exactly "
                      f"{', '.join(sorted(LAYER))}.")
    missing = PROJECTIONS - {n for n, _ in attention.named_children()}
    if missing:
        raise Refused(f"{name}: layer {i}'s attention has no {min(missing)}; expected q_proj, k_proj, v_proj and o_proj.")
    if abs(float(getattr(attention, "scaling", parts.head_dim**-0.5)) - parts.head_dim**-0.5) > 1e-6:
        raise Refused(f"{name}: layer {i} scales its scores by {attention.scaling}; expected 1/sqrt({parts.head_dim}).")
    for norm in ("q_norm", "k_norm"):
        found = getattr(attention, norm, None)
        if found is not None and tuple(found.weight.shape) != (parts.head_dim,):
            raise Refused(f"{name}: layer {i}'s {norm} spans all heads; expected one over {parts.head_dim} channels.")


def _normalise(ours: Any, attention: Any, head_dim: int, *, again: bool) -> None:
    """Queries and keys normalised where the base's are; with `again`, by copies of its norms."""
    for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
        found = getattr(attention, norm, None)
        if found is not None:
            found = copy.deepcopy(found) if again else found
            setattr(ours, projection, NormedProjection(getattr(ours, projection), found, head_dim))


def _spans(layers: Sequence[int]) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else "none"
