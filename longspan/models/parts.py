"""Finding the parts of a causal language model by its layout, whatever its family is called.

Llama, Mistral, Qwen2, Qwen3, Phi3, Gemma and many more share one skeleton, and this is all that is assumed::

    model.get_decoder().layers[i].self_attn.{layer_idx, head_dim, num_key_value_groups, o_proj}
    model.get_decoder().rotary_emb.{inv_freq, attention_scaling}        (or one of each per layer type)

Rotary positions: with angles t·f (t the position, f a frequency), ``rotate`` turns each pair of channels by its angle
and ``unrotate`` turns it back. Scaled rotations (YaRN multiplies cos and sin) are divided by cos² + sin²; a partial
rotation touches the first channels only. Which channels make a pair, (i, i + R/2) or (2i, 2i + 1), is found by trying
the model's own function on random numbers. What can't be found is refused with the attributes that were looked for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.models.retrofitted import ENTRY
from longspan.registry import Refused

LOOKED_FOR = ("model.get_decoder().layers[i].self_attn.{o_proj, layer_idx, head_dim, num_key_value_groups} and "
              "model.get_decoder().rotary_emb.inv_freq")
Pairing = Literal["halves", "neighbours"]
_ROTATION = "apply_rotary_pos_emb"
_KNOWN_INSIDE = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm",
                 "rotary_emb", "attention_dropout"}
"""What an attention module may contain; anything else (gates, convolutions, indexers) changes what heads mean."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The pieces of one model. Works on any device, on ``meta`` and under a device map.

    Attributes:
        model: what was searched.
        decoder: the stack of layers with its embedding (``model.get_decoder()``).
        layers: the decoder layers in order.
        n_heads: query heads Hq of a layer; query head h reads key-value head ``h // (n_heads // n_kv_heads)``.
        n_kv_heads: key-value heads Hkv of a layer.
        head_dim: channels D of a head.
        pairing: which channels a rotation pairs.
    """

    model: Any
    decoder: Any
    layers: tuple[nn.Module, ...]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    pairing: Pairing

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype activations have."""
        return self.decoder.get_input_embeddings().weight.dtype

    def attention(self, layer: int) -> Any:
        """The attention module of a layer."""
        return self.layers[layer].self_attn

    def o_proj(self, layer: int) -> Float[Tensor, "hidden Hq D"]:
        """The output projection by head: contributions ``W[:, h] @ out_h`` of all heads sum to the output, bias apart.

        A view where the weight is a plain tensor; else (quantised, offloaded, with adapters) what the module does to
        the identity.
        """
        module = self.attention(layer).o_proj
        weight = module.weight
        if type(module) is not nn.Linear or (weight.is_meta and hasattr(module, "_hf_hook")):
            place = "cpu" if weight.is_meta and hasattr(module, "_hf_hook") else weight.device
            width = self.n_heads * self.head_dim
            with torch.no_grad():
                weight = module(torch.eye(width, device=place, dtype=self.dtype)).T
                if getattr(module, "bias", None) is not None:
                    weight = weight - module(torch.zeros(1, width, device=place, dtype=self.dtype)).T
        return weight.reshape(-1, self.n_heads, self.head_dim)

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see, itself included; None where it sees the whole past."""
        attention = self.attention(layer)
        if hasattr(attention, "sliding_window"):
            return attention.sliding_window or None
        types = self._layer_types()
        if types is not None and types[layer] != "sliding_attention":
            return None
        return getattr(self._config(), "sliding_window", None)

    def is_sliding(self, layer: int) -> bool:
        """Whether the layer sees only a window of the past."""
        return self.window(layer) is not None

    # -- rotary positions

    def rope(self, positions: Int[Tensor, "*P"], layer: int) -> tuple[Float[Tensor, "*P R"], Float[Tensor, "*P R"]]:
        """cos and sin of the rotary angles at any positions, as this layer uses them now.

        Frequencies that the model changes with the length of its input (``dynamic``, ``longrope``) are those of its
        latest forward, which are the ones its stored keys carry; asking changes nothing in the model.

        Args:
            positions: positions of any shape: (T), (B,T), or (B,Hkv,S) where heads keep different tokens.

        Returns:
            Two tensors in the model's dtype, R rotated channels last; cos 1 and sin 0 in a layer without rotation.
        """
        frequencies, scaling = self._frequencies(layer)
        frequencies = frequencies.to(positions.device, torch.float32)
        if getattr(self.attention(layer), "use_rope", True) in (False, 0):
            frequencies, scaling = torch.zeros_like(frequencies), 1.0
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), -1) if self.pairing == "halves" else angles.repeat_interleave(2, -1)
        return (angles.cos() * scaling).to(self.dtype), (angles.sin() * scaling).to(self.dtype)

    def rotate(self, x: Float[Tensor, "... T D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "... T D"]:
        """Apply rotary positions to the first R channels of queries or keys.

        Args:
            x: (B,H,T,D), or any shape that ends in (T,D).
            cos, sin: from `rope`; (B,T,R) is read as the same for all heads of a (B,H,T,D) tensor.
        """
        return _turn(x, cos, sin, self.pairing)

    def unrotate(self, x: Float[Tensor, "... T D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "... T D"]:
        """Undo `rotate`: the exact inverse, also of scaled rotations."""
        norm = cos.float().square() + sin.float().square()
        return _turn(x, cos / norm, -sin / norm, self.pairing)

    def _frequencies(self, layer: int) -> tuple[Tensor, float]:
        rotary, types = self.decoder.rotary_emb, self._layer_types()
        if hasattr(rotary, "inv_freq"):
            return rotary.inv_freq, float(getattr(rotary, "attention_scaling", 1.0))
        own = None if types is None else getattr(rotary, f"{types[layer]}_inv_freq", None)
        if own is None:
            raise _refused(self.model, "decoder.rotary_emb has no inv_freq")
        return own, float(getattr(rotary, f"{types[layer]}_attention_scaling", 1.0))  # type: ignore[index]

    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def _layer_types(self) -> list[str] | None:
        return getattr(self._config(), "layer_types", None)


def find_parts(model: Any) -> Parts:
    """Find the parts of a causal language model.

    Raises:
        Refused: a part is missing or works in a way nothing here can follow; the sentence names what was looked for.
    """
    if getattr(model, "denoises_blocks", False):
        raise Refused(f"{type(model).__name__} denoises blocks, which recipes of this kind can't carry; expected a model that "
                      "writes token by token.")
    if retrofit := getattr(getattr(model, "config", None), ENTRY, None):
        raise Refused(f"{type(model).__name__} was changed by {retrofit['name']}, whose layers keep caches of their own, so no "
                      "recipe can carry it; run it with model.generate.")
    if not hasattr(model, "get_decoder"):
        raise _refused(model, "no get_decoder()")
    decoder = model.get_decoder()
    layers = tuple(getattr(decoder, "layers", None) or ())
    if not layers:
        raise _refused(model, "decoder.layers is missing or empty")
    shapes = {_heads(model, layer, i) for i, layer in enumerate(layers)}
    if len(shapes) > 1:
        raise _refused(model, f"layers differ in (query heads, key-value heads, head size): {sorted(shapes)}")
    (n_heads, n_kv_heads, head_dim), = shapes
    if not hasattr(decoder, "rotary_emb"):
        raise _refused(model, "decoder.rotary_emb is missing")
    pairing = _pairing(type(layers[0].self_attn), hasattr(layers[0].self_attn, "use_rope"))  # type: ignore[arg-type]
    if pairing not in ("halves", "neighbours"):
        raise _refused(model, pairing)
    parts = Parts(model, decoder, layers, n_heads, n_kv_heads, head_dim, pairing)  # type: ignore[arg-type]
    for i in range(len(layers)):
        parts._frequencies(i)
    return parts


def kv_bytes_per_token(model: Any, dtype: torch.dtype | None = None) -> int:
    """Bytes that one token's keys and values take over all layers of a full cache, per row of the batch.

    Args:
        dtype: of the stored keys and values; the model's by default.
    """
    parts = find_parts(model)
    return 2 * parts.n_layers * parts.n_kv_heads * parts.head_dim * (dtype or parts.dtype).itemsize


# -------------------------------------------------------------------------------------------------------------- looking


def _heads(model: Any, layer: nn.Module, i: int) -> tuple[int, int, int]:
    """(Hq, Hkv, D) of one layer; refuses a layer whose attention is another kind of thing."""
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise _refused(model, f"layer {i} has no self_attn")
    missing = [a for a in ("o_proj", "layer_idx", "head_dim", "num_key_value_groups") if not hasattr(attention, a)]
    if missing:
        raise _refused(model, f"layer {i}'s self_attn has no {', no '.join(missing)}")
    inside = {name for name, _ in (*attention.named_children(), *attention.named_parameters(recurse=False))}
    if strange := sorted(inside - _KNOWN_INSIDE):
        raise _refused(model, f"layer {i}'s self_attn also has {strange[0]}, which nothing here can follow")
    second = next((name for name, child in layer.named_children() if name != "self_attn" and _takes_cache(child)), None)
    if second is not None:
        raise _refused(model, f"layer {i} keeps a state in {second} beside its attention")
    if not hasattr(attention.o_proj, "in_features"):
        raise _refused(model, f"layer {i}'s self_attn.o_proj is no linear layer")
    if getattr(attention, "is_kv_shared_layer", False):
        raise _refused(model, f"layer {i} reads another layer's keys and values")
    if attention.layer_idx != i:
        raise _refused(model, f"layer {i}'s self_attn.layer_idx is {attention.layer_idx}")
    head_dim, width = attention.head_dim, attention.o_proj.in_features
    heads = width // head_dim
    if heads * head_dim != width or heads % attention.num_key_value_groups:
        raise _refused(model, f"layer {i}'s o_proj takes {width} channels, not whole groups of heads of {head_dim}")
    return heads, heads // attention.num_key_value_groups, head_dim


def _takes_cache(module: nn.Module) -> bool:
    return not {"past_key_values", "cache", "cache_params"}.isdisjoint(inspect.signature(module.forward).parameters)


def _refused(model: Any, what: str) -> Refused:
    return Refused(f"{type(model).__name__}: {what}; looked for {LOOKED_FOR}, the layout of Llama, Mistral, Qwen2, "
                   "Qwen3, Phi3 and Gemma.")


# ------------------------------------------------------------------------------------------------------------- rotation


def _partner(x: Tensor, pairing: Pairing) -> Tensor:
    """Each channel's partner in its pair, negated for the first of the two."""
    if pairing == "halves":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    rotated = cos.shape[-1]
    if rotated > x.shape[-1]:
        raise ValueError(f"cos has {rotated} channels, x {tuple(x.shape)} only {x.shape[-1]}.")
    if x.dim() == 4 and cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    head = x[..., :rotated].float()
    head = (head * cos.float() + _partner(head, pairing) * sin.float()).to(x.dtype)
    return head if rotated == x.shape[-1] else torch.cat((head, x[..., rotated:]), -1)


@functools.lru_cache(maxsize=64)
def _pairing(attention: type[nn.Module], tells_layers: bool) -> str:
    """Which channels this attention class rotates together, or the reason why that can't be known.

    The function it calls is tried on random numbers. A call under a condition means that some layers aren't rotated;
    only a module that says so itself (``use_rope``) can be followed then.
    """
    function = getattr(sys.modules.get(attention.__module__), _ROTATION, None)
    if function is None:
        return f"its attention doesn't rotate through {_ROTATION}"
    if _is_conditional(attention.forward) and not tells_layers:
        return "its attention rotates only some layers, and has no use_rope that says which"
    draw = torch.Generator().manual_seed(0)
    x, angles = torch.randn(1, 1, 1, 8, generator=draw), torch.randn(1, 1, 4, generator=draw)
    halves, neighbours = torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)
    trials: list[tuple[Pairing, Tensor, Tensor]] = [
        ("halves", halves, halves), ("neighbours", neighbours, neighbours), ("neighbours", halves, neighbours)]
    for pairing, given, ours in trials:
        found = _try(function, x, given)
        if found is not None and torch.allclose(found, _turn(x, ours.cos(), ours.sin(), pairing), atol=1e-5):
            return pairing
    return f"its {_ROTATION} pairs channels in a way that is neither (i, i + R/2) nor (2i, 2i + 1)"


def _try(function: Callable[..., Any], x: Tensor, angles: Tensor) -> Tensor | None:
    try:
        return function(x, x, angles.cos(), angles.sin())[0]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None


def _is_conditional(forward: Callable[..., Any]) -> bool:
    """Whether the rotation is called inside an ``if`` of `forward`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", None)) == _ROTATION
               for branch in ast.walk(tree) if isinstance(branch, ast.If) for call in ast.walk(branch))
